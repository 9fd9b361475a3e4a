"""What a worker serves, as the rest of the gateway sees it."""

from dataclasses import dataclass

from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A worker's model and its limits."""

    name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    default_max_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    worker_version: str
    overlap_scheduling: bool
    # 0: not told, as by an older worker.
    page_size: int = 0
    max_running: int = 0
    max_waiting: int = 0

    def serves_like(self, other: "ModelInfo") -> bool:
        """Whether a request prepared for the other can run here."""
        return self._limits == other._limits

    @property
    def _limits(self) -> tuple[str, str, int, int]:
        return self.name, self.tokenizer_sha256, self.vocab_size, self.max_context_tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its tokenizer."""

    info: ModelInfo
    tokenizer: Tokenizer
