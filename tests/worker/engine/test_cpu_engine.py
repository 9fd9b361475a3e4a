"""The CPU engine as the scheduler sees it: steps in, tokens out."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared.errors import EngineError
from shared.types import SamplingParams
from tests.worker.engine.plans import PlanBuilder
from tests.worker.models.tiny import VOCAB_SIZE, Shape, load_tiny, write_checkpoint
from worker.engine.cpu import CpuEngine, CpuEngineConfig
from worker.models.config import ModelError
from worker.models.decoder import Decoder
from worker.step import StepPlan, StepResult

_MAX_ROWS = 6
_NUM_PAGES = 96
_PAGE_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_checkpoint(folder, Shape("Llama", num_heads=6, num_kv_heads=3))


@pytest.fixture
def engine(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[CpuEngine]:
    engine = _engine(checkpoint[0])
    yield engine
    engine.close()


def _engine(folder: Path, *, dtype: torch.dtype = torch.float32) -> CpuEngine:
    config = CpuEngineConfig(
        page_size=_PAGE_SIZE, num_pages=_NUM_PAGES, max_rows=_MAX_ROWS, max_context=128
    )
    return CpuEngine(lambda: load_tiny(folder, prepack=True, dtype=dtype), config)


def _builder(seed: int = 0) -> PlanBuilder:
    return PlanBuilder(page_size=_PAGE_SIZE, num_pages=_NUM_PAGES, max_rows=_MAX_ROWS, seed=seed)


def _prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


def _greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _run(engine: CpuEngine, plans: list[StepPlan]) -> list[StepResult]:
    """Launches each step before the result of the one before is asked for."""
    results = []
    in_flight = engine.launch(plans[0])
    for plan in plans[1:]:
        following = engine.launch(plan)
        results.append(in_flight.result())
        in_flight = following
    return [*results, in_flight.result()]


def test_two_steps_in_flight_give_the_reference_s_tokens(
    engine: CpuEngine, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    prompts = {0: _prompt(20, 1), 3: _prompt(33, 2), 5: _prompt(1, 3)}
    builder = _builder()
    plans = [builder.plan(prefill=prompts)]
    plans += [builder.plan(decode=[3, 0, 5]) for _ in range(11)]
    results = _run(engine, plans)
    for place, row in enumerate([0, 3, 5]):
        first = int(results[0].token_ids[place])
        decoded = [int(result.token_ids[[3, 0, 5].index(row)]) for result in results[1:]]
        assert [first, *decoded] == _greedy_reference(checkpoint[1], prompts[row], 12)


def test_chunks_mixed_with_decode_rows_give_the_reference_s_tokens(
    engine: CpuEngine, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    long, short = _prompt(50, 4), _prompt(7, 5)
    builder = _builder()
    plans = [
        builder.plan(prefill={1: short}),
        builder.plan(decode=[1], prefill={2: long[:16]}, unfinished=[2]),
        builder.plan(decode=[1], prefill={2: long[16:17]}, unfinished=[2]),
        builder.plan(decode=[1], prefill={2: long[17:]}),
        builder.plan(decode=[1, 2]),
        builder.plan(decode=[2, 1]),
    ]
    results = _run(engine, plans)
    row_1 = [int(result.token_ids[0]) for result in results[:5]] + [int(results[5].token_ids[1])]
    row_2 = [int(results[3].token_ids[1]), int(results[4].token_ids[1])]
    row_2.append(int(results[5].token_ids[0]))
    assert row_1 == _greedy_reference(checkpoint[1], short, 6)
    assert row_2 == _greedy_reference(checkpoint[1], long, 3)


def test_a_step_without_any_sampling_row_still_writes_its_kv(
    engine: CpuEngine, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    prompt = _prompt(40, 6)
    builder = _builder()
    results = _run(
        engine,
        [
            builder.plan(prefill={0: prompt[:30]}, unfinished=[0]),
            builder.plan(prefill={0: prompt[30:]}),
        ],
    )
    assert int(results[1].token_ids[0]) == _greedy_reference(checkpoint[1], prompt, 1)[0]


def test_the_sentinel_takes_tokens_that_nobody_may_read(
    engine: CpuEngine, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    ending, going_on = _prompt(9, 7), _prompt(12, 8)
    builder = _builder()
    results = _run(
        engine,
        [
            builder.plan(prefill={0: ending, 1: going_on}, unwritten=[0]),
            builder.plan(decode=[1]),
        ],
    )
    assert int(results[0].token_ids[0]) == _greedy_reference(checkpoint[1], ending, 1)[0]
    wanted = _greedy_reference(checkpoint[1], going_on, 2)
    assert [int(results[0].token_ids[1]), int(results[1].token_ids[0])] == wanted


def test_sampled_tokens_do_not_depend_on_company_or_chunks(engine: CpuEngine) -> None:
    prompt = _prompt(30, 9)
    params = {0: SamplingParams(temperature=1.0, top_p=0.9, seed=77)}
    alone = _builder(1)
    plans = [alone.plan(prefill={0: prompt}, sampling=params)]
    plans += [alone.plan(decode=[0], sampling=params) for _ in range(8)]
    wanted = [int(result.token_ids[0]) for result in _run(engine, plans)]

    company = {1: SamplingParams(temperature=0.5, seed=1), 2: SamplingParams(temperature=0.0)}
    builder = _builder(2)
    others = {1: _prompt(60, 10), 2: _prompt(3, 11)}
    plans = [builder.plan(prefill={0: prompt[:11], **others}, unfinished=[0], sampling=company)]
    plans += [builder.plan(decode=[1], prefill={0: prompt[11:]}, sampling=params | company)]
    plans += [builder.plan(decode=[2, 1, 0], sampling=params | company) for _ in range(8)]
    results = _run(engine, plans)
    mixed = [int(results[1].token_ids[1])] + [int(result.token_ids[2]) for result in results[2:]]
    assert mixed == wanted


def test_logits_that_are_not_finite_make_only_their_own_row_faulty(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    def load() -> Decoder:
        model = load_tiny(checkpoint[0], prepack=True)
        with torch.inference_mode():
            model.embedding[VOCAB_SIZE - 1] = float("nan")
        return model

    config = CpuEngineConfig(num_pages=_NUM_PAGES, max_rows=_MAX_ROWS, max_context=128)
    engine = CpuEngine(load, config)
    healthy = [token % (VOCAB_SIZE - 1) for token in _prompt(20, 12)]
    builder = _builder()
    plans = [
        builder.plan(prefill={0: healthy, 1: [*healthy, VOCAB_SIZE - 1], 2: healthy}),
        builder.plan(decode=[0, 1, 2]),
    ]
    try:
        results = _run(engine, plans)
    finally:
        engine.close()
    for result in results:
        assert result.faulty.tolist() == [False, True, False]
        assert result.token_ids[0] == result.token_ids[2]


def test_a_step_that_raises_fails_alone(engine: CpuEngine) -> None:
    prompt = _prompt(10, 13)
    builder = _builder()
    broken = engine.launch(builder.plan(prefill={0: [VOCAB_SIZE + 5]}))
    following = engine.launch(builder.plan(prefill={1: prompt}))
    with pytest.raises(EngineError, match="failed in step 1"):
        broken.result()
    assert not following.result().faulty.any()


def test_launch_returns_while_the_step_before_still_waits(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    released = Event()

    class Slow:
        """A model whose forward waits to be let go."""

        def __init__(self, model: Decoder) -> None:
            self.config, self.dtype, self.max_context = (
                model.config,
                model.dtype,
                model.max_context,
            )
            self.logits = model.logits
            self._model = model

        def __call__(self, *arguments: object) -> torch.Tensor:
            assert released.wait(30)
            hidden: torch.Tensor = self._model(*arguments)  # type: ignore[arg-type]
            return hidden

    config = CpuEngineConfig(num_pages=_NUM_PAGES, max_rows=_MAX_ROWS, max_context=128)
    engine = CpuEngine(lambda: Slow(load_tiny(checkpoint[0], prepack=False)), config)  # type: ignore[arg-type, return-value]
    builder = _builder()
    first = engine.launch(builder.plan(prefill={0: _prompt(5, 14)}))
    second = engine.launch(builder.plan(decode=[0]))
    released.set()
    started, following = first.result(), second.result()
    engine.close()
    assert started.finished_at <= following.started_at <= following.finished_at


def test_bfloat16_runs_and_stays_close_to_float32(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    engine = _engine(checkpoint[0], dtype=torch.bfloat16)
    builder = _builder()
    prompts = {row: _prompt(30, 20 + row) for row in range(6)}
    plans = [builder.plan(prefill=prompts), builder.plan(decode=list(prompts))]
    try:
        results = _run(engine, plans)
    finally:
        engine.close()
    wanted = [_greedy_reference(checkpoint[1], prompt, 1)[0] for prompt in prompts.values()]
    agreeing = sum(int(results[0].token_ids[row]) == wanted[row] for row in range(6))
    assert agreeing >= 4
    assert not results[1].faulty.any()


def test_closing_twice_is_harmless(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    engine = _engine(checkpoint[0])
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CpuEngineConfig(max_context=100_000), "max_context 100000 exceeds"),
        (CpuEngineConfig(num_pages=3, max_context=128), "kv_pages 3 are fewer than the 8 pages"),
        (CpuEngineConfig(memory_fraction=1e-9, max_context=128), "raise memory_fraction"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_what_would_help(
    checkpoint: tuple[Path, PreTrainedModel], config: CpuEngineConfig, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        CpuEngine(lambda: load_tiny(checkpoint[0], prepack=False), config)


def test_the_kv_pool_is_sized_by_memory_but_never_beyond_what_rows_can_fill(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    config = CpuEngineConfig(page_size=16, max_rows=3, max_context=128)
    engine = CpuEngine(lambda: load_tiny(checkpoint[0], prepack=False), config)
    engine.close()
    assert engine.info.num_pages == 3 * 8
