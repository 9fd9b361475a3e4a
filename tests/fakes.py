"""Stand-ins for the engine and its channel, driven by the test.

FakeEngine keeps the books of a real device (page table, token pool, KV pool of token ids),
so that what it samples depends on every token that it finds through its page table.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shared.errors import EngineError
from worker.engine.echo import EchoMemory
from worker.step import (
    BoolArray,
    EngineInfo,
    Int32Array,
    LogprobsPlan,
    RowOpening,
    StepLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

# (all tokens so far, length of the client's prompt) -> the next token
TokenModel = Callable[[Int32Array, int], int]


def echo_model(eos_token_id: int) -> TokenModel:
    """The prompt once more, then eos."""

    def sample(history: Int32Array, prompt_len: int) -> int:
        index = len(history) - prompt_len
        return int(history[index]) if index < prompt_len else eos_token_id

    return sample


def checksum_model(vocab_size: int) -> TokenModel:
    """A token that depends on every token before it and on its place."""
    weights = np.random.default_rng(0).integers(1, 1 << 20, 1 << 16)

    def sample(history: Int32Array, prompt_len: int) -> int:
        return int((history * weights[: len(history)]).sum() % vocab_size)

    return sample


def scripted_model(scripts: dict[int, list[int]]) -> TokenModel:
    """What the script says for the prompt's first token, its last entry for ever after."""

    def sample(history: Int32Array, prompt_len: int) -> int:
        script = scripts[int(history[0])]
        return script[min(len(history) - prompt_len, len(script) - 1)]

    return sample


def told_logprobs(asked: LogprobsPlan | None, token_ids: Int32Array) -> StepLogprobs | None:
    """Numbers that tell their token: logprob -id, rank id + 1, likeliest id, id + 1 and so on."""
    if asked is None:
        return None

    def entries(tokens: Int32Array, num_top: int) -> TokenLogprobs | None:
        top_ids = (tokens[:, None] + np.arange(num_top)).astype(np.int32)
        values = -tokens.astype(np.float32), -top_ids.astype(np.float32)
        return TokenLogprobs(values[0], tokens + 1, top_ids, values[1]) if len(tokens) else None

    return StepLogprobs(
        entries(token_ids[asked.rows], asked.num_top),
        entries(asked.prompt_targets, asked.num_prompt_top),
    )


class FakeEngine:
    """Runs a step only when its result is asked for, in order of launch.

    So a plan that shares memory with the scheduler shows. `log` tells what happened:
    ("launch", step) and ("result", step). With `gated`, each result waits for `allow`.
    Adjustments change nothing of what it samples, but each step's are checked: an adjusted row
    must have been opened with its request's own tokens.
    """

    def __init__(self, info: EngineInfo, model: TokenModel, *, gated: bool = False) -> None:
        self._info = info
        self._model = model
        self._memory = EchoMemory(info)
        self._pending: deque[FakeStep] = deque()
        self._gate = threading.Semaphore(0) if gated else None
        self._changed = threading.Condition()
        self._openings: dict[int, RowOpening] = {}
        self._spoilt: set[int] = set()
        self.log: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        # By step: how it fails. "lost": nothing of it happens; "garbage": wrong KV is written;
        # "refused": launch raises.
        self.failures: dict[int, str] = {}
        # (step, place in the plan) whose logits are not finite.
        self.faulty: set[tuple[int, int]] = set()
        # What each step says is best to write masks to.
        self.mask_buffer: Int32Array | None = None
        # Another exception than EngineError, for the step with this id.
        self.crashes: dict[int, Exception] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> "FakeStep":
        with self._changed:
            self.log.append(("launch", plan.step_id))
            self.plans.append(plan)
            self._changed.notify_all()
        if self.failures.get(plan.step_id) == "refused":
            self._spoilt.add(plan.step_id)
            raise EngineError("refused")
        step = FakeStep(self, plan)
        self._pending.append(step)
        return step

    def close(self) -> None:
        if self._gate is not None:
            self._gate.release(1 << 20)

    def allow(self, steps: int = 1) -> None:
        """Lets the results of this many more steps through."""
        assert self._gate is not None
        self._gate.release(steps)

    def wait_launched(self, steps: int, timeout_s: float = 10.0) -> None:
        """Blocks until this many steps have been launched in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.plans) >= steps, timeout_s)

    def finish(self, step: "FakeStep") -> StepResult:
        """For FakeStep: runs everything up to this step."""
        if self._gate is not None:
            self._gate.acquire()
        assert self._pending[0] is step, "results are asked for in order of launch"
        self._pending.popleft()
        self.log.append(("result", step.plan.step_id))
        assert step.bitmasks is not None or not len(step.plan.masked), "a step without its masks"
        return self._run(step.plan)

    def _run(self, plan: StepPlan) -> StepResult:
        started_at = time.monotonic()
        if plan.step_id in self.crashes:
            raise self.crashes[plan.step_id]
        failure = self.failures.get(plan.step_id)
        if failure is not None:
            self._spoilt.add(plan.step_id)
        if failure == "lost":
            raise EngineError("lost")
        self._memory.write(plan)
        self._openings |= {opening.row: opening for opening in plan.openings}
        # What a step lost or spoilt is amiss in the next, which was planned without knowing.
        if plan.step_id - 1 not in self._spoilt:
            self._check_adjusted(plan)
        if any(step == plan.step_id for step, _ in self.faulty):
            self._spoilt.add(plan.step_id)
        token_ids = np.array([self._sample(plan, i) for i in range(plan.num_rows)], np.int32)
        if failure == "garbage":
            self._spoil(plan, np.ones(plan.num_rows, np.bool_))
            raise EngineError("garbage")
        self._memory.store(plan, token_ids)
        faulty = np.array([(plan.step_id, i) in self.faulty for i in range(plan.num_rows)])
        self._spoil(plan, faulty)
        logprobs = told_logprobs(plan.logprobs, token_ids)
        return StepResult(token_ids, faulty, started_at, time.monotonic(), logprobs)

    def _spoil(self, plan: StepPlan, spoiled: BoolArray) -> None:
        """Overwrites what the step computed for these rows with tokens that nobody sent."""
        extend_lens = plan.extend_lens[spoiled]
        wrong = np.full(int(extend_lens.sum()), -3, np.int32)
        self._memory.write(
            replace(
                plan,
                num_decode=0,
                rows=plan.rows[spoiled],
                cached_lens=plan.cached_lens[spoiled],
                extend_lens=extend_lens,
                prefill_token_ids=wrong,
            )
        )

    def _check_adjusted(self, plan: StepPlan) -> None:
        for i in plan.adjusted.tolist():
            assert plan.samples[i]
            opening = self._openings[int(plan.rows[i])]
            assert opening.prompt_len == plan.prompt_lens[i]
            known = opening.token_ids
            assert np.array_equal(self._history(plan, i)[: len(known)], known)

    def _sample(self, plan: StepPlan, i: int) -> int:
        if not plan.samples[i]:
            # Harmful, should anyone read it.
            return -7
        return self._model(self._history(plan, i), int(plan.prompt_lens[i]))

    def _history(self, plan: StepPlan, i: int) -> Int32Array:
        length = int(plan.cached_lens[i] + plan.extend_lens[i])
        return self._memory.read(plan.rows[i : i + 1], np.arange(length, dtype=np.int32))


class FakeStep:
    """A launched step."""

    def __init__(self, engine: FakeEngine, plan: StepPlan) -> None:
        self._engine = engine
        self.plan = plan
        # As the loop's array was when it was provided: a caller reuses it.
        self.bitmasks: Int32Array | None = None

    def mask_buffer(self) -> Int32Array | None:
        return self._engine.mask_buffer

    def provide_masks(self, bitmasks: Int32Array) -> None:
        assert self.bitmasks is None, "masks are provided once"
        assert len(bitmasks) == len(self.plan.masked) > 0
        self.bitmasks = bitmasks.copy()

    def result(self) -> StepResult:
        return self._engine.finish(self)
