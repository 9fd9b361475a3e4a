"""What a gateway says of itself and its workers, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, with its limits."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    # For requests that set no max_tokens.
    default_max_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool
    tokenizer_sha256: str
    max_message_bytes: int
    gateway_version: str
    worker_version: str
    overlap_scheduling: bool


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker is doing; pages free + cached + held = total."""

    address: str
    ready: bool
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    steps: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a gateway and its workers are doing."""

    # That this gateway is streaming.
    live_requests: int
    workers: tuple[WorkerLoad, ...]
