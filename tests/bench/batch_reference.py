"""transformers' generate over a batch, in a process of its own that has nothing else to do.

Apart from the client, whose loop it would hold up, and on its process's main thread.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from worker.engine.openmp import limit_spinning


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Seconds that generate took, and the new tokens of each prompt."""

    seconds: float
    outputs: list[list[int]]


class BatchReference:
    """Greedy, float32, any number of prompts of one length as one batch."""

    def __init__(self, gguf: Path, *, threads: int, spins_freely: bool) -> None:
        self._gguf = gguf
        self._threads = threads
        # The child reads these when it imports tqdm, whose bars would draw over ours, and torch.
        os.environ["TQDM_DISABLE"] = "1"
        if not spins_freely:
            limit_spinning(os.environ)
        self._process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.shutdown(cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        return await asyncio.wrap_future(self._process.submit(_encode, self._gguf, text))

    async def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> BatchRun:
        """Exactly `num_tokens` for each: an eos does not end it."""
        future = self._process.submit(_run, self._gguf, self._threads, prompts, num_tokens)
        return await asyncio.wrap_future(future)


def _encode(gguf: Path, text: str) -> list[int]:
    # Only the child needs it, and it takes seconds.
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return [int(token_id) for token_id in tokenizer.encode(text)]


@cache
def _model(gguf: Path, threads: int) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype="float32"
    )
    # Nothing ends a row early, and no processor has to look for it.
    model.generation_config.eos_token_id = None
    return model.eval()


def _run(gguf: Path, threads: int, prompts: Sequence[Sequence[int]], num_tokens: int) -> BatchRun:
    import torch  # noqa: PLC0415

    model = _model(gguf, threads)
    ids = torch.tensor(prompts)
    began = time.perf_counter()
    rows = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return BatchRun(time.perf_counter() - began, rows[:, ids.shape[1] :].tolist())
