"""Random weights in a real model's shape: for benchmarks, where the text means nothing."""

import hashlib
from pathlib import Path

import torch

from worker.checkpoint.folder import eos_of_folder, read_config
from worker.checkpoint.presets import PRESETS
from worker.checkpoint.source import Progress
from worker.checkpoint.tokenizer import bundle_of_folder, make_bundle
from worker.messages import TokenizerBundle
from worker.models.config import Json, ModelConfig, ModelError
from worker.models.layers import Slots

# Usual for freshly initialised transformers; keeps activations finite in bf16.
_DEVIATION = 0.02


class DummyCheckpoint:
    """A config, seeded random weights, and whatever tokenizer lies beside the config."""

    def __init__(self, name: str, raw: Json, *, folder: Path | None, seed: int = 0) -> None:
        self._name = name
        self._config = ModelConfig.from_hf(raw)
        self._seed = seed
        self._tokenizer = make_bundle({}) if folder is None else bundle_of_folder(folder)
        self._eos_token_ids = eos_of_folder(folder, raw, self._tokenizer)

    @property
    def name(self) -> str:
        return self._name

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def tokenizer(self, progress: Progress) -> TokenizerBundle:
        return self._tokenizer

    def fill(self, slots: Slots, progress: Progress) -> None:
        """Normal weights, norms of one. Each depends on the seed and its name alone."""
        progress(f"filling {len(slots)} tensors with random weights")
        for name, slot in slots.items():
            if name.endswith("norm.weight"):
                slot.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            generator = torch.Generator(device=slot.device)
            generator.manual_seed(int.from_bytes(digest[:7], "little"))
            slot.normal_(0.0, _DEVIATION, generator=generator)


def open_dummy(source: str) -> DummyCheckpoint:
    """A preset's name, a config.json, or a folder that holds one. Raises ModelError."""
    if source in PRESETS:
        return DummyCheckpoint(source, PRESETS[source], folder=None)
    path = Path(source).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise ModelError(
            f"{source}: with dummy weights the model is a config.json, a folder that holds "
            f"one, or one of {sorted(PRESETS)}"
        )
    folder = config.parent
    return DummyCheckpoint(folder.resolve().name, read_config(config), folder=folder)
