"""Runs a scheduler against a FakeEngine in either loop's order, and keeps what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.errors import EngineError
from shared.types import SamplingParams, StructuredOutput
from tests.fakes import FakeEngine, TokenModel, checksum_model
from worker.engine_loop import FailedLaunch
from worker.messages import Failed, Finished, NewRequest, Started, StepOutput, TokenLogprobs
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import EngineInfo, StepHandle, StepPlan

VOCAB_SIZE = 97
EOS = 0
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Outcome:
    """All that was told of one request."""

    token_ids: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    ended: list[Finished | Failed] = field(default_factory=list)
    # (token id, likeliest ids) of each entry.
    logprobs: list[tuple[int, list[int]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        (end,) = self.ended
        assert isinstance(end, Finished), end
        return end

    @property
    def failed(self) -> Failed:
        (end,) = self.ended
        assert isinstance(end, Failed), end
        return end


def engine_info(
    *,
    page_size: int = 4,
    num_pages: int = 64,
    max_rows: int = 8,
    max_context: int = 64,
) -> EngineInfo:
    return EngineInfo(num_pages, page_size, max_rows, max_context, VOCAB_SIZE)


class Driver:
    """One turn of the loop is one second. After each, the books are checked."""

    def __init__(
        self,
        *,
        info: EngineInfo | None = None,
        config: SchedulerConfig | None = None,
        model: TokenModel | None = None,
        overlap: bool = True,
        eos: Sequence[int] = (EOS,),
    ) -> None:
        self.info = info or engine_info()
        self.scheduler = Scheduler(config or SchedulerConfig(), self.info, eos)
        self.engine = FakeEngine(self.info, model or checksum_model(self.info.vocab_size))
        self.overlap = overlap
        self.now = 100.0
        self.outcomes: dict[int, Outcome] = {}
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self._num_submitted = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        uid: int | None = None,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
        deadline: float | None = None,
        time_limit: float | None = None,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structured_output: StructuredOutput | None = None,
    ) -> int:
        """Adds a request, arrived now; returns its uid. Raises what `add` raises."""
        self._num_submitted += 1
        new = NewRequest(
            uid=self._num_submitted if uid is None else uid,
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
            deadline=deadline,
            time_limit=time_limit,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_output=structured_output,
            arrived_at=self.now,
        )
        self.scheduler.add(new, self.now)
        self.outcomes[new.uid] = Outcome()
        return new.uid

    def abort(self, *uids: int, report: bool = True) -> None:
        self.scheduler.abort(uids, report, self.now)
        self.scheduler.check_integrity()

    def turn(self) -> StepPlan | None:
        """One turn of the loop; returns the step it launched."""
        self.now += 1.0
        self.scheduler.expire(self.now)
        plan = self.scheduler.plan(self.now)
        self.scheduler.check_integrity()
        launched = None if plan is None else (plan, self._launch(plan))
        if self.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._commit(*launched)
        self.scheduler.check_integrity()
        output = self.scheduler.drain_output(self.now)
        if output is not None:
            self._record(output)
        return plan

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run(self, most_turns: int = 10_000) -> None:
        """Turns until everything has ended, and checks that nothing is held then."""
        for _ in range(most_turns):
            if self.scheduler.is_idle:
                break
            self.turn()
        assert self.scheduler.is_idle, "still busy"
        self.scheduler.check_idle()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.pages_held) == (0, 0, 0)
        assert load.pages_free + load.pages_cached == load.pages_total

    def complete(self, prompt: Sequence[int], max_tokens: int = 8) -> Outcome:
        """Runs one request to its end."""
        uid = self.submit(prompt, max_tokens)
        self.run()
        return self.outcomes[uid]

    def tokens(self, uid: int) -> list[int]:
        return self.outcomes[uid].token_ids

    def _launch(self, plan: StepPlan) -> StepHandle:
        try:
            return self.engine.launch(plan)
        except EngineError as error:
            return FailedLaunch(error)

    def _commit(self, plan: StepPlan, handle: StepHandle) -> None:
        if len(plan.masked):
            handle.provide_masks(np.zeros((len(plan.masked), -(-VOCAB_SIZE // 32)), np.int32))
        try:
            result = handle.result()
        except EngineError as error:
            self.scheduler.fail(plan, error)
        else:
            self.scheduler.commit(plan, result, self.now)

    def _record(self, output: StepOutput) -> None:
        for started in output.started:
            self.outcomes[started.uid].started.append(started)
        for logprobs in output.logprobs:
            self._record_logprobs(logprobs)
        for uid, token_id in zip(output.uids.tolist(), output.token_ids.tolist(), strict=True):
            outcome = self.outcomes[uid]
            assert not outcome.ended, f"a token of {uid} after its end"
            outcome.token_ids.append(token_id)
        for uid in set(output.uids.tolist()):
            outcome = self.outcomes[uid]
            assert len(outcome.logprobs) in (0, len(outcome.token_ids)), "not with its tokens"
        for finished in output.finished:
            self.outcomes[finished.uid].ended.append(finished)
        for failed in output.failed:
            self.outcomes[failed.uid].ended.append(failed)

    def _record_logprobs(self, logprobs: TokenLogprobs) -> None:
        for i, uid in enumerate(logprobs.uids.tolist()):
            outcome = self.outcomes[uid]
            assert not outcome.ended, f"an entry of {uid} after its end"
            token_id = int(logprobs.token_ids[i])
            assert (logprobs.logprobs[i], logprobs.ranks[i]) == (-token_id, token_id + 1)
            entry = (token_id, logprobs.top_ids[i, : logprobs.num_top[i]].tolist())
            if logprobs.is_prompt:
                assert not outcome.token_ids, "a prompt's entry after the first token"
                outcome.prompt_logprobs.append(entry)
            else:
                outcome.logprobs.append(entry)


def solo_output(
    model: TokenModel, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = (EOS,)
) -> list[int]:
    """What a request gives that has the model for itself, without scheduler or pages."""
    history = list(prompt)
    while len(history) < len(prompt) + max_tokens:
        token = model(np.array(history, np.int32), len(prompt))
        if token in stop_ids:
            break
        history.append(token)
    return history[len(prompt) :]
