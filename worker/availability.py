"""Whether a worker takes new requests: it has a model, its engine lives, it is to stay."""

import uuid

from shared.errors import ServingError, UnavailableError
from worker.messages import Ready

# What a client is told to wait, where waiting may help.
RETRY_AFTER_MS = 1000


class Availability:
    """What is served now, if anything is, and what stands in the way of new requests."""

    def __init__(self) -> None:
        self.is_draining = False
        # How long the engine has sent nothing, once that is too long.
        self.silent_s = 0.0
        self._ready: Ready | None = None
        self._instance_id = ""

    def engine_is_ready(self, ready: Ready) -> None:
        """An engine process has started, the first one or another."""
        self._ready, self._instance_id = ready, uuid.uuid4().hex

    def engine_is_lost(self) -> None:
        self._ready, self.silent_s = None, 0.0

    def served(self) -> tuple[Ready, str]:
        """What is served, and the id of this start of the engine. Raises UnavailableError."""
        if self._ready is None:
            raise _not_loaded()
        return self._ready, self._instance_id

    def refusal(self) -> ServingError | None:
        """Why no new request is taken now."""
        if self.is_draining:
            return UnavailableError("this worker is shutting down")
        if self._ready is None:
            return _not_loaded()
        if self.silent_s:
            return UnavailableError(f"the engine has been silent for {self.silent_s:.0f} s")
        return None


def _not_loaded() -> UnavailableError:
    return UnavailableError("the model is not loaded yet", retry_after_ms=RETRY_AFTER_MS)
