"""What structured output costs those beside it: `python -m tests.bench.structured`.

Free requests decode beside as many others, which are free too in one pass and obey a random
JSON schema each in the next; all begin at once and none ends before its last token. The
figure is the time from step to step of full decode steps, and how much longer it is beside
constrained requests; passes alternate. Processor time does not mind what else the machine
does, and on the CPU engine with --threads 1 it is the most by which steps can get longer: it
counts what overlaps, too, and the compilation of the rules. Before that, the host's part
alone: masks and accepted tokens of --host-rows requests.

All other flags are the worker's, such as --engine, --model or --dummy-weights. A model
without a tokenizer gets the built-in model's, whose ids are then the only ones allowed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np

from shared.cores import usable_cores
from shared.types import SamplingParams, StructuredOutput, StructureKind
from tests.bench import report
from tests.bench.offline import Run, random_prompt, run_offline
from tests.worker.structured.schemas import random_schema
from worker.checkpoint.open import default_cache_dir, open_checkpoint
from worker.checkpoint.tokenizer import TOKENIZER
from worker.config import BUILT_IN_MODEL, WorkerConfig, load_config
from worker.engine.factory import OpenedEngine, open_engine
from worker.engine_main import scheduler_config
from worker.messages import NewRequest
from worker.step import Int32Array
from worker.structured.contract import GrammarLibrary
from worker.structured.library import LLGuidance
from worker.structured.outputs import Fault, StructuredOutputs

# Above a byte-level tokenizer's first ids, which are special ones.
_FIRST_ID, _END_ID = 300, 10_000
# More than can be reached, so that no array ends.
_MANY_ITEMS = 10_000
_HOST_STEPS = 100


class TimedOutputs(StructuredOutputs):
    """Notes how long the loop was held up by each step's masks and tokens."""

    def __init__(self, grammars: GrammarLibrary, max_rows: int) -> None:
        super().__init__(
            grammars, cache_entries=4096, timeout_s=60.0, max_rows=max_rows, wake=lambda: None
        )
        self.fill_s: list[float] = []
        self.accept_s: list[float] = []

    def fill(
        self, uids: Sequence[int], bitmasks: Int32Array | None = None
    ) -> tuple[Int32Array, list[Fault]]:
        began_at = time.perf_counter()
        filled = super().fill(uids, bitmasks)
        self.fill_s.append(time.perf_counter() - began_at)
        return filled

    def accept(self, tokens: Iterable[tuple[int, int]]) -> list[Fault]:
        began_at = time.perf_counter()
        faults = super().accept(tokens)
        self.accept_s.append(time.perf_counter() - began_at)
        return faults


def main() -> None:
    options, config = _parse()
    report.header("Structured output beside free requests")
    opened = open_engine(config, os.environ, lambda message: print(message, file=sys.stderr))
    grammars = opened.grammars or _borrowed_grammars(opened)
    try:
        figures = _measure_host(grammars, opened.engine.info.vocab_size, options)
        figures |= _measure_passes(opened, config, grammars, options)
    finally:
        opened.engine.close()
    report.result(figures)


def _parse() -> tuple[argparse.Namespace, WorkerConfig]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=32, help="requests in all")
    parser.add_argument("--constrained", type=int, default=16, help="of them, in mixed passes")
    parser.add_argument("--rules", type=int, default=1000, help="distinct ones, at most")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each request")
    parser.add_argument("--tokens", type=int, default=128, help="of each completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-rows", type=int, default=256)
    options, rest = parser.parse_known_args()
    return options, load_config([*rest, "--max-running", str(options.rows)], os.environ)


def _borrowed_grammars(opened: OpenedEngine) -> LLGuidance:
    built_in = open_checkpoint(
        BUILT_IN_MODEL, cache_dir=default_cache_dir(os.environ), progress=lambda message: None
    )
    return LLGuidance(
        built_in.tokenizer(lambda message: None).files[TOKENIZER].decode(),
        vocab_size=opened.engine.info.vocab_size,
        eos_token_ids=built_in.eos_token_ids,
        threads=max(1, usable_cores() - 1),
    )


def _structure(seed: int) -> StructuredOutput:
    items = random_schema(seed)
    schema = {
        "type": "array",
        "items": {key: value for key, value in items.items() if key != "$defs"},
        "minItems": _MANY_ITEMS,
        "$defs": items["$defs"],
    }
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema))


def _measure_host(
    grammars: GrammarLibrary, vocab_size: int, options: argparse.Namespace
) -> dict[str, object]:
    """Draws at random from the masks, without a model."""
    rows = options.host_rows
    outputs = TimedOutputs(grammars, rows)
    compile_ms = []
    for uid in range(rows):
        began_at = time.perf_counter()
        # A schema may come twice, and is known the second time.
        if not outputs.begin(uid, _structure(uid % options.rules), time.monotonic()):
            while not outputs.take_ready(time.monotonic()):
                time.sleep(0.0001)
            compile_ms.append(1e3 * (time.perf_counter() - began_at))
    rng = np.random.default_rng(0)
    for _ in range(_HOST_STEPS):
        bitmasks, faults = outputs.fill(range(rows))
        assert not faults, faults
        bits = np.unpackbits(bitmasks.view(np.uint8), axis=1, bitorder="little")
        tokens = [int(rng.choice(np.flatnonzero(row[:vocab_size]))) for row in bits]
        faults = outputs.accept(zip(range(rows), tokens, strict=True))
        assert not faults, faults
    outputs.close()
    figures: dict[str, object] = {"host_rows": rows, "vocab_size": vocab_size}
    for name, times_ms in (
        ("compile", compile_ms),
        ("fill", [1e3 * seconds for seconds in outputs.fill_s]),
        ("accept", [1e3 * seconds for seconds in outputs.accept_s]),
    ):
        p50, p99 = np.percentile(times_ms, (50, 99))
        print(f"{name:<8} p50 {p50:8.3f} ms   p99 {p99:8.3f} ms", flush=True)
        figures |= {f"{name}_p50_ms": round(p50, 3), f"{name}_p99_ms": round(p99, 3)}
    return figures


def _measure_passes(
    opened: OpenedEngine,
    config: WorkerConfig,
    grammars: GrammarLibrary,
    options: argparse.Namespace,
) -> dict[str, object]:
    # [step p50 in ms, processor seconds] of each pass.
    passes: dict[int, list[tuple[float, float]]] = {0: [], options.constrained: []}
    masks_ms: list[float] = []
    # The first round warms up.
    for round_ in range(options.rounds + 1):
        for constrained in passes:
            outputs = TimedOutputs(grammars, opened.engine.info.max_rows)
            used_s = time.process_time()
            run = _run(opened, config, outputs, options, constrained, seed=round_)
            used_s = time.process_time() - used_s
            outputs.close()
            step_ms = run.times.interval_ms(run.times.full_decode_steps())
            if not round_:
                continue
            passes[constrained].append((step_ms, used_s))
            masks_ms += [1e3 * seconds for seconds in outputs.fill_s]
            print(
                f"{constrained:3} of {options.rows} constrained: {step_ms:.3f} ms a step, "
                f"{used_s:.3f} s of processor time",
                flush=True,
            )
    free, mixed = (np.median(figures, axis=0) for figures in passes.values())
    more = [np.divide(b, a) - 1 for a, b in zip(*passes.values(), strict=True)]
    more_ms, more_used = np.median(more, axis=0)
    return {
        "model": opened.model.name,
        "rows": options.rows,
        "constrained": options.constrained,
        "rules": min(options.rules, options.constrained),
        "free_step_ms": round(float(free[0]), 3),
        "mixed_step_ms": round(float(mixed[0]), 3),
        "slower_ratio": round(float(more_ms), 4),
        "more_processor_time_ratio": round(float(more_used), 4),
        "masks_p50_ms": round(statistics.median(masks_ms), 3),
    }


def _run(
    opened: OpenedEngine,
    config: WorkerConfig,
    outputs: StructuredOutputs,
    options: argparse.Namespace,
    constrained: int,
    *,
    seed: int,
) -> Run:
    rng = np.random.default_rng(seed)
    requests = []
    for uid in range(1, options.rows + 1):
        prompt = _FIRST_ID + random_prompt(rng, options.prompt_tokens, _END_ID - _FIRST_ID)
        structure = _structure(uid % options.rules) if uid <= constrained else None
        requests.append(
            NewRequest(
                uid,
                prompt.astype(np.int32),
                options.tokens,
                SamplingParams(temperature=0.8, seed=uid),
                ignore_eos=structure is None,
                structured_output=structure,
            )
        )
    run = run_offline(
        opened.engine,
        requests,
        overlap=config.overlap,
        config=scheduler_config(config, opened.engine.info.max_rows),
        eos_token_ids=opened.model.eos_token_ids,
        structures=outputs,
    )
    assert not run.num_failed
    assert all(len(tokens) == options.tokens for tokens in run.token_ids.values())
    return run


if __name__ == "__main__":
    main()
