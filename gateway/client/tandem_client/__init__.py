"""A client of Tandem: text in, text out, over gRPC.

    from tandem_client import Client, Delta

    with Client("127.0.0.1:50051") as client:
        for event in client.stream("Once upon a time", max_tokens=64):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Needs gRPC and protobuf, and nothing of the services
but their generated stubs.
"""

from tandem_client.aio import AsyncClient, AsyncStream
from tandem_client.connection import Tls
from tandem_client.errors import (
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TandemError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from tandem_client.events import (
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Started,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from tandem_client.options import ChatOptions, GenerateOptions, Message, Prompt
from tandem_client.retries import NO_RETRIES, RetryPolicy
from tandem_client.service_info import Load, Model, WorkerLoad
from tandem_client.sync import Client, Stream

__all__ = [
    "NO_RETRIES",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "CallCancelledError",
    "ChatOptions",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Event",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InternalError",
    "InvalidArgumentError",
    "Load",
    "Message",
    "Model",
    "NotFoundError",
    "Prompt",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Started",
    "Stream",
    "TandemError",
    "Timings",
    "Tls",
    "TokenLogprob",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "WorkerLoad",
]
