"""The CUDA engine under the real scheduler, against transformers in float32."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

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


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' model of a checkpoint whose weights are bfloat16."""

    exact: PreTrainedModel
    # The same in bfloat16 arithmetic: how far rounding alone may lead.
    rounded: PreTrainedModel

    @classmethod
    def write(cls, folder: Path, shape: Shape) -> "Reference":
        write_checkpoint(folder, shape).bfloat16().save_pretrained(folder)
        # Loaded anew: `bfloat16()` has rounded the rotary frequencies, too.
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        for model in (exact, rounded):
            # Not its own `cuda`, whose types transformers has lost.
            torch.nn.Module.cuda(model)
        return cls(exact, rounded)

    def check(self, asked: list[NewRequest], run: Run) -> None:
        """Greedy tokens may lie below the best logit only as far as rounding explains."""
        ours, theirs = (torch.cat(gaps) for gaps in zip(*self._gaps(asked, run), strict=True))
        print(
            f"gaps: worst {ours.max():.4f} mean {ours.mean():.5f}, transformers' in bfloat16 "
            f"{theirs.max():.4f} and {theirs.mean():.5f}, of {len(ours)} tokens"
        )
        assert ours.mean() < 2 * theirs.mean() + 0.002
        assert ours.max() < 2 * theirs.max() + 0.05

    def _gaps(self, asked: list[NewRequest], run: Run) -> Iterator[tuple[torch.Tensor, ...]]:
        """For each request, in deviations of the logits: best logit minus chosen one."""
        for request in asked:
            given = run.token_ids[request.uid]
            assert len(given) == request.max_tokens
            tokens = torch.tensor([*request.prompt_token_ids.tolist(), *given])[None, :-1]
            kept = slice(len(request.prompt_token_ids) - 1, None)
            with torch.inference_mode():
                tokens = tokens.to(self.exact.device)
                logits = self.exact(tokens).logits[0, kept].cpu()
                rounded = self.rounded(tokens).logits[0, kept].argmax(1).cpu()
            chosen = (torch.tensor(given), rounded)
            yield tuple(
                (logits.amax(1) - logits.gather(1, one[:, None])[:, 0]) / logits.std(1)
                for one in chosen
            )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaEngine]:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, SHAPES[-2])
    opened = open_engine(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, shape: Shape) -> None:
    reference = Reference.write(tmp_path, shape)
    engine = open_engine(tmp_path)
    try:
        asked = requests(24)
        run = run_offline(engine, asked, config=CONFIG)
    finally:
        engine.close()
    reference.check(asked, run)


def test_overlap_changes_no_token_where_the_batches_are_the_same(engine: CudaEngine) -> None:
    # Nobody waits for a row, so that both loops form the same steps.
    asked = requests(CONFIG.max_running, temperature=0.8)
    with_overlap = run_offline(engine, asked, config=CONFIG, overlap=True)
    without = run_offline(engine, asked, config=CONFIG, overlap=False)
    assert with_overlap.token_ids == without.token_ids


def test_overlap_with_rows_that_change_hands_differs_by_rounding_alone(tmp_path: Path) -> None:
    # A row is free one step later, so a request that waits meets another batch: other kernels.
    reference = Reference.write(tmp_path, SHAPES[-2])
    engine = open_engine(tmp_path)
    try:
        asked = requests(40)
        runs = [run_offline(engine, asked, config=CONFIG, overlap=on) for on in (True, False)]
    finally:
        engine.close()
    for run in runs:
        reference.check(asked, run)


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


def test_a_request_alone_and_in_a_mixed_batch_differ_by_rounding_alone(tmp_path: Path) -> None:
    # Alone its products, and the cutting of its KV, are other kernels than in a batch of 64.
    reference = Reference.write(tmp_path, SHAPES[-2])
    engine = open_engine(tmp_path, replace(OPTIONS, max_rows=64, kv_pages=1024))
    config = replace(CONFIG, max_running=64)
    try:
        asked = requests(64)
        together = run_offline(engine, asked, config=config)
        alone = {
            one.uid: run_offline(engine, [one], config=config).token_ids[one.uid] for one in asked
        }
    finally:
        engine.close()
    same = sum(alone[one.uid] == together.token_ids[one.uid] for one in asked)
    print(f"{same} of {len(asked)} requests have the same tokens alone and in a batch of 64")
    reference.check(asked, together)
    reference.check(asked, replace(together, token_ids=alone))


def test_a_prompt_of_30000_tokens_in_chunks(tmp_path: Path) -> None:
    reference = Reference.write(tmp_path, SHAPES[-1])
    config_file = tmp_path / "config.json"
    written = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(written | {"max_position_embeddings": 32_768}))
    prompt = random_prompt(np.random.default_rng(3), 30_000, VOCAB_SIZE)
    asked = [NewRequest(1, prompt, 24, SamplingParams(temperature=0.0), ignore_eos=True)]
    for budget in (1024, 32_768):
        options = CudaOptions(max_rows=4, token_budget=budget, kv_pages=2048)
        engine = open_engine(tmp_path, options)
        try:
            run = run_offline(engine, asked, config=replace(CONFIG, token_budget=budget))
        finally:
            engine.close()
        reference.check(asked, run)


def test_preemption_and_a_full_pool_lose_nothing(tmp_path: Path) -> None:
    reference = Reference.write(tmp_path, SHAPES[-2])
    engine = open_engine(tmp_path, replace(OPTIONS, kv_pages=36))
    try:
        asked = requests(32)
        run = run_offline(engine, asked, config=CONFIG)
    finally:
        engine.close()
    assert run.load.preemptions > 0
    reference.check(asked, run)


def test_not_a_number_ends_its_own_request_alone(tmp_path: Path) -> None:
    # Not a tied shape: there the embedding's row would poison everybody's logits.
    model = write_checkpoint(tmp_path, SHAPES[-1])
    poisoned = VOCAB_SIZE - 1
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["model.embed_tokens.weight"][poisoned] = float("nan")
        # Nor may anybody sample it.
        weights["lm_head.weight"][poisoned] = 0.0
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
