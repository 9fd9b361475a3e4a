"""Runs requests through the engine loop, with structured output, to their ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.types import FinishReason
from tests.worker.structured.vocabulary import EOS_IDS, decode
from worker.engine_loop import EngineLoop
from worker.messages import (
    CachedPrefixes,
    Command,
    Event,
    Failed,
    Finished,
    Load,
    NewRequest,
    StepOutput,
    Stop,
    Submit,
)
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine
from worker.structured.contract import GrammarLibrary
from worker.structured.outputs import StructuredOutputs


@dataclass
class Outcome:
    """What came of the requests, by uid."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished | Failed] = field(default_factory=dict)
    load: Load = field(default_factory=Load)

    def text(self, uid: int) -> str:
        return decode(self.token_ids.get(uid, []))

    def reason(self, uid: int) -> FinishReason:
        end = self.ends[uid]
        assert isinstance(end, Finished), end
        return end.reason


class _Commands:
    """All requests at once, and Stop when the last has ended."""

    def __init__(self, requests: Sequence[NewRequest]) -> None:
        self._commands: list[Command] = [Submit(request) for request in reversed(requests)]
        self.num_open = len(requests)

    def poll(self, timeout: float) -> bool:
        return bool(self._commands) or not self.num_open

    def recv(self) -> Command:
        return self._commands.pop() if self._commands else Stop()


def run(
    engine: Engine,
    grammars: GrammarLibrary,
    requests: Sequence[NewRequest],
    *,
    overlap: bool = True,
) -> Outcome:
    """The engine stays open, and nothing stays cached."""
    outcome = Outcome()
    commands = _Commands(requests)

    def emit(event: Event) -> None:
        if isinstance(event, CachedPrefixes):
            return
        assert isinstance(event, StepOutput), event
        outcome.load = event.load
        for uid, token in zip(event.uids.tolist(), event.token_ids.tolist(), strict=True):
            outcome.token_ids.setdefault(uid, []).append(token)
        ends: tuple[Finished | Failed, ...] = event.finished + event.failed
        for end in ends:
            outcome.ends[end.uid] = end
            commands.num_open -= 1

    max_rows = engine.info.max_rows
    config = SchedulerConfig(token_budget=512, max_running=max_rows, check_integrity=True)
    structures = StructuredOutputs(
        grammars, cache_entries=8, timeout_s=60.0, max_rows=max_rows, wake=lambda: None
    )
    try:
        scheduler = Scheduler(config, engine.info, EOS_IDS)
        EngineLoop(scheduler, engine, commands, emit, overlap=overlap, structures=structures).run()
    finally:
        structures.close()
    assert structures.is_idle, "something of an ended request was kept"
    return outcome
