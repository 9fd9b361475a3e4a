"""Readiness of a server, told through grpc.health.v1."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer


class Readiness:
    """Whether this server takes requests, under "" and its service's full name.

    Begins NOT_SERVING, so that the port can be bound before the work is done. Check
    answers at once; Watch keeps watching.
    """

    def __init__(self, *service_names: str) -> None:
        self._names = ("", *service_names)
        self._servicer = HealthServicer()
        self._is_serving = False
        self._is_shut_down = False

    async def attach(self, server: grpc.aio.Server) -> None:
        """Adds the health service; call before the server starts."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    async def set_serving(self) -> None:
        """Ignored after `shut_down`."""
        if self._is_shut_down:
            return
        await self._set(health_pb2.HealthCheckResponse.SERVING)
        self._is_serving = True

    async def set_not_serving(self) -> None:
        self._is_serving = False
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def shut_down(self) -> None:
        """NOT_SERVING for good: a later `set_serving` changes nothing."""
        self._is_serving, self._is_shut_down = False, True
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._names:
            await self._servicer.set(name, status)
