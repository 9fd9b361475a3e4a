"""Threads for work of unknown length, which the end of the process does not wait for."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from shared.types import StructuredOutput
from worker.structured.contract import CompiledRule

Compile = Callable[[StructuredOutput], CompiledRule]


@dataclass(frozen=True, slots=True)
class _Work:
    compile: Compile
    structure: StructuredOutput
    future: "Future[CompiledRule]"

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            rule = self.compile(self.structure)
        except BaseException as error:
            # A panic of the library is no Exception; whoever waits is to hear of it as well.
            self.future.set_exception(error)
        else:
            self.future.set_result(rule)


class CompilerThreads:
    """Started with the first rule. `stop` and `join` them.

    Not a ThreadPoolExecutor: the interpreter joins its threads at the end, however long a
    rule still takes.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def num_queued(self) -> int:
        """Those that no thread has taken yet, cancelled ones included."""
        return self._work.qsize()

    def submit(self, compile_rule: Compile, structure: StructuredOutput) -> "Future[CompiledRule]":
        """Its turn comes after all that was submitted before and is not cancelled."""
        while len(self._threads) < self._num_threads:
            name = f"rule-compiler-{len(self._threads)}"
            thread = threading.Thread(target=_run, args=(self._work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        work = _Work(compile_rule, structure, Future())
        self._work.put(work)
        return work.future

    def stop(self) -> None:
        """Cancels what is not begun; threads end with what is under way."""
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                break
            if work is not None:
                work.future.cancel()
        for _ in self._threads:
            self._work.put(None)

    def join(self, deadline: float) -> None:
        """Waits for them until then, for a thread that comes back from the library while the
        interpreter goes down may crash the process."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _run(work: "queue.SimpleQueue[_Work | None]") -> None:
    while (one := work.get()) is not None:
        one.run()
        # Or the last rule would be kept until the next comes.
        del one
