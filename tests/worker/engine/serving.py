"""Runs requests through a scheduler and an engine in either loop's order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from worker.messages import Failed, Finished, NewRequest, StepOutput, TokenLogprobs
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, Int32Array, StepHandle, StepPlan

MakeMasks = Callable[[StepPlan], Int32Array]


@dataclass(frozen=True)
class Entry:
    """One token's log-probability."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass
class Served:
    """All that was told of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)
    ended: list[Finished | Failed] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        (end,) = self.ended
        assert isinstance(end, Finished), end
        return end


class Server:
    """A scheduler over an engine; its prefix cache lasts from one `serve` to the next."""

    def __init__(
        self,
        engine: Engine,
        *,
        config: SchedulerConfig | None = None,
        overlap: bool = True,
        eos: Sequence[int] = (2,),
        masks: MakeMasks | None = None,
    ) -> None:
        self.scheduler = Scheduler(config or SchedulerConfig(), engine.info, eos)
        self._engine = engine
        self._overlap = overlap
        self._masks = masks
        self._served: dict[int, Served] = {}
        self._in_flight: tuple[StepPlan, StepHandle] | None = None

    def serve(self, *requests: NewRequest, apart: int = 0) -> list[Served]:
        """Submits them all, each so many turns after the one before, and runs until all end."""
        waiting = list(requests)
        turn = 0
        while waiting or not self.scheduler.is_idle:
            while waiting and turn >= apart * (len(requests) - len(waiting)):
                self._served[waiting[0].uid] = Served()
                self.scheduler.add(waiting.pop(0), float(turn))
            self._turn(float(turn))
            turn += 1
        self.scheduler.check_integrity()
        self.scheduler.check_idle()
        return [self._served[request.uid] for request in requests]

    def _turn(self, now: float) -> None:
        plan = self.scheduler.plan(now)
        launched = None if plan is None else (plan, self._engine.launch(plan))
        if self._overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._provide_masks(*launched)
            self.scheduler.commit(launched[0], launched[1].result(), now)
        output = self.scheduler.drain_output(now)
        if output is not None:
            self._record(output)

    def _provide_masks(self, plan: StepPlan, handle: StepHandle) -> None:
        if len(plan.masked):
            assert self._masks is not None
            masks, buffer = self._masks(plan), handle.mask_buffer()
            if buffer is not None:
                buffer[: len(masks)] = masks
                masks = buffer[: len(masks)]
            handle.provide_masks(masks)

    def _record(self, output: StepOutput) -> None:
        for logprobs in output.logprobs:
            self._record_logprobs(logprobs)
        for uid, token_id in zip(output.uids.tolist(), output.token_ids.tolist(), strict=True):
            self._served[uid].token_ids.append(token_id)
        endings: tuple[Finished | Failed, ...] = output.finished + output.failed
        for end in endings:
            assert not self._served[end.uid].ended
            self._served[end.uid].ended.append(end)

    def _record_logprobs(self, logprobs: TokenLogprobs) -> None:
        for i, uid in enumerate(logprobs.uids.tolist()):
            served, num_top = self._served[uid], int(logprobs.num_top[i])
            entry = Entry(
                token_id=int(logprobs.token_ids[i]),
                logprob=float(logprobs.logprobs[i]),
                rank=int(logprobs.ranks[i]),
                top_ids=tuple(logprobs.top_ids[i, :num_top].tolist()),
                top_logprobs=tuple(logprobs.top_logprobs[i, :num_top].tolist()),
            )
            (served.prompt_logprobs if logprobs.is_prompt else served.logprobs).append(entry)


def bitmasks_of(allowed: np.ndarray) -> Int32Array:
    """[n, ceil(vocab_size / 32)] of allowed flags [n, vocab_size]."""
    packed = np.packbits(allowed, axis=1, bitorder="little")
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4").astype(np.int32)
