"""What every kind of checkpoint offers, and how weights get from it into a model."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from worker.messages import TokenizerBundle
from worker.models.config import ModelConfig, ModelError
from worker.models.layers import Slots

# Told what is being done, in words for the person who waits.
Progress = Callable[[str], None]

# Published in some checkpoints although they follow from the config.
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight")


class Checkpoint(Protocol):
    """An opened checkpoint: its config is read, its weights are not."""

    @property
    def name(self) -> str:
        """What the model is called when nobody names it otherwise."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Union of config, generation config and tokenizer, ascending."""
        ...

    def tokenizer(self, progress: Progress) -> TokenizerBundle:
        """The tokenizer's files; empty where the checkpoint has none."""
        ...

    def fill(self, slots: Slots, progress: Progress) -> None:
        """Fills every slot, one tensor at a time. Raises ModelError."""
        ...


def fill_from(
    tensors: Iterable[tuple[str, Tensor]], slots: Slots, progress: Progress, *, tied: bool
) -> None:
    """Copies named tensors into the slots; each must come, and with the right shape.

    With `tied` embeddings a second copy of them, which some checkpoints hold, is skipped.
    """
    missing = dict(slots)
    total = len(missing)
    for name, tensor in tensors:
        slot = missing.pop(name, None)
        if slot is None:
            _check_may_be_skipped(name, tied)
            continue
        if slot.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, and its config says {list(slot.shape)}"
            raise ModelError(f"tensor {name} of the checkpoint has the shape {shapes}")
        slot.copy_(tensor)
        _report(progress, total - len(missing), total)
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, such as {min(missing)}")


def _check_may_be_skipped(name: str, tied: bool) -> None:
    if name.endswith(_DERIVED) or (tied and name == "lm_head.weight"):
        return
    raise ModelError(f"tensor {name} of the checkpoint has no place in its architecture")


def _report(progress: Progress, done: int, total: int) -> None:
    tenth = max(1, total // 10)
    if done % tenth == 0 or done == total:
        progress(f"loading weights: {done} of {total} tensors")
