"""An engine loop on a thread of its own, and the test's end of its pipe."""

import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from shared.types import StructuredOutput
from tests.fakes import FakeEngine, echo_model
from worker.engine_loop import EngineLoop
from worker.messages import Event, Failed, Finished, NewRequest, StepOutput, Submit
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import EngineInfo
from worker.structured.contract import GrammarLibrary
from worker.structured.outputs import StructuredOutputs
from worker.wakeable_channel import WakeableChannel

EOS = 0
INFO = EngineInfo(num_pages=64, page_size=4, max_rows=8, max_context=64, vocab_size=100)
WAIT_S = 20.0


class CountingChannel(WakeableChannel):
    """Counts how often the loop asks for commands."""

    num_polls = 0

    def poll(self, timeout: float) -> bool:
        self.num_polls += 1
        return super().poll(timeout)


class Running:
    """Up to 4 requests run and 2 wait. With `grammars`, structured output is served."""

    def __init__(
        self,
        *,
        overlap: bool = True,
        gated: bool = False,
        grammars: GrammarLibrary | None = None,
        structure_timeout_s: float = 60.0,
        most_structures_waiting: int = 100,
    ) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pipe: Connection = ours
        self.loops_end = theirs
        self.engine = FakeEngine(INFO, echo_model(EOS), gated=gated)
        self.events: queue.Queue[Event] = queue.Queue()
        self.tokens: dict[int, list[int]] = {}
        self._endings: dict[int, Finished | Failed] = {}
        scheduler = Scheduler(SchedulerConfig(max_running=4, max_waiting=2), INFO, (EOS,))
        self.channel = CountingChannel(theirs)
        self._structures = None
        if grammars is not None:
            self._structures = StructuredOutputs(
                grammars,
                cache_entries=4,
                timeout_s=structure_timeout_s,
                max_rows=INFO.max_rows,
                wake=self.channel.wake,
                most_waiting=most_structures_waiting,
            )
        loop = EngineLoop(
            scheduler,
            self.engine,
            self.channel,
            self.events.put,
            overlap=overlap,
            structures=self._structures,
        )
        self._thread = threading.Thread(target=loop.run, name="engine-loop")
        self._thread.start()

    def send(self, *commands: object) -> None:
        for command in commands:
            self.pipe.send(command)

    def submit(
        self,
        uid: int,
        prompt: list[int],
        max_tokens: int = 20,
        *,
        structure: StructuredOutput | None = None,
        deadline: float | None = None,
        time_limit: float | None = None,
    ) -> None:
        new = NewRequest(
            uid,
            np.array(prompt, np.int32),
            max_tokens,
            structured_output=structure,
            deadline=deadline,
            time_limit=time_limit,
        )
        self.send(Submit(new))

    def next(self, matches: Callable[[Event], bool]) -> Event:
        """The next such event; keeps what the others tell."""
        while True:
            event = self.events.get(timeout=WAIT_S)
            if isinstance(event, StepOutput):
                self._keep(event)
            if matches(event):
                return event

    def end_of(self, uid: int) -> Finished | Failed:
        """Waits for the request's ending."""

        while uid not in self._endings:
            self.next(lambda event: isinstance(event, StepOutput))
        return self._endings[uid]

    def _keep(self, output: StepOutput) -> None:
        for uid, token in zip(output.uids.tolist(), output.token_ids.tolist(), strict=True):
            self.tokens.setdefault(uid, []).append(token)
        for finished in output.finished:
            self._endings[finished.uid] = finished
        for failed in output.failed:
            self._endings[failed.uid] = failed

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.engine.close()
        self.pipe.close()
        self.join()
        if self._structures is not None:
            self._structures.close()
        self.channel.close()
        self.loops_end.close()


def finished(end: Finished | Failed) -> Finished:
    assert isinstance(end, Finished), end
    return end


def failed(end: Finished | Failed) -> Failed:
    assert isinstance(end, Failed), end
    return end
