"""What a call can fail with: one tree, with a class for each status that a gateway answers."""

from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request, by its path in the proto, and what is wrong with it."""

    field: str
    description: str


class TandemError(Exception):
    """A call that failed: its status, the server's words and, where told, what to do."""

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.violations = violations
        # When the server expects to have room; None where it does not say.
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidArgumentError(TandemError):
    """A value that must be changed; `violations` name its field."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class UnimplementedError(TandemError):
    """A field or call that this server does not serve."""

    code = grpc.StatusCode.UNIMPLEMENTED


class NotFoundError(TandemError):
    """The named model is not served there."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(TandemError):
    """A live request has this id; it is unaffected."""

    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhaustedError(TandemError):
    """The queue is full (then `retry_after_s` is set), or a message is too large."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(TandemError):
    """Nobody answers, no worker is ready, the service drains, or the worker was lost."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(TandemError):
    """The call's timeout passed, its retries included."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelledError(TandemError):
    """The call was cancelled, as by closing its client."""

    code = grpc.StatusCode.CANCELLED


class UnauthenticatedError(TandemError):
    """The gateway wants a token, and another one than it got."""

    code = grpc.StatusCode.UNAUTHENTICATED


class InternalError(TandemError):
    """A fault of the server's; its log says more."""

    code = grpc.StatusCode.INTERNAL


_CLASSES: tuple[type[TandemError], ...] = (
    InvalidArgumentError,
    UnimplementedError,
    NotFoundError,
    AlreadyExistsError,
    ResourceExhaustedError,
    UnavailableError,
    DeadlineExceededError,
    CallCancelledError,
    UnauthenticatedError,
    InternalError,
)


def error_of(failed: grpc.RpcError) -> TandemError:
    """The error that a failed call of gRPC's stands for, with its google.rpc details."""
    # Whatever gRPC raises for a call is also that call.
    call = cast(grpc.Call, failed)
    code = call.code()
    cls = next((cls for cls in _CLASSES if cls.code is code), TandemError)
    violations, retry_after_s = _details(call)
    message = call.details() or "the server gave no reason"
    return cls(message, code=code, violations=violations, retry_after_s=retry_after_s)


def _details(call: grpc.Call) -> tuple[tuple[FieldViolation, ...], float | None]:
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    _unpack(call, bad_request, retry)
    violations = tuple(
        FieldViolation(violation.field, violation.description)
        for violation in bad_request.field_violations
    )
    if not retry.HasField("retry_delay"):
        return violations, None
    return violations, retry.retry_delay.ToMilliseconds() / 1e3


def _unpack(call: grpc.Call, *wanted: Message) -> None:
    """Fills those messages that the status holds."""
    for key, value in call.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        try:
            for detail in status_pb2.Status.FromString(cast(bytes, value)).details:
                for message in wanted:
                    detail.Unpack(message)
        except DecodeError:
            # Some proxy's own; the status itself still says what matters.
            continue
