"""Greedy tokens of the CPU engine against transformers' generate, float32, SmolLM2.

    python -m tests.bench.parity

Every prompt alone, all at once, with shared prefixes from the cache, in chunks of 16, and
with pages so few that requests are preempted; overlap on and off, page sizes 1 and 16.
Where the two tokens' logits lie closer than float32 arithmetic can tell in the reference
itself, the divergence is printed with its margin and counted as a near tie.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import Progress

from tests.bench import report
from tests.bench.engine_run import EngineRun
from tests.bench.prompts import prompts
from tests.bench.reference import Reference, ReferenceRun
from worker.checkpoint.load import load_model
from worker.checkpoint.open import BUILT_IN, built_in_path, open_checkpoint
from worker.checkpoint.source import Checkpoint
from worker.checkpoint.tokenizer import TOKENIZER
from worker.engine.cpu import CpuEngine, CpuEngineConfig
from worker.models.decoder import Decoder
from worker.models.ops import TorchOps
from worker.scheduler.config import SchedulerConfig

_MAX_ROWS = 64
# Logits of about 20 differ by up to 4e-5 between two orders of summation.
_NEAR_TIE = 5e-4

# A prompt's tokens, for each prompt of a run.
Completions = list[list[int]]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run all the prompts."""

    name: str
    page_size: int
    overlap: bool
    # Pages for about a third of what all the requests want, so that some are preempted.
    is_scarce: bool = False
    token_budget: int = 512
    one_by_one: bool = False
    # Run the prompts once before, so that all of them are in the prefix cache.
    warm: bool = False
    prefix_caching: bool = True

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "serial"
        return f"{self.name}, page {self.page_size}, {loop}"


def configurations() -> Iterator[Configuration]:
    for page_size in (1, 16):
        for overlap in (True, False):
            yield Configuration("all at once", page_size, overlap, prefix_caching=False)
            yield Configuration("shared prefixes", page_size, overlap, warm=True)
            yield Configuration("chunk 16", page_size, overlap, token_budget=16)
            yield Configuration("preemption", page_size, overlap, is_scarce=True)
    # The longest by far, and the loops and page sizes do not meet in it: two of four.
    yield Configuration("alone", 16, overlap=True, one_by_one=True)
    yield Configuration("alone", 1, overlap=False, one_by_one=True)


@dataclass(slots=True)
class Verdict:
    """Divergences so far."""

    mismatches: int = 0
    near_ties: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    arguments = parser.parse_args()
    report.header("Greedy parity with transformers")
    with tempfile.TemporaryDirectory() as cache:
        checkpoint = open_checkpoint(BUILT_IN, cache_dir=Path(cache), progress=print)
        ids = _encode(checkpoint, prompts()[: arguments.prompts])
    chosen = list(configurations())
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        references = _reference(ids, arguments.tokens, progress)
        verdict = _compare_all(checkpoint, chosen, ids, references, progress)
    report.result(
        {
            "prompts": len(ids),
            "configurations": len(chosen),
            "mismatches": verdict.mismatches,
            "near_ties": verdict.near_ties,
        }
    )
    if verdict.mismatches:
        raise SystemExit(1)


def _encode(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    bundle = checkpoint.tokenizer(print)
    tokenizer = tokenizers.Tokenizer.from_buffer(bundle.files[TOKENIZER])
    return [tokenizer.encode(text).ids for text in texts]


def _reference(ids: list[list[int]], num_tokens: int, progress: Progress) -> list[ReferenceRun]:
    task = progress.add_task("transformers, one by one", total=len(ids))
    with Reference(built_in_path()) as reference:
        futures = [reference.generate(prompt, num_tokens) for prompt in ids]
        runs = []
        for future in futures:
            runs.append(future.result())
            progress.advance(task)
    return runs


def _compare_all(
    checkpoint: Checkpoint,
    chosen: Sequence[Configuration],
    ids: list[list[int]],
    references: Sequence[ReferenceRun],
    progress: Progress,
) -> Verdict:
    loaded: list[Decoder] = []

    def load() -> Decoder:
        """On the thread of the engine that comes first; the others share the model."""
        if not loaded:
            loaded.append(_load(checkpoint))
        return loaded[0]

    verdict = Verdict()
    num_tokens = len(references[0].token_ids)
    overall = progress.add_task("configurations", total=len(chosen))
    for configuration in chosen:
        task = progress.add_task(str(configuration), total=len(ids))
        engine = CpuEngine(load, _sizes(configuration, ids, num_tokens))
        try:
            completions = _run(engine, configuration, ids, num_tokens)
        finally:
            engine.close()
        for index, (tokens, wanted) in enumerate(zip(completions, references, strict=True)):
            _judge(f"{configuration}, prompt {index}", tokens, wanted, verdict)
        progress.update(task, completed=len(ids))
        progress.advance(overall)
    return verdict


def _sizes(configuration: Configuration, ids: list[list[int]], num_tokens: int) -> CpuEngineConfig:
    wanted = [len(prompt) + num_tokens for prompt in ids]
    room = max(*wanted, sum(wanted) // 3) if configuration.is_scarce else 2 * sum(wanted)
    page_size = configuration.page_size
    # A page more for each, as a request's last page is seldom full.
    return CpuEngineConfig(
        page_size=page_size,
        num_pages=room // page_size + 1 + (0 if configuration.is_scarce else len(ids)),
        max_rows=_MAX_ROWS,
        max_context=max(wanted),
    )


def _load(checkpoint: Checkpoint) -> Decoder:
    return load_model(
        checkpoint,
        TorchOps(prepack=True),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda message: None,
    )


def _run(
    engine: CpuEngine, configuration: Configuration, ids: list[list[int]], num_tokens: int
) -> Completions:
    """Runs all prompts, and makes sure that the configuration did what it is there for."""
    config = SchedulerConfig(
        token_budget=configuration.token_budget,
        max_running=_MAX_ROWS,
        prefix_caching=configuration.prefix_caching,
    )
    run = EngineRun(engine, config, overlap=configuration.overlap)
    if configuration.one_by_one:
        completions = [run.generate([prompt], num_tokens)[0] for prompt in ids]
    else:
        if configuration.warm:
            run.generate(ids, 1)
        completions = run.generate(ids, num_tokens)
    run.check()
    load = run.load
    if configuration.warm and load.cached_tokens == 0:
        raise RuntimeError(f"{configuration}: nothing came from the prefix cache")
    if configuration.is_scarce and load.preemptions == 0:
        raise RuntimeError(f"{configuration}: nothing was preempted")
    return completions


def _judge(where: str, tokens: list[int], wanted: ReferenceRun, verdict: Verdict) -> None:
    """Compares up to the first divergence; what follows one has another context."""
    for index, (ours, theirs) in enumerate(zip(tokens, wanted.token_ids, strict=True)):
        if ours == theirs:
            continue
        margin = wanted.margin(index, ours)
        is_near_tie = margin < _NEAR_TIE
        verdict.near_ties += is_near_tie
        verdict.mismatches += not is_near_tie
        kind = "near tie" if is_near_tie else "MISMATCH"
        print(f"{kind}: {where}, token {index}: {ours}, not {theirs}; margin {margin:.2g}")
        return


if __name__ == "__main__":
    main()
