"""The public service, doing for each call what a test wrote down before."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, TypeAlias

import grpc

from shared.errors import ServingError
from shared.grpc_options import server_options
from shared.interceptors import server_interceptors
from shared.notifier import Notifier
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Step: TypeAlias = pb.GenerateStreamResponse | ServingError


def started(index: int = 0, **fields: Any) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(started=pb.Started(index=index, request_id="r", **fields))


def delta(text: str, index: int = 0, **fields: Any) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(delta=pb.Delta(index=index, text=text, **fields))


def finished(index: int = 0, **fields: Any) -> pb.GenerateStreamResponse:
    fields = {"finish_reason": pb.FINISH_REASON_LENGTH, **fields}
    return pb.GenerateStreamResponse(finished=pb.Finished(index=index, **fields))


WHOLE: tuple[Step, ...] = (started(), delta("Hel"), delta("lo"), finished())


class ScriptedServer(pb_grpc.InferenceServiceServicer):
    """On loopback, in this event loop. The last script stands for all further calls."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.scripts: list[Sequence[Step]] = [WHOLE]
        self.requests: list[pb.GenerateRequest] = []
        self.called = Notifier()
        self.tokens: list[str | bytes] = []
        self.num_model_calls = 0
        self.model_errors: list[ServingError] = []
        self.address = address
        self._server = grpc.aio.server(interceptors=server_interceptors(), options=server_options())

    async def __aenter__(self) -> Self:
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        metadata = context.invocation_metadata() or ()
        self.tokens += [value for key, value in metadata if key == "authorization"]
        self.called.notify()
        for step in script:
            if isinstance(step, ServingError):
                raise step
            yield step

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        self.num_model_calls += 1
        self.called.notify()
        if self.model_errors:
            raise self.model_errors.pop(0)
        return pb.GetModelResponse(model="scripted", vocab_size=7, eos_token_ids=[1, 2])
