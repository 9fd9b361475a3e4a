"""The whole generation API on the CPU engine, under the scheduler: what a request asks for it
gets, whatever its company, its loop and its interruptions."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared.errors import EngineError
from shared.types import SamplingParams
from tests.worker.engine.feature_requests import (
    ANY_RULE,
    EOS,
    assert_logprobs,
    by_position,
    logits_of,
    only,
    prompt_of,
    rank_of,
    request,
    varied,
)
from tests.worker.engine.plans import PlanBuilder
from tests.worker.engine.serving import Entry, Served, Server
from tests.worker.models.tiny import Shape, load_tiny, write_checkpoint
from worker.engine.cpu import CpuEngine, CpuEngineConfig
from worker.messages import Failed
from worker.scheduler.config import SchedulerConfig

# As many as the engines have rows.
_NUM_ROWS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_checkpoint(folder, Shape("Llama"))


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[CpuEngine]:
    yield from _opened(checkpoint[0], num_pages=128)


@pytest.fixture(scope="module")
def cramped(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[CpuEngine]:
    """Pages for one context and a little more, so that requests preempt each other."""
    yield from _opened(checkpoint[0], num_pages=34)


def _opened(folder: Path, *, num_pages: int) -> Iterator[CpuEngine]:
    config = CpuEngineConfig(page_size=4, num_pages=num_pages, max_rows=_NUM_ROWS, max_context=128)
    engine = CpuEngine(lambda: load_tiny(folder, prepack=True), config)
    yield engine
    engine.close()


def _greedy_with_penalties(
    model: PreTrainedModel, prompt: list[int], count: int, params: SamplingParams
) -> list[int]:
    """Transformers' logits, adjusted densely in float64."""
    tokens = list(prompt)
    for _ in range(count):
        values = logits_of(model, tokens)[-1].double().numpy()
        for token in set(tokens):
            positive = values[token] > 0
            values[token] *= (
                1 / params.repetition_penalty if positive else params.repetition_penalty
            )
        for token in set(tokens[len(prompt) :]):
            times = tokens[len(prompt) :].count(token)
            values[token] -= params.frequency_penalty * times + params.presence_penalty
        tokens.append(int(values.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_with_penalties_are_the_reference_s(
    engine: CpuEngine, checkpoint: tuple[Path, PreTrainedModel], overlap: bool
) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
    )
    prompt = prompt_of(20, 1)
    (served,) = Server(engine, overlap=overlap).serve(
        request(1, prompt, 30, sampling=params, ignore_eos=True)
    )
    assert served.token_ids == _greedy_with_penalties(checkpoint[1], prompt, 30, params)
    plain = Server(engine, overlap=overlap).serve(request(1, prompt, 30, ignore_eos=True))
    assert plain[0].token_ids != served.token_ids


def test_any_way_of_drawing_gives_the_same_tokens_in_every_circumstance(
    engine: CpuEngine, cramped: CpuEngine
) -> None:
    requests = varied(_NUM_ROWS)
    alone = [Server(engine).serve(request)[0].token_ids for request in requests]
    assert all(len(tokens) == 20 for tokens in alone)
    small_budget = SchedulerConfig(token_budget=7)
    for overlap in (True, False):
        for config in (SchedulerConfig(), small_budget):
            for given in (requests, requests[::-1]):
                server = Server(engine, overlap=overlap, config=config)
                wanted = alone if given is requests else alone[::-1]
                assert [one.token_ids for one in server.serve(*given, apart=1)] == wanted
        server = Server(cramped, overlap=overlap)
        assert [one.token_ids for one in server.serve(*requests)] == alone
        assert server.scheduler.load().preemptions > 0


def test_only_allowed_ids_and_never_a_forbidden_bias_are_drawn(engine: CpuEngine) -> None:
    for temperature in (0.0, 3.0):
        allowed = (11, 50, 51)
        one = SamplingParams(temperature=temperature, seed=9, allowed_token_ids=allowed)
        other = SamplingParams(temperature=temperature, seed=9, logit_bias=((77, 100.0),))
        first, second = Server(engine).serve(
            request(1, prompt_of(5, 2), 40, sampling=one),
            request(2, prompt_of(5, 2), 10, sampling=other),
        )
        assert set(first.token_ids) <= set(allowed)
        assert set(second.token_ids) == {77}


def test_no_request_ends_before_its_min_tokens(engine: CpuEngine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, logit_bias=((EOS, 60.0), (5, 55.0)))
    for min_tokens in (0, 1, 6):
        fields: dict[str, Any] = {"sampling": params, "stop_token_ids": (5,)}
        (served,) = Server(engine).serve(
            request(1, prompt_of(12, 3), 20, min_tokens=min_tokens, **fields)
        )
        assert len(served.token_ids) == min_tokens
        assert served.finished.matched_token_id == EOS
        assert served.finished.completion_tokens == min_tokens + 1


def test_with_eos_ignored_min_tokens_bans_stop_tokens_alone(engine: CpuEngine) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((EOS, 60.0), (5, 90.0)))
    (served,) = Server(engine).serve(
        request(
            1,
            prompt_of(12, 3),
            20,
            sampling=params,
            min_tokens=3,
            stop_token_ids=(5,),
            ignore_eos=True,
        )
    )
    assert served.token_ids == [EOS] * 3
    assert served.finished.matched_token_id == 5


def _assert_logprobs(
    entries: list[Entry], tokens: list[int], logits: torch.Tensor, num_top: int
) -> None:
    assert_logprobs(entries, tokens, logits, num_top, rounding=1e-4)
    ranks = [rank_of(token, logits[i], margin=1e-5) for i, token in enumerate(tokens)]
    assert [entry.rank for entry in entries] == ranks


def _assert_all_logprobs(
    model: PreTrainedModel, prompt: list[int], served: Served, num_top: int, num_prompt_top: int
) -> None:
    logits = logits_of(model, [*prompt, *served.token_ids])
    output = logits[len(prompt) - 1 : len(prompt) - 1 + len(served.token_ids)]
    _assert_logprobs(served.logprobs, served.token_ids, output, num_top)
    _assert_logprobs(served.prompt_logprobs, prompt[1:], logits[: len(prompt) - 1], num_prompt_top)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("token_budget", [2048, 5])
def test_logprobs_are_transformers_own_whole_or_in_chunks_and_with_a_warm_cache(
    engine: CpuEngine,
    checkpoint: tuple[Path, PreTrainedModel],
    overlap: bool,
    token_budget: int,
) -> None:
    # What is drawn is from adjusted logits, what is told is of the model's own.
    params = SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.5, top_k=30)
    prompt = prompt_of(33, 5)
    config = SchedulerConfig(token_budget=token_budget)
    server = Server(engine, overlap=overlap, config=config)
    fields: dict[str, Any] = {"sampling": params, "ignore_eos": True}
    asked = {"logprobs": 5, "prompt_logprobs": 3} | fields
    (cold,) = server.serve(request(1, prompt, 12, **asked))
    warm, other, plain = server.serve(
        request(2, prompt, 12, **asked),
        request(3, prompt[:20], 12, logprobs=0, prompt_logprobs=20, **fields),
        request(4, prompt, 12, **fields),
    )
    for served in (cold, warm):
        _assert_all_logprobs(checkpoint[1], prompt, served, 5, 3)
    _assert_all_logprobs(checkpoint[1], prompt[:20], other, 0, 20)
    assert warm.finished.cached_tokens == 0, "cached tokens have no logits"
    assert plain.finished.cached_tokens > 0
    assert plain.token_ids == cold.token_ids == warm.token_ids
    assert not plain.logprobs and not plain.prompt_logprobs


@pytest.mark.parametrize("overlap", [True, False])
def test_logprobs_come_once_and_right_across_preemptions(
    cramped: CpuEngine, checkpoint: tuple[Path, PreTrainedModel], overlap: bool
) -> None:
    prompts = [prompt_of(25 + uid, uid) for uid in range(6)]
    requests = [
        request(
            uid,
            prompt,
            24,
            sampling=SamplingParams(temperature=1.0, seed=uid, frequency_penalty=0.5),
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
        )
        for uid, prompt in enumerate(prompts, 1)
    ]
    config = SchedulerConfig(token_budget=11)
    server = Server(cramped, overlap=overlap, config=config)
    served = server.serve(*requests)
    assert server.scheduler.load().preemptions > 0
    for prompt, one in zip(prompts, served, strict=True):
        _assert_all_logprobs(checkpoint[1], prompt, one, 2, 1)


def test_the_token_that_ends_a_request_has_no_entry(engine: CpuEngine) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((EOS, 100.0),))
    (served,) = Server(engine).serve(
        request(1, prompt_of(8, 7), 20, sampling=params, min_tokens=4, logprobs=1)
    )
    assert len(served.logprobs) == len(served.token_ids) == 4


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_decide_what_their_rows_may_sample_and_nothing_of_others(
    engine: CpuEngine, overlap: bool
) -> None:
    free = request(1, prompt_of(10, 8), 12, ignore_eos=True)
    bound = [
        request(
            uid,
            prompt_of(10 + uid, uid),
            12,
            sampling=SamplingParams(temperature=2.0, seed=uid),
            structured_output=ANY_RULE,
        )
        for uid in (2, 3)
    ]
    wanted = Server(engine).serve(free)[0].token_ids
    served = Server(engine, overlap=overlap, masks=by_position).serve(bound[0], free, bound[1])
    assert served[1].token_ids == wanted
    for asked, given in ((bound[0], served[0]), (bound[1], served[2])):
        start = len(asked.prompt_token_ids)
        assert len(given.token_ids) == 12
        assert all(t in (3, start + i) for i, t in enumerate(given.token_ids))


def test_a_masked_step_waits_for_its_masks_and_later_steps_for_it(engine: CpuEngine) -> None:
    builder = PlanBuilder(page_size=4, num_pages=128, max_rows=6)
    first = replace(builder.plan(prefill={0: prompt_of(6, 1)}), masked=np.zeros(1, np.int32))
    second = builder.plan(decode=[0])
    steps = [engine.launch(first), engine.launch(second)]
    reused = only(17)
    steps[0].provide_masks(reused)
    reused.fill(0)
    results = [step.result() for step in steps]
    assert results[0].token_ids.tolist() == [17]
    assert not results[1].faulty.any()


def test_a_mask_that_allows_nothing_makes_its_own_row_faulty(engine: CpuEngine) -> None:
    builder = PlanBuilder(page_size=4, num_pages=128, max_rows=6)
    prefill = {0: prompt_of(6, 1), 1: prompt_of(6, 1)}
    plan = replace(builder.plan(prefill=prefill), masked=np.array([1], np.int32))
    step = engine.launch(plan)
    step.provide_masks(only())
    assert step.result().faulty.tolist() == [False, True]


def test_closing_gives_up_steps_that_never_get_their_masks(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    config = CpuEngineConfig(page_size=4, num_pages=64, max_rows=6, max_context=128)
    engine = CpuEngine(lambda: load_tiny(checkpoint[0], prepack=False), config)
    builder = PlanBuilder(page_size=4, num_pages=64, max_rows=6)
    masked = np.zeros(1, np.int32)
    steps = [
        engine.launch(replace(builder.plan(prefill={0: prompt_of(6, 1)}), masked=masked)),
        engine.launch(replace(builder.plan(decode=[0]), masked=masked)),
    ]
    closing = Thread(target=engine.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    for step in steps:
        step.provide_masks(only(1))
        with pytest.raises(EngineError):
            step.result()


def test_adjusted_rows_whose_opening_was_lost_do_no_harm(engine: CpuEngine) -> None:
    builder = PlanBuilder(page_size=4, num_pages=128, max_rows=6)
    prompts = {4: prompt_of(6, 1), 5: prompt_of(7, 2)}
    wanted = engine.launch(builder.plan(prefill=prompts)).result()
    builder = PlanBuilder(page_size=4, num_pages=128, max_rows=6)
    lost = replace(builder.plan(prefill=prompts), adjusted=np.array([1], np.int32))
    assert engine.launch(lost).result().token_ids[0] == wanted.token_ids[0]


def test_an_unsound_row_is_faulty_even_where_a_mask_hides_what_is_wrong(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    model = load_tiny(checkpoint[0], prepack=False)
    with torch.inference_mode():
        model.head.weight[9] = float("nan")
    config = CpuEngineConfig(page_size=4, num_pages=64, max_rows=6, max_context=128)
    engine = CpuEngine(lambda: model, config)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(5, 6))
    try:
        (served,) = Server(engine).serve(request(1, prompt_of(6, 1), sampling=params))
    finally:
        engine.close()
    assert not served.token_ids
    (end,) = served.ended
    assert isinstance(end, Failed)
    assert "not finite" in end.message
