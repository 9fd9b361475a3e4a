"""Requests through scheduler, engine loop and engine in one process, without gRPC."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from shared.types import SamplingParams
from worker.engine_loop import EngineLoop
from worker.messages import Command, Event, Fatal, Load, NewRequest, StepOutput, Stop, Submit
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine

GREEDY = SamplingParams(temperature=0.0)


class _Channel:
    """Commands that are all there from the start, and Stop when `is_done` says so."""

    def __init__(self, commands: Sequence[Command], is_done: Callable[[], bool]) -> None:
        self._commands = deque(commands)
        self._is_done = is_done

    def poll(self, timeout: float) -> bool:
        return bool(self._commands) or self._is_done()

    def recv(self) -> Command:
        return self._commands.popleft() if self._commands else Stop()


class EngineRun:
    """One scheduler over an engine; each `generate` finds what the ones before cached."""

    def __init__(self, engine: Engine, config: SchedulerConfig, *, overlap: bool) -> None:
        self._engine = engine
        self._overlap = overlap
        self._scheduler = Scheduler(config, engine.info, ())
        self._next_uid = 0

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy completions of exactly `num_tokens` tokens, all submitted at once."""
        requests = [self._request(prompt, num_tokens) for prompt in prompts]
        tokens: dict[int, list[int]] = {request.uid: [] for request in requests}
        unfinished = set(tokens)

        def is_done() -> bool:
            # Idle too: a step that is still in flight must be committed.
            return not unfinished and self._scheduler.is_idle

        def emit(event: Event) -> None:
            if isinstance(event, Fatal):
                raise RuntimeError(event.message)
            if not isinstance(event, StepOutput):
                return
            for uid, token in zip(event.uids.tolist(), event.token_ids.tolist(), strict=True):
                tokens[uid].append(token)
            if event.failed:
                raise RuntimeError(event.failed[0].message)
            unfinished.difference_update(done.uid for done in event.finished)

        channel = _Channel([Submit(request) for request in requests], is_done)
        EngineLoop(self._scheduler, self._engine, channel, emit, overlap=self._overlap).run()
        return list(tokens.values())

    @property
    def load(self) -> Load:
        return self._scheduler.load()

    def check(self) -> None:
        """Raises IntegrityError if a page or row was lost."""
        self._scheduler.check_integrity()

    def _request(self, prompt: Sequence[int], num_tokens: int) -> NewRequest:
        self._next_uid += 1
        return NewRequest(
            uid=self._next_uid,
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=num_tokens,
            sampling=GREEDY,
            ignore_eos=True,
        )
