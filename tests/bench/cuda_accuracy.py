"""SmolLM2 on the CUDA engine against transformers in float32.

    python -m tests.bench.cuda_accuracy

Teacher forcing: the reference reads the very tokens that the engine had before it. Decode: 64
prompts at once, greedy, each token the engine chose. Prefill: every beginning of the prompts
as a request of its own that asks for one token. Where the reference's two best logits lie
more than 0.5 apart, at least 99 % of the engine's tokens must be the best.
"""

import argparse
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from shared.types import SamplingParams
from tests.bench import report
from tests.bench.offline import Run, run_offline
from tests.bench.prompts import prompts
from worker.checkpoint.open import BUILT_IN, built_in_path, default_cache_dir, open_checkpoint
from worker.checkpoint.source import Checkpoint
from worker.checkpoint.tokenizer import TOKENIZER
from worker.engine.cuda.open import CudaOptions, open_cuda_engine
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig
from worker.step import Engine

_CLEAR_MARGIN = 0.5
_LEAST_AGREEMENT = 0.99
_CONFIG = SchedulerConfig(token_budget=8192, max_running=256, max_waiting=1 << 20)


@dataclass(slots=True)
class Agreement:
    """Of the engine's tokens with the reference's best ones."""

    name: str
    num_tokens: int = 0
    num_same: int = 0
    num_clear: int = 0
    num_clear_same: int = 0
    worst_gap: float = 0.0

    def add(self, logits: torch.Tensor, chosen: Sequence[int]) -> None:
        """Logits [n, vocab] of the reference, and what the engine chose at each."""
        tokens = torch.tensor(chosen, device=logits.device)
        best = logits.topk(2, dim=1).values
        gap = best[:, 0] - logits.gather(1, tokens[:, None])[:, 0]
        clear = best[:, 0] - best[:, 1] > _CLEAR_MARGIN
        self.num_tokens += len(tokens)
        self.num_same += int((gap == 0).sum())
        self.num_clear += int(clear.sum())
        self.num_clear_same += int((clear & (gap == 0)).sum())
        self.worst_gap = max(self.worst_gap, float(gap.max()))

    @property
    def clear_ratio(self) -> float:
        return self.num_clear_same / max(1, self.num_clear)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_clear_same} of {self.num_clear} positions with a clear "
            f"margin agree ({self.clear_ratio:.2%}), {self.num_same} of all {self.num_tokens} "
            f"({self.num_same / self.num_tokens:.2%}); worst gap {self.worst_gap:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file, if not the built-in one")
    parser.add_argument("--tokens", type=int, default=128, help="of each completion")
    arguments = parser.parse_args()
    report.header("CUDA engine against transformers float32")
    path: Path = arguments.gguf or built_in_path()
    checkpoint = open_checkpoint(
        str(arguments.gguf or BUILT_IN), cache_dir=default_cache_dir({}), progress=print
    )
    texts = _token_ids(checkpoint)
    engine = open_cuda_engine(checkpoint, CudaOptions(max_context=2048), lambda message: None)
    reference = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype="float32"
    )
    # Not its own `cuda`, whose types transformers has lost.
    torch.nn.Module.cuda(reference)
    try:
        decoded = _decode(engine, reference, texts, arguments.tokens)
        prefilled = _prefill(engine, reference, texts)
    finally:
        engine.close()
    report.result(
        {
            "decode_clear_ratio": round(decoded.clear_ratio, 5),
            "prefill_clear_ratio": round(prefilled.clear_ratio, 5),
            "decode_tokens": decoded.num_tokens,
            "prefill_tokens": prefilled.num_tokens,
        }
    )
    if min(decoded.clear_ratio, prefilled.clear_ratio) < _LEAST_AGREEMENT:
        raise SystemExit("too few tokens agree")


def _token_ids(checkpoint: Checkpoint) -> list[list[int]]:
    bundle = checkpoint.tokenizer(lambda message: None)
    tokenizer = tokenizers.Tokenizer.from_buffer(bundle.files[TOKENIZER])
    texts = prompts()
    ids = [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    # To 64 with their own halves, so that lengths are mixed.
    return (ids + [one[: max(1, len(one) // 2)] for one in ids])[:64]


def _decode(
    engine: Engine, reference: torch.nn.Module, texts: list[list[int]], num_tokens: int
) -> Agreement:
    together = _run(engine, texts, num_tokens)
    alone = [_run(engine, [text], num_tokens).token_ids[1] for text in texts]
    agreement = Agreement("decode, 64 rows")
    alone_agreement = Agreement("decode, each alone")
    rounding = Agreement("transformers in bfloat16, same tokens")
    same, gaps = 0, []
    for i, text in enumerate(texts):
        given = together.token_ids[i + 1]
        logits = _logits(reference, text + given)[len(text) - 1 : -1]
        agreement.add(logits, given)
        alone_agreement.add(_logits(reference, text + alone[i])[len(text) - 1 : -1], alone[i])
        same += given == alone[i]
        gaps += _first_divergence(logits, given, alone[i])
    rounded = _rounded(reference)
    chosen = [_logits(rounded, text + together.token_ids[i + 1]) for i, text in enumerate(texts)]
    for i, text in enumerate(texts):
        given = together.token_ids[i + 1]
        logits = _logits(reference, text + given)[len(text) - 1 : -1]
        rounding.add(logits, chosen[i][len(text) - 1 : -1].argmax(1).tolist())
    print(agreement, alone_agreement, rounding, sep="\n")
    print(
        f"alone and in the batch: {same} of {len(texts)} completions equal; where the others "
        f"part, the reference's two logits lie {sorted(round(gap, 4) for gap in gaps)} apart"
    )
    return agreement


def _rounded(reference: torch.nn.Module) -> torch.nn.Module:
    """A copy in bfloat16, but for the rotary frequencies, which transformers keeps exact too."""
    rounded = copy.deepcopy(reference)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    return rounded


def _first_divergence(
    logits: torch.Tensor, one: Sequence[int], other: Sequence[int]
) -> list[float]:
    """How far apart the reference sees the two tokens at which completions part."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return [abs(float(logits[i, a] - logits[i, b]))]
    return []


def _prefill(engine: Engine, reference: torch.nn.Module, texts: Iterable[list[int]]) -> Agreement:
    agreement = Agreement("prefill, every beginning")
    for text in texts:
        beginnings = [text[: i + 1] for i in range(len(text))]
        run = _run(engine, beginnings, 1)
        chosen = [run.token_ids[i + 1][0] for i in range(len(text))]
        agreement.add(_logits(reference, text), chosen)
    print(agreement)
    return agreement


def _run(engine: Engine, texts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    asked = [
        NewRequest(
            uid=i + 1,
            prompt_token_ids=np.array(text, np.int32),
            max_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        for i, text in enumerate(texts)
    ]
    return run_offline(engine, asked, config=_CONFIG)


def _logits(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device="cuda")).logits[0]
    return logits.float()


if __name__ == "__main__":
    main()
