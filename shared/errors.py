"""The one tree of errors that a caller or a load can cause.

Knows nothing of gRPC: `shared.interceptors` turns these into statuses, and that is
the only place that does.
"""

from enum import IntEnum


class Code(IntEnum):
    """google.rpc.Code, as numbers, so that the scheduler needs no gRPC."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class ServingError(Exception):
    """An error with a status: what was wrong, the limit and the value, what to do."""

    code = Code.INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class InvalidArgumentError(ServingError):
    """A parameter the caller must change; `field` is its path in the request."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class UnimplementedError(ServingError):
    """A field of the contract that this build does not serve yet."""

    code = Code.UNIMPLEMENTED

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not supported by this server; leave it unset", field=field)


class NotFoundError(ServingError):
    """The named model is not served here."""

    code = Code.NOT_FOUND


class AlreadyExistsError(ServingError):
    """A live request has this id."""

    code = Code.ALREADY_EXISTS


class QueueFullError(ServingError):
    """No room to wait; worth trying again after `retry_after_ms`."""

    code = Code.RESOURCE_EXHAUSTED


class UnavailableError(ServingError):
    """No ready worker, draining, or the worker was lost."""

    code = Code.UNAVAILABLE


class DeadlineExceededError(ServingError):
    """The caller's deadline passed, queued or running."""

    code = Code.DEADLINE_EXCEEDED


class UnauthenticatedError(ServingError):
    """The call brings no token that is known here."""

    code = Code.UNAUTHENTICATED


class EngineError(ServingError):
    """The engine failed in a step; ends the requests of that step, no other."""

    code = Code.INTERNAL


class EngineLostError(EngineError):
    """The engine failed in a step and cannot take another: its process must be replaced."""


class SettingsError(Exception):
    """A setting names something that cannot be used: the file, and what is wrong with it.

    No status: at the start it ends the process with exit code 2; later the former state stays.
    """


_CLASS_OF_CODE: dict[Code, type[ServingError]] = {
    Code.NOT_FOUND: NotFoundError,
    Code.ALREADY_EXISTS: AlreadyExistsError,
    Code.RESOURCE_EXHAUSTED: QueueFullError,
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: DeadlineExceededError,
}


def error_of(code: int, message: str, *, field: str = "", retry_after_ms: int = 0) -> ServingError:
    """The error that a failure received over the wire stands for."""
    cls = _CLASS_OF_CODE.get(Code(code), ServingError)
    error = cls(message, field=field, retry_after_ms=retry_after_ms)
    error.code = Code(code)
    return error
