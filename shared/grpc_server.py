"""The gRPC server of both services, which no call can end whatever its path is.

grpcio 1.84 and 1.85 decode the path of each call in the loop that takes the calls up. One
that is no UTF-8 ends this loop, and with it the server and all its calls, and whoever can
connect can send one: tokens are asked for later. Methods that are registered, as generated
code does with all of them, come another way, so nothing is lost by never looking at the path
of any other call. The parts used for it are grpcio's own and not public, which is why
pyproject.toml goes no further than the versions that were tried.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

from shared.grpc_options import GrpcOptions


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: GrpcOptions
) -> grpc.aio.Server:
    """A server for services that generated code adds. Must be made on the event loop."""
    return cast(grpc.aio.Server, _Server(interceptors, options))


class _Server(Server):
    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: GrpcOptions
    ) -> None:
        # In place of the base's, which would make the core that it has to be without.
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, tuple(interceptors), options)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls up: those of registered methods as ever, all others in a way of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interceptors: tuple[grpc.aio.ServerInterceptor, ...],
        options: GrpcOptions,
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        # The base's are hidden from Python.
        self._own_loop = loop
        self._own_interceptors = interceptors
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        # Where the base has one for each call, this lasts until the server stops.
        return self._own_loop.create_task(self._answer_unknown_methods())

    def resolve_handler(self, _: object) -> None:
        """No method but the registered ones is there."""

    async def _answer_unknown_methods(self) -> None:
        """UNIMPLEMENTED, or what an interceptor says first."""
        while True:
            state = await self._request_call()
            answer = cygrpc._handle_rpc(
                "", self, self._own_interceptors, state, self._own_loop, False
            )
            call = self._own_loop.create_task(
                cygrpc._schedule_rpc_coro(answer, state, self._own_loop, "")
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
