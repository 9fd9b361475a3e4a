"""What is planned and known of every running request: arrays indexed by row.

Kept as arrays so that a step costs a handful of numpy calls, however many rows it has.
Pages are in PageTable, and so is the row allocator.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from worker.scheduler.features import RowFeatures
from worker.scheduler.request import Request
from worker.step import BoolArray, EngineInfo, IndexArray, Int32Array, SamplingBatch

_NO_TOKEN = -1


class Phase(IntEnum):
    """What the planner may do with a row.

    Arrays of it are compared with a `value`: numpy takes 2 µs to find out what a member is.
    """

    FREE = 0
    # Part of the known tokens is not planned yet.
    PREFILL = 1
    # One token a step.
    DECODE = 2
    # Planned no more; see RequestState.
    PREEMPTED = 3
    ENDED = 4


class RowTable:
    """Per row, in tokens: valid <= computed <= len and known <= len <= end.

    `known` tokens have values on the host, `lens` counts those in flight too. KV is or will be
    in place for `computed` positions by launched steps, and is for `valid` by finished ones.
    """

    def __init__(self, info: EngineInfo, eos_token_ids: Iterable[int]) -> None:
        shape = info.max_rows
        self.features = RowFeatures(info, eos_token_ids)
        self.phase = np.zeros(shape, np.int8)
        # Steps end in order, so a row is in flight as long as the last one that has it is.
        self.last_steps = np.full(shape, -1, np.int64)
        self.num_steps_over = 0
        self.uids = np.zeros(shape, np.int64)
        self.prompt_lens = np.zeros(shape, np.int32)
        self.known_lens = np.zeros(shape, np.int32)
        self.lens = np.zeros(shape, np.int32)
        self.end_lens = np.zeros(shape, np.int32)
        self.computed_lens = np.zeros(shape, np.int32)
        self.valid_lens = np.zeros(shape, np.int32)
        self.last_token_at = np.zeros(shape, np.float64)
        self.token_ids = np.zeros((shape, info.max_context), np.int32)
        self.requests: list[Request | None] = [None] * shape
        self._heeds_eos = np.zeros(shape, np.bool_)
        self._stop_ids = np.full((shape, 1), _NO_TOKEN, np.int32)
        self._num_with_stops = 0
        self._sampling = SamplingBatch(
            temperature=np.zeros(shape, np.float32),
            top_k=np.zeros(shape, np.int32),
            top_p=np.zeros(shape, np.float32),
            min_p=np.zeros(shape, np.float32),
            seeds=np.zeros(shape, np.uint64),
            is_greedy=np.zeros(shape, np.bool_),
        )

    def open(self, row: int, request: Request, cached_len: int) -> None:
        """Takes up a request of which the KV of `cached_len` tokens is in place."""
        known = len(request.token_ids)
        self.phase[row] = Phase.PREFILL
        self.uids[row] = request.uid
        self.prompt_lens[row] = request.prompt_len
        self.known_lens[row] = self.lens[row] = known
        self.end_lens[row] = request.prompt_len + request.new.max_tokens
        self.computed_lens[row] = self.valid_lens[row] = cached_len
        self.last_token_at[row] = request.last_token_at
        self.token_ids[row, :known] = request.token_ids
        self.requests[row] = request
        self._heeds_eos[row] = not request.new.ignore_eos
        self._set_stop_ids(row, request.new.stop_token_ids)
        self.features.open(row, request)
        params = request.new.sampling
        self._sampling.temperature[row] = params.temperature
        self._sampling.top_k[row] = params.top_k
        self._sampling.top_p[row] = params.top_p
        self._sampling.min_p[row] = params.min_p
        self._sampling.seeds[row] = params.seed
        self._sampling.is_greedy[row] = params.is_greedy

    def close(self, row: int) -> None:
        self.phase[row] = Phase.FREE
        self.requests[row] = None
        self._set_stop_ids(row, ())
        self.features.close(row)

    def request_of(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def is_in_flight(self, row: int) -> bool:
        return bool(self.last_steps[row] >= self.num_steps_over)

    def running(self) -> BoolArray:
        """Of all rows, those that are planned."""
        running: BoolArray = (self.phase == Phase.PREFILL.value) | (
            self.phase == Phase.DECODE.value
        )
        return running

    def known_tokens(self, row: int) -> Int32Array:
        """A view: the tokens that are on the host."""
        return self.token_ids[row, : self.known_lens[row]]

    def valid_tokens(self, row: int) -> Int32Array:
        """A view: the known tokens whose KV is in place."""
        return self.token_ids[row, : min(self.valid_lens[row], self.known_lens[row])]

    def append(self, rows: IndexArray, token_ids: Int32Array, now: float) -> BoolArray:
        """One sampled token for each of the rows; returns which have all that they may have."""
        positions = self.known_lens[rows]
        lens = positions + 1
        self.token_ids[rows, positions] = token_ids
        self.known_lens[rows] = lens
        self.last_token_at[rows] = now
        is_last: BoolArray = lens == self.end_lens[rows]
        return is_last

    def heeds_eos(self, rows: IndexArray) -> BoolArray:
        heeds: BoolArray = self._heeds_eos[rows]
        return heeds

    def hits_stop(self, rows: IndexArray, token_ids: Int32Array) -> BoolArray:
        """Whether each row's token is among the row's own stop tokens."""
        if not self._num_with_stops:
            return np.zeros(len(rows), np.bool_)
        hits: BoolArray = (self._stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return hits

    def sampling(self, rows: IndexArray) -> SamplingBatch:
        every = self._sampling
        return SamplingBatch(
            temperature=every.temperature[rows],
            top_k=every.top_k[rows],
            top_p=every.top_p[rows],
            min_p=every.min_p[rows],
            seeds=every.seeds[rows],
            is_greedy=every.is_greedy[rows],
        )

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        table = self._stop_ids
        had_stops = bool(table[row, 0] != _NO_TOKEN)
        if not stop_ids and not had_stops:
            return
        self._num_with_stops += bool(stop_ids) - had_stops
        width = table.shape[1]
        if len(stop_ids) > width:
            table = np.full((len(table), 2 * len(stop_ids)), _NO_TOKEN, np.int32)
            table[:, :width] = self._stop_ids
            self._stop_ids = table
        table[row] = _NO_TOKEN
        table[row, : len(stop_ids)] = stop_ids
