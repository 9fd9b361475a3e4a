"""Random workloads: every request gets what it would get alone, and exactly one ending."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.errors import Code, QueueFullError
from shared.types import FinishReason, SamplingParams, StructuredOutput, StructureKind
from tests.fakes import checksum_model
from tests.worker.scheduler.driver import (
    EOS,
    GREEDY,
    VOCAB_SIZE,
    Driver,
    Outcome,
    engine_info,
    solo_output,
)
from worker.messages import Failed, Finished
from worker.scheduler.config import Policy, SchedulerConfig

_STEPS = 600
_ANY_RULE = StructuredOutput(StructureKind.REGEX, ".*")
_MODEL = checksum_model(VOCAB_SIZE)


@dataclass
class Sent:
    """What was asked of one request."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_silent: bool = False


@dataclass
class Workload:
    """Draws what happens next; prompts share prefixes, pages and rows are scarce."""

    driver: Driver
    rng: np.random.Generator
    sent: dict[int, Sent] = field(default_factory=dict)
    num_queue_full: int = 0
    stems: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stems = [self.rng.integers(1, VOCAB_SIZE, 30).tolist() for _ in range(3)]

    def happen(self) -> None:
        rng = self.rng
        for _ in range(rng.integers(0, 9) if rng.random() < 0.15 else 0):
            self._submit()
        live = [
            uid
            for uid, sent in self.sent.items()
            if not sent.is_silent and not self.driver.outcomes[uid].ended
        ]
        if live and rng.random() < 0.06:
            self._abort(int(rng.choice(live)))
        if rng.random() < 0.02:
            self.driver.scheduler.flush_cache()
        step = len(self.driver.engine.plans)
        if rng.random() < 0.02:
            self.driver.engine.failures[step] = str(rng.choice(["lost", "garbage", "refused"]))
        if rng.random() < 0.02:
            self.driver.engine.faulty.add((step, int(rng.integers(0, 3))))

    def _submit(self) -> None:
        rng = self.rng
        stem = self.stems[rng.integers(0, len(self.stems))]
        prompt = stem[: rng.integers(1, 31)] + rng.integers(1, VOCAB_SIZE, 8).tolist()
        prompt = prompt[: rng.integers(1, len(prompt) + 1)]
        max_tokens = int(rng.integers(1, 27))
        ignore_eos = bool(rng.random() < 0.3)
        stops = tuple(rng.integers(0, VOCAB_SIZE, rng.integers(0, 3)).tolist())
        now = self.driver.now
        sampling, structured_output = GREEDY, None
        logprobs = prompt_logprobs = None
        min_tokens = 0
        if rng.random() < 0.5:
            sampling = SamplingParams(frequency_penalty=float(rng.integers(0, 2)))
            min_tokens = int(rng.integers(0, max_tokens + 1))
            logprobs, prompt_logprobs = (None if k > 3 else int(k) for k in rng.integers(0, 7, 2))
            structured_output = _ANY_RULE if rng.random() < 0.3 else None
        try:
            uid = self.driver.submit(
                prompt,
                max_tokens,
                sampling=sampling,
                min_tokens=min_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                structured_output=structured_output,
                ignore_eos=ignore_eos,
                stop_token_ids=stops,
                priority=int(rng.integers(-1, 2)),
                cache_salt=str(rng.choice(["", "", "salt"])),
                deadline=now + rng.integers(0, 40) if rng.random() < 0.1 else None,
                time_limit=now + rng.integers(0, 40) if rng.random() < 0.1 else None,
            )
        except QueueFullError:
            self.num_queue_full += 1
            return
        asked = Sent(prompt, max_tokens, ignore_eos, stops, logprobs, prompt_logprobs)
        self.sent[uid] = asked

    def _abort(self, uid: int) -> None:
        report = bool(self.rng.random() < 0.5)
        self.driver.abort(uid, uid + 1000, report=report)
        self.sent[uid].is_silent = not report

    def check(self) -> None:
        """Each request against what it gives alone."""
        for uid, sent in self.sent.items():
            self._check_one(uid, sent)

    def _check_one(self, uid: int, sent: Sent) -> None:
        outcome = self.driver.outcomes[uid]
        stops = set(sent.stop_token_ids) | (set() if sent.ignore_eos else {EOS})
        expected = solo_output(_MODEL, sent.prompt, sent.max_tokens, tuple(stops))
        assert len(outcome.started) <= 1
        self._check_logprobs(outcome, sent)
        if sent.is_silent and not outcome.ended:
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            return
        (end,) = outcome.ended
        if isinstance(end, Failed):
            assert end.code in (Code.INTERNAL, Code.DEADLINE_EXCEEDED)
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            return
        self._check_finished(outcome.token_ids, end, expected, sent)

    def _check_logprobs(self, outcome: Outcome, sent: Sent) -> None:
        tokens, prompt = outcome.token_ids, sent.prompt[1:]
        assert outcome.logprobs == _entries(tokens, sent.logprobs)
        wanted = _entries(prompt, sent.prompt_logprobs)
        # All of them, once, if it got as far as a token.
        assert outcome.prompt_logprobs == wanted[: len(outcome.prompt_logprobs)]
        if tokens:
            assert len(outcome.prompt_logprobs) == len(wanted)

    def _check_finished(
        self, token_ids: list[int], end: Finished, expected: list[int], sent: Sent
    ) -> None:
        assert end.cached_tokens <= len(sent.prompt) - 1
        if end.reason in (FinishReason.ABORTED, FinishReason.TIME_LIMIT):
            assert token_ids == expected[: len(token_ids)]
            assert end.completion_tokens == len(token_ids)
            return
        assert token_ids == expected
        if end.reason is FinishReason.LENGTH:
            assert len(expected) == sent.max_tokens == end.completion_tokens
        else:
            assert end.completion_tokens == len(expected) + 1
            is_eos = end.matched_token_id == EOS and not sent.ignore_eos
            assert end.reason is (FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN)


def _entries(tokens: list[int], num_top: int | None) -> list[tuple[int, list[int]]]:
    """As the fake engine tells of each token."""
    if num_top is None:
        return []
    return [(token, list(range(token, token + num_top))) for token in tokens]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", Policy)
def test_each_request_gets_what_it_would_get_alone(
    overlap: bool, prefix_caching: bool, page_size: int, policy: Policy
) -> None:
    rng = np.random.default_rng([page_size, overlap, prefix_caching, policy is Policy.MIXED, 4])
    driver = Driver(
        info=engine_info(page_size=page_size, num_pages=96 // page_size, max_rows=7),
        config=SchedulerConfig(
            token_budget=24,
            max_running=6,
            max_waiting=10,
            policy=policy,
            prefix_caching=prefix_caching,
            headroom_tokens=1,
        ),
        model=_MODEL,
        overlap=overlap,
    )
    workload = Workload(driver, rng)
    while len(driver.engine.plans) < _STEPS:
        workload.happen()
        driver.turn()
    driver.engine.failures.clear()
    driver.run()
    workload.check()
    load = driver.scheduler.load()
    reasons = {type(end) for outcome in driver.outcomes.values() for end in outcome.ended}
    assert reasons == {Finished, Failed}
    assert load.preemptions > 0
    assert workload.num_queue_full > 0
    assert (load.cached_tokens > 0) == prefix_caching
