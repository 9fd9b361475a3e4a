"""transformers' own generate, in a process of its own.

Apart from the engine because libgomp lets threads sleep between operations as soon as two
teams of them live in one process, which would make both slower than they are.
"""

import os
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from worker.engine.openmp import limit_spinning

_NUM_RIVALS = 5


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A greedy completion, and at each token the likeliest ones with their logits."""

    token_ids: tuple[int, ...]
    rivals: tuple[dict[int, float], ...]

    def margin(self, index: int, token_id: int) -> float:
        """By how much the token at `index` beat another in the reference."""
        rivals = self.rivals[index]
        return rivals[self.token_ids[index]] - rivals.get(token_id, float("-inf"))


class Reference:
    """Generates one prompt after the other, without padding, in float32."""

    def __init__(self, gguf: Path) -> None:
        self._gguf = gguf
        # The child reads these when it imports tqdm, whose bars would draw over ours, and torch.
        os.environ["TQDM_DISABLE"] = "1"
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

    def generate(self, token_ids: list[int], num_tokens: int) -> Future[ReferenceRun]:
        """Exactly `num_tokens` tokens: an eos does not end it."""
        return self._process.submit(_generate, self._gguf, token_ids, num_tokens)


@cache
def _model(gguf: Path) -> Any:
    # Only the child needs it, and it takes seconds.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype="float32"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def _generate(gguf: Path, token_ids: list[int], num_tokens: int) -> ReferenceRun:
    import torch  # noqa: PLC0415

    ids = torch.tensor([token_ids])
    out = _model(gguf).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rivals = []
    for logits in out.logits:
        top = logits[0].topk(_NUM_RIVALS)
        rivals.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    return ReferenceRun(tuple(out.sequences[0, len(token_ids) :].tolist()), tuple(rivals))
