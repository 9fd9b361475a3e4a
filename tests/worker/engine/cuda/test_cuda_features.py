"""The whole generation API on the CUDA engine, under the scheduler."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

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
from tests.worker.models.tiny import SHAPES, VOCAB_SIZE, write_checkpoint
from worker.engine.adjustments import RowAdjustment
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig
from worker.step import Int32Array, RowOpening, StepPlan

pytest.importorskip("flashinfer", reason="FlashInfer is an extra for machines with a GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from worker.checkpoint.open import open_checkpoint  # noqa: E402
from worker.engine.cuda.engine import CudaEngine  # noqa: E402
from worker.engine.cuda.open import CudaOptions, open_cuda_engine  # noqa: E402

NUM_ROWS = 8
OPTIONS = CudaOptions(max_rows=NUM_ROWS, token_budget=64, kv_pages=256)
CONFIG = SchedulerConfig(token_budget=64, max_running=NUM_ROWS, check_integrity=True)
# Of a log-probability, between bfloat16 arithmetic and float32's. transformers parts from
# itself by up to 0.22 for this model, and by 0.03 in the root of the mean square.
ROUNDING = 0.25
MEAN_ROUNDING = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, SHAPES[-2]).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


def opened(folder: Path, options: CudaOptions = OPTIONS) -> CudaEngine:
    checkpoint = open_checkpoint(
        str(folder), cache_dir=folder / "cache", progress=lambda message: None
    )
    return open_cuda_engine(checkpoint, options, lambda message: None)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[CudaEngine]:
    engine = opened(folder)
    yield engine
    engine.close()


def tokens_of(served: list[Served]) -> list[list[int]]:
    return [one.token_ids for one in served]


def test_overlap_changes_no_token_of_any_way_of_drawing(engine: CudaEngine) -> None:
    served = [
        tokens_of(Server(engine, config=CONFIG, overlap=on).serve(*varied(NUM_ROWS)))
        for on in (True, False)
    ]
    assert served[0] == served[1]
    assert all(len(tokens) == 20 for tokens in served[0])


def test_greedy_tokens_with_penalties_are_the_best_of_adjusted_logits(
    engine: CudaEngine, model: PreTrainedModel
) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
    )
    requests = [
        request(uid, prompt_of(20, uid), 40, sampling=params, ignore_eos=True)
        for uid in range(1, 9)
    ]
    served = Server(engine, config=CONFIG).serve(*requests)
    for asked, given in zip(requests, served, strict=True):
        assert_best_of_adjusted(model, asked, given)


def assert_best_of_adjusted(model: PreTrainedModel, asked: NewRequest, given: Served) -> None:
    """Greedy tokens are the best of the reference's logits after penalties."""
    prompt = asked.prompt_token_ids.tolist()
    logits = logits_of(model, [*prompt, *given.token_ids])[len(prompt) - 1 :]
    adjustment = RowAdjustment(penalised(asked))
    for i, token in enumerate(given.token_ids):
        values = logits[i].numpy().copy()
        adjustment.apply(values, len(prompt) + i)
        adjustment.count(token)
        # One token counted late is a step of 0.7 or more; rounding is far smaller.
        assert values[token] > values.max() - 0.3


def penalised(asked: NewRequest) -> RowOpening:
    params, nothing = asked.sampling, np.empty(0, np.int32)
    allowed = params.allowed_token_ids
    return RowOpening(
        row=0,
        token_ids=asked.prompt_token_ids,
        prompt_len=len(asked.prompt_token_ids),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=nothing,
        bias_values=np.empty(0, np.float32),
        allowed_ids=np.array(allowed, np.int32) if allowed else None,
        banned_ids=nothing,
        min_len=0,
    )


def test_only_allowed_ids_and_never_a_forbidden_bias_are_drawn(engine: CudaEngine) -> None:
    allowed = (11, 50, 51)
    one = SamplingParams(temperature=3.0, seed=9, allowed_token_ids=allowed)
    other = SamplingParams(temperature=3.0, seed=9, logit_bias=((77, 100.0),))
    first, second = Server(engine, config=CONFIG).serve(
        request(1, prompt_of(5, 2), 40, sampling=one),
        request(2, prompt_of(5, 2), 10, sampling=other),
    )
    assert set(first.token_ids) <= set(allowed)
    assert len(set(first.token_ids)) > 1
    assert set(second.token_ids) == {77}


@pytest.mark.parametrize("overlap", [True, False])
def test_no_request_ends_before_its_min_tokens(engine: CudaEngine, overlap: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=3, logit_bias=((EOS, 60.0), (5, 40.0)))
    requests = [
        request(
            1 + min_tokens,
            prompt_of(12, 3),
            20,
            min_tokens=min_tokens,
            sampling=params,
            stop_token_ids=(5,),
        )
        for min_tokens in range(7)
    ]
    served = Server(engine, config=CONFIG, overlap=overlap).serve(*requests)
    assert [len(one.token_ids) for one in served] == list(range(7))
    assert {one.finished.matched_token_id for one in served} == {EOS}


def assert_entries(
    entries: list[Entry], tokens: list[int], logits: torch.Tensor, num_top: int
) -> None:
    """Log-probabilities and ranks, as near as bfloat16 arithmetic gives them."""
    assert_logprobs(entries, tokens, logits, num_top, rounding=ROUNDING)
    reference = torch.log_softmax(logits.double(), dim=-1)
    given = torch.tensor([entry.top_logprobs for entry in entries], dtype=torch.float64)
    ids = torch.tensor([entry.top_ids for entry in entries])
    assert (given - reference.gather(1, ids)).square().mean().sqrt() < MEAN_ROUNDING
    for i, entry in enumerate(entries):
        surely, perhaps = (
            rank_of(entry.token_id, logits[i], margin=margin) for margin in (ROUNDING, -ROUNDING)
        )
        assert surely <= entry.rank <= perhaps


# Alone, in a graph with padding, and in the largest graph: each has its logits elsewhere.
@pytest.mark.parametrize("count", [1, 3, 8])
def test_logprobs_are_those_of_transformers(
    engine: CudaEngine, model: PreTrainedModel, count: int
) -> None:
    params = SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.5, top_k=30)
    requests = [
        request(
            uid,
            # Longer than the budget, so that it comes in chunks, and they in slices.
            prompt_of(90 + uid, uid),
            12,
            sampling=params if uid % 2 else SamplingParams(temperature=1.0, seed=uid),
            ignore_eos=True,
            logprobs=5,
            prompt_logprobs=20,
        )
        for uid in range(1, count + 1)
    ]
    for overlap in (True, False):
        served = Server(engine, config=CONFIG, overlap=overlap).serve(*requests)
        for asked, given in zip(requests, served, strict=True):
            prompt = asked.prompt_token_ids.tolist()
            logits = logits_of(model, [*prompt, *given.token_ids])
            output = logits[len(prompt) - 1 : -1]
            assert_entries(given.logprobs, given.token_ids, output, 5)
            assert_entries(given.prompt_logprobs, prompt[1:], logits[: len(prompt) - 1], 20)


def test_graphs_change_nothing_of_what_features_give(engine: CudaEngine, folder: Path) -> None:
    # Prefilled in one step and as long as each other, as many as the largest graph holds: no
    # padding rows, whose number chooses the LM head's kernel.
    requests = [
        replace(one, logprobs=3, prompt_token_ids=one.prompt_token_ids[:8])
        for one in varied(NUM_ROWS)
    ]
    with_graphs = Server(engine, config=CONFIG).serve(*requests)
    eager = opened(folder, replace(OPTIONS, graphs=False))
    try:
        without = Server(eager, config=CONFIG).serve(*requests)
    finally:
        eager.close()
    assert tokens_of(with_graphs) == tokens_of(without)
    assert [one.logprobs for one in with_graphs] == [one.logprobs for one in without]


def every_third(plan: StepPlan) -> Int32Array:
    """Masks of a third of all tokens, which at each position are others."""
    positions = (plan.cached_lens + plan.extend_lens)[plan.masked]
    return np.concatenate([only(*range(int(at) % 3, VOCAB_SIZE, 3)) for at in positions])


def test_graphs_change_nothing_of_what_masks_leave(engine: CudaEngine, folder: Path) -> None:
    requests = [
        replace(
            one,
            prompt_token_ids=one.prompt_token_ids[:8],
            structured_output=ANY_RULE if one.uid in (1, 2, 4, 6, 7) else None,
        )
        for one in varied(NUM_ROWS)
    ]
    with_graphs = Server(engine, config=CONFIG, masks=every_third).serve(*requests)
    eager = opened(folder, replace(OPTIONS, graphs=False))
    try:
        without = Server(eager, config=CONFIG, masks=every_third).serve(*requests)
    finally:
        eager.close()
    assert tokens_of(with_graphs) == tokens_of(without)
    for one, given in zip(requests, with_graphs, strict=True):
        if one.structured_output is not None:
            # The first token comes after a prompt of 8.
            assert [token % 3 for token in given.token_ids] == [at % 3 for at in range(8, 28)]


def test_features_survive_preemption(folder: Path, model: PreTrainedModel) -> None:
    cramped = opened(folder, replace(OPTIONS, kv_pages=36))
    params = SamplingParams(temperature=0.0, allowed_token_ids=(11, 12, 13, 14))
    balanced = replace(params, frequency_penalty=2.0)
    requests = [
        request(uid, prompt_of(60, uid), 80, sampling=balanced, ignore_eos=True, prompt_logprobs=1)
        for uid in range(1, 9)
    ]
    try:
        server = Server(cramped, config=CONFIG)
        served = server.serve(*requests)
    finally:
        cramped.close()
    assert server.scheduler.load().preemptions > 0
    for asked, given in zip(requests, served, strict=True):
        # A count that was forgotten, or made twice, would favour another of the four.
        assert_best_of_adjusted(model, asked, given)
        prompt = asked.prompt_token_ids.tolist()
        assert_entries(given.prompt_logprobs, prompt[1:], logits_of(model, prompt)[:-1], 1)


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_decide_what_their_rows_may_sample_and_nothing_of_others(
    engine: CudaEngine, overlap: bool
) -> None:
    free = [
        request(uid, prompt_of(10, uid), 12, ignore_eos=True, sampling=SamplingParams(seed=uid))
        for uid in range(1, 5)
    ]
    bound = [
        request(
            uid,
            prompt_of(10, uid),
            12,
            # Half of them are adjusted, too.
            sampling=SamplingParams(temperature=2.0, seed=uid, presence_penalty=uid % 2 / 2),
            structured_output=ANY_RULE,
            ignore_eos=True,
        )
        for uid in range(5, 9)
    ]
    # The same batches, so that the free ones' logits are the same.
    unbound = [replace(one, structured_output=None) for one in bound]
    wanted = tokens_of(Server(engine, config=CONFIG).serve(*free, *unbound))[:4]
    server = Server(engine, config=CONFIG, overlap=overlap, masks=by_position)
    served = server.serve(*free, *bound)
    assert tokens_of(served[:4]) == wanted
    for one in served[4:]:
        assert len(one.token_ids) == 12
        assert all(t in (3, 10 + i) for i, t in enumerate(one.token_ids))


def builder() -> PlanBuilder:
    return PlanBuilder(page_size=16, num_pages=256, max_rows=8)


def test_a_step_behind_one_that_waits_for_masks_reads_what_it_draws(engine: CudaEngine) -> None:
    plans, masked = builder(), np.zeros(1, np.int32)
    first = replace(plans.plan(prefill={0: prompt_of(6, 1)}), masked=masked)
    second = replace(plans.plan(decode=[0]), masked=masked)
    steps = [engine.launch(first), engine.launch(second)]
    reused = only(17)
    steps[0].provide_masks(reused)
    reused[:] = only(18)
    steps[1].provide_masks(reused)
    third = engine.launch(plans.plan(decode=[0]))
    assert [step.result().token_ids.tolist() for step in steps] == [[17], [18]]
    plain = builder()
    alone = engine.launch(plain.plan(prefill={0: [*prompt_of(6, 1), 17, 18]}))
    told, wanted = third.result(), alone.result()
    assert not told.faulty.any()
    assert told.token_ids.tolist() == wanted.token_ids.tolist()


@pytest.mark.parametrize("masked", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_a_graph_with_room_for_more_rows_draws_late_for_those_that_wait(
    engine: CudaEngine, masked: list[int]
) -> None:
    # The smallest graph for three rows has four.
    tokens = []
    for places in ([], masked):
        plans = builder()
        prompts = {row: prompt_of(6, row) for row in range(3)}
        engine.launch(plans.plan(prefill=prompts)).result()
        plan = plans.plan(decode=[0, 1, 2])
        step = engine.launch(replace(plan, masked=np.array(places, np.int32)))
        if places:
            step.provide_masks(np.concatenate([only(17 + place) for place in places]))
        result = step.result()
        assert not result.faulty.any()
        tokens.append(result.token_ids)
    tokens[0][masked] = 17 + np.array(masked)
    assert tokens[1].tolist() == tokens[0].tolist()


def test_a_mask_that_allows_nothing_makes_its_own_row_faulty(engine: CudaEngine) -> None:
    plan = builder().plan(prefill={0: prompt_of(6, 1), 1: prompt_of(6, 1)})
    step = engine.launch(replace(plan, masked=np.array([1], np.int32)))
    step.provide_masks(only())
    assert step.result().faulty.tolist() == [False, True]


def test_closing_gives_up_steps_that_never_get_their_masks(folder: Path) -> None:
    engine, plans = opened(folder), builder()
    masked = np.zeros(1, np.int32)
    steps = [
        engine.launch(replace(plans.plan(prefill={0: prompt_of(6, 1)}), masked=masked)),
        engine.launch(replace(plans.plan(decode=[0]), masked=masked)),
    ]
    engine.close()
    for step in steps:
        step.provide_masks(only(1))
        with pytest.raises(EngineError):
            step.result()
