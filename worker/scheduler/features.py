"""What running requests ask beyond an ordinary draw, by row: adjusted logits, masks, logprobs.

A step of rows that ask for nothing costs one comparison (`num_open`).
"""

from collections.abc import Iterable, Sequence

import numpy as np

from worker.messages import NewRequest
from worker.scheduler.request import Chunk, Request
from worker.step import BoolArray, EngineInfo, IndexArray, Int32Array, LogprobsPlan, RowOpening

_NONE = np.empty(0, np.int32)
_NOT_ASKED = -1


class RowFeatures:
    """Flags of every row; those of rows that are not open are neutral."""

    def __init__(self, info: EngineInfo, eos_token_ids: Iterable[int]) -> None:
        shape = info.max_rows
        self.num_open = 0
        # Of them, those whose logits are adjusted, at least at first; and those with logprobs.
        self._num_adjusted = 0
        self._num_told = 0
        self.num_logprobs = np.full(shape, _NOT_ASKED, np.int32)
        self.num_prompt_logprobs = np.full(shape, _NOT_ASKED, np.int32)
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < info.vocab_size)
        self._is_open = np.zeros(shape, np.bool_)
        self._adjusts = np.zeros(shape, np.bool_)
        self._is_masked = np.zeros(shape, np.bool_)
        # Positions before this one are adjusted even if later ones are not.
        self._min_lens = np.zeros(shape, np.int32)
        self._openings: list[RowOpening] = []

    def open(self, row: int, request: Request) -> None:
        new = request.new
        adjusts, bans = new.sampling.adjusts_logits, new.min_tokens > 0
        wants_prompt = not request.has_prompt_logprobs
        if not (
            adjusts
            or bans
            or wants_prompt
            or new.logprobs is not None
            or new.structured_output is not None
        ):
            return
        self.num_open += 1
        self._is_open[row] = True
        self._adjusts[row] = adjusts
        self._min_lens[row] = request.prompt_len + new.min_tokens if bans else 0
        self._is_masked[row] = new.structured_output is not None
        self.num_logprobs[row] = _NOT_ASKED if new.logprobs is None else new.logprobs
        if wants_prompt and new.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = new.prompt_logprobs
        self._num_told += self._is_told(row)
        if adjusts or bans:
            self._num_adjusted += 1
            self._openings.append(_opening(row, request, self._banned_ids(new)))

    def close(self, row: int) -> None:
        if not self._is_open[row]:
            return
        self.num_open -= 1
        self._num_adjusted -= bool(self._adjusts[row] or self._min_lens[row])
        self._num_told -= self._is_told(row)
        self._is_open[row] = self._adjusts[row] = self._is_masked[row] = False
        self._min_lens[row] = 0
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = _NOT_ASKED

    def take_openings(self) -> tuple[RowOpening, ...]:
        """Those since the last call; each belongs to a row of the step that is laid out now."""
        openings, self._openings = tuple(self._openings), []
        return openings

    def adjusted(self, rows: IndexArray, samples: BoolArray, positions: Int32Array) -> Int32Array:
        """Indices of `rows` whose token at these positions is drawn from adjusted logits."""
        if not self._num_adjusted:
            return _NONE
        adjusts = self._adjusts[rows] | (positions < self._min_lens[rows])
        return _indices(samples & adjusts)

    def masked(self, rows: IndexArray, samples: BoolArray) -> Int32Array:
        """Indices of `rows` that wait for a mask."""
        return _indices(samples & self._is_masked[rows])

    def logprobs(
        self,
        rows: IndexArray,
        samples: BoolArray,
        chunks: Sequence[Chunk],
    ) -> LogprobsPlan | None:
        """What the step owes; the last rows are those of `chunks`."""
        if not self._num_told:
            return None
        sampled = _indices(samples & (self.num_logprobs[rows] != _NOT_ASKED))
        prompts = [
            (i, chunk)
            for i, chunk in enumerate(chunks)
            if self.num_prompt_logprobs[chunk.request.row] != _NOT_ASKED
        ]
        if not len(sampled) and not prompts:
            return None
        num_decode = len(rows) - len(chunks)
        inputs, targets, prompt_rows, counts = [_NONE], [_NONE], [], []
        # Where each chunk's inputs begin among the step's.
        offsets = num_decode + np.cumsum([0, *(chunk.extend_len for chunk in chunks)])
        for i, chunk in prompts:
            request, start = chunk.request, chunk.start
            # The input at position p has the logits of the token at p + 1. A resumed request
            # computes again what it was told of already.
            first = max(start, request.num_prompt_logprobs)
            end = min(start + chunk.extend_len, request.prompt_len - 1)
            if first < end:
                at = int(offsets[i]) - start
                inputs.append(np.arange(at + first, at + end, dtype=np.int32))
                targets.append(request.token_ids[first + 1 : end + 1])
                prompt_rows.append(num_decode + i)
                counts.append(end - first)
        if not len(sampled) and not prompt_rows:
            return None
        asked = self.num_prompt_logprobs[rows[prompt_rows]] if prompt_rows else _NONE
        return LogprobsPlan(
            rows=sampled,
            num_top=int(self.num_logprobs[rows[sampled]].max(initial=0)),
            prompt_inputs=np.concatenate(inputs),
            prompt_targets=np.concatenate(targets),
            num_prompt_top=int(asked.max(initial=0)),
            prompt_rows=np.array(prompt_rows, np.int32),
            prompt_counts=np.array(counts, np.int32),
        )

    def _is_told(self, row: int) -> bool:
        asked = max(self.num_logprobs[row], self.num_prompt_logprobs[row])
        return bool(asked != _NOT_ASKED)

    def _banned_ids(self, new: NewRequest) -> Int32Array:
        if not new.min_tokens:
            return _NONE
        eos = () if new.ignore_eos else self._eos_token_ids
        return np.array(sorted({*eos, *new.stop_token_ids}), np.int32)


def _opening(row: int, request: Request, banned_ids: Int32Array) -> RowOpening:
    new = request.new
    params = new.sampling
    return RowOpening(
        row=row,
        token_ids=request.token_ids,
        prompt_len=request.prompt_len,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=np.array([token for token, _ in params.logit_bias], np.int32),
        bias_values=np.array([value for _, value in params.logit_bias], np.float32),
        allowed_ids=np.array(params.allowed_token_ids, np.int32)
        if params.allowed_token_ids
        else None,
        banned_ids=banned_ids,
        min_len=request.prompt_len + new.min_tokens,
    )


def _indices(flags: BoolArray) -> Int32Array:
    return np.flatnonzero(flags).astype(np.int32)
