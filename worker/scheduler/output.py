"""What the scheduler has to tell since it was last asked."""

from typing import TypeVar

import numpy as np

from shared.errors import ServingError
from worker.messages import Failed, Finished, Load, Started, StepOutput, TokenLogprobs
from worker.step import Int32Array, Int64Array

_NO_UIDS = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)

_Array = TypeVar("_Array", Int32Array, Int64Array)


class OutputBuffer:
    """Collects; `drain` empties it into one message."""

    def __init__(self) -> None:
        self._uids: list[Int64Array] = []
        self._token_ids: list[Int32Array] = []
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._failed: list[Failed] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def is_empty(self) -> bool:
        return not (self._uids or self._started or self._finished or self._failed or self._logprobs)

    def add_tokens(self, uids: Int64Array, token_ids: Int32Array) -> None:
        """Takes over both arrays, which are of one length."""
        if len(uids):
            self._uids.append(uids)
            self._token_ids.append(token_ids)

    def add_logprobs(self, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def add_started(self, started: Started) -> None:
        self._started.append(started)

    def add_finished(self, finished: Finished) -> None:
        self._finished.append(finished)

    def add_failed(self, uid: int, error: ServingError) -> None:
        self._failed.append(
            Failed(uid, error.code, error.message, error.field, error.retry_after_ms)
        )

    def drain(self, load: Load, now: float) -> StepOutput:
        output = StepOutput(
            uids=_joined(self._uids, _NO_UIDS),
            token_ids=_joined(self._token_ids, _NO_TOKENS),
            started=tuple(self._started),
            finished=tuple(self._finished),
            failed=tuple(self._failed),
            load=load,
            committed_at=now,
            logprobs=tuple(self._logprobs),
        )
        self._uids, self._token_ids = [], []
        self._started, self._finished, self._failed, self._logprobs = [], [], [], []
        return output


def _joined(arrays: list[_Array], nothing: _Array) -> _Array:
    # One step's, nearly always, and then nothing is copied.
    return arrays[0] if len(arrays) == 1 else np.concatenate([nothing, *arrays])
