"""The CUDA engine under the real scheduler, against transformers in float32."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.types import SamplingParams
from tests.bench.offline import Run, random_prompt, run_offline
from tests.worker.models.tiny import SHAPES, VOCAB_SIZE, Shape, write_checkpoint
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig

pytest.importorskip("flashinfer", reason="FlashInfer is an extra for machines with a GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from worker.checkpoint.open import open_checkpoint  # noqa: E402
from worker.engine.cuda.engine import CudaEngine  # noqa: E402
from worker.engine.cuda.open import CudaOptions, open_cuda_engine  # noqa: E402

OPTIONS = CudaOptions(max_rows=16, token_budget=256, kv_pages=512)
CONFIG = SchedulerConfig(token_budget=256, max_running=16, check_integrity=True)
# bfloat16 has 8 bits; three layers of it stay within this share of the logits' spread.
TOLERANCE = 0.06


def open_engine(folder: Path, options: CudaOptions = OPTIONS) -> CudaEngine:
    checkpoint = open_checkpoint(
        str(folder), cache_dir=folder / "cache", progress=lambda message: None
    )
    return open_cuda_engine(checkpoint, options, lambda message: None)


def requests(count: int, *, temperature: float = 0.0, seed: int = 0) -> list[NewRequest]:
    rng = np.random.default_rng(seed)
    return [
        NewRequest(
            uid=i + 1,
            prompt_token_ids=random_prompt(rng, int(rng.integers(1, 120)), VOCAB_SIZE),
            max_tokens=int(rng.integers(1, 60)),
            sampling=SamplingParams(temperature=temperature, seed=i),
            ignore_eos=True,
        )
        for i in range(count)
    ]


def worst_gap(model: torch.nn.Module, asked: list[NewRequest], run: Run) -> float:
    """How far below the best logit a greedy token lay, in standard deviations of the logits."""
    worst = 0.0
    for request in asked:
        given = run.token_ids[request.uid]
        assert len(given) == request.max_tokens
        tokens = torch.tensor([*request.prompt_token_ids.tolist(), *given])
        with torch.inference_mode():
            logits = model(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
    return worst


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaEngine]:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, SHAPES[-2])
    opened = open_engine(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, shape: Shape) -> None:
    model = write_checkpoint(tmp_path, shape)
    engine = open_engine(tmp_path)
    try:
        asked = requests(24)
        run = run_offline(engine, asked, config=CONFIG)
    finally:
        engine.close()
    gap = worst_gap(model, asked, run)
    print(f"{shape}: worst gap {gap:.4f}")
    assert gap < TOLERANCE


def test_overlap_changes_no_token(engine: CudaEngine) -> None:
    asked = requests(40, temperature=0.8)
    with_overlap = run_offline(engine, asked, config=CONFIG, overlap=True)
    without = run_offline(engine, asked, config=CONFIG, overlap=False)
    assert with_overlap.token_ids == without.token_ids


def test_a_run_repeats_itself(engine: CudaEngine) -> None:
    asked = requests(40, temperature=0.8)
    first = run_offline(engine, asked, config=CONFIG)
    assert run_offline(engine, asked, config=CONFIG).token_ids == first.token_ids


def test_graphs_change_no_token_where_the_batch_is_the_same(
    engine: CudaEngine, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, SHAPES[-2])
    eager = open_engine(tmp_path, replace(OPTIONS, graphs=False))
    try:
        # As many requests as the largest graph holds, of one length: no padding rows.
        asked = [replace(request, max_tokens=40) for request in requests(16)]
        with_graphs = run_offline(engine, asked, config=CONFIG)
        without = run_offline(eager, asked, config=CONFIG)
    finally:
        eager.close()
    assert with_graphs.token_ids == without.token_ids


def test_preemption_and_a_full_pool_lose_nothing(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, SHAPES[-2])
    engine = open_engine(tmp_path, replace(OPTIONS, kv_pages=40))
    try:
        asked = requests(32)
        run = run_offline(engine, asked, config=CONFIG)
    finally:
        engine.close()
    assert run.load.preemptions > 0
    assert worst_gap(model, asked, run) < TOLERANCE


def test_not_a_number_ends_its_own_request_alone(tmp_path: Path) -> None:
    # Not a tied shape: there the embedding's row would poison everybody's logits.
    model = write_checkpoint(tmp_path, SHAPES[-1])
    poisoned = VOCAB_SIZE - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = float("nan")
    model.save_pretrained(tmp_path)
    engine = open_engine(tmp_path)
    try:
        asked = [
            replace(one, prompt_token_ids=np.minimum(one.prompt_token_ids, poisoned - 1))
            for one in requests(8)
        ]
        sick = replace(asked[3], prompt_token_ids=np.array([5, poisoned, 7], np.int32))
        run = run_offline(engine, [*asked[:3], sick, *asked[4:]], config=CONFIG)
        assert run.num_failed == 1
        assert run.token_ids[sick.uid] == []
        healthy = run_offline(engine, asked, config=CONFIG)
        assert healthy.num_failed == 0
    finally:
        engine.close()
