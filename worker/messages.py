"""What crosses the pipe between the front process and the engine process.

Commands go down, events come up; one StepOutput for each step, and one more in those where
there is something to tell before the step is over. Times are time.monotonic() seconds, which
all processes of one machine share.

What every step sends is pickled as plain tuples and the bytes of its arrays: to write and to
read an output of 256 tokens takes 2 and 3.5 µs so, and 10 and 8 by numpy's own pickling and
that of frozen dataclasses. Arrays that came this way cannot be written to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import starmap
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shared.errors import Code
from shared.types import FinishReason, SamplingParams, StructuredOutput
from worker.step import EngineInfo, Float32Array, Int32Array, Int64Array

_T = TypeVar("_T")
# How an object is made again: what to call, and with what.
_Remade: TypeAlias = tuple[Callable[..., _T], tuple[object, ...]]


def _bytes_of(array: NDArray[Any], dtype: DTypeLike) -> bytes:
    # Nothing is copied but the bytes themselves; a wrong type would be read as other numbers.
    return array.astype(dtype, copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the scheduler takes it up."""

    # Unique for the worker's whole life; never reused.
    uid: int
    # [prompt_len], at least one token.
    prompt_token_ids: Int32Array
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    # Whose it is; the waiting queue is shared out among the clients of a priority.
    client: str = ""
    cache_salt: str = ""
    # Absolute; None: never. The deadline fails the request, the time limit finishes it.
    deadline: float | None = None
    time_limit: float | None = None
    arrived_at: float = 0.0
    # Not None: the log-probability of each token, and of so many of the likeliest beside it.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    # Which of the client's completions this is.
    index: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """Take this request up."""

    request: NewRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests. Unknown uids are no error: they have ended already.

    With `report`, each ends with a Finished of reason ABORTED; without, nobody listens
    and nothing is said of it.
    """

    uids: tuple[int, ...]
    report: bool


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Drop every cached page that no request holds; answered by CacheFlushed."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Record the next `num_steps` steps; answered by Traced."""

    call_id: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop; what still lives is dropped."""


Command = Submit | Abort | FlushCache | Trace | Stop


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine process is doing before it is ready."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, as gateways see it."""

    name: str
    architecture: str
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    overlap_scheduling: bool


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """What a gateway needs to encode, render and decode: file name -> content."""

    files: dict[str, bytes]
    sha256: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is open: what it is, what the engine can hold, how to speak to it."""

    model: ModelInfo
    engine: EngineInfo
    tokenizer: TokenizerBundle


@dataclass(frozen=True, slots=True)
class Load:
    """Free + cached + held = total, in pages."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    # Since the engine process began.
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    # Seconds during which the device had nothing to do although requests were running.
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The scheduler took a request up for the first time."""

    uid: int
    cached_tokens: int
    queue_position: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended without an error."""

    uid: int
    reason: FinishReason
    # The eos or stop token, which is not among the output's entries; else -1.
    matched_token_id: int
    cached_tokens: int
    # Sampled tokens, the matched one included.
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended with an error, as a google.rpc status."""

    uid: int
    code: Code
    message: str
    field: str = ""
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entry i is token_ids[i] of request uids[i]; see worker.step.TokenLogprobs.

    A request's entries are in order, over all outputs. For what was sampled they are one to
    one with the tokens of the same output. Those of its prompt are one for each of its tokens
    but the first; they come in parts, chunk by chunk, all before its first token or with it.
    """

    is_prompt: bool
    uids: Int64Array
    token_ids: Int32Array
    logprobs: Float32Array
    ranks: Int32Array
    # How many of the likeliest the request asked for; what is beyond them is not for it.
    num_top: Int32Array
    # [num_entries, most that any of them asked for]
    top_ids: Int32Array
    top_logprobs: Float32Array

    def __reduce__(self) -> _Remade["TokenLogprobs"]:
        return _remade_logprobs, (
            self.is_prompt,
            self.top_ids.shape,
            _bytes_of(self.uids, np.int64),
            _bytes_of(self.token_ids, np.int32),
            _bytes_of(self.logprobs, np.float32),
            _bytes_of(self.ranks, np.int32),
            _bytes_of(self.num_top, np.int32),
            _bytes_of(self.top_ids, np.int32),
            _bytes_of(self.top_logprobs, np.float32),
        )


def _remade_logprobs(
    is_prompt: bool,
    top_shape: tuple[int, int],
    uids: bytes,
    token_ids: bytes,
    logprobs: bytes,
    ranks: bytes,
    num_top: bytes,
    top_ids: bytes,
    top_logprobs: bytes,
) -> TokenLogprobs:
    return TokenLogprobs(
        is_prompt,
        np.frombuffer(uids, np.int64),
        np.frombuffer(token_ids, np.int32),
        np.frombuffer(logprobs, np.float32),
        np.frombuffer(ranks, np.int32),
        np.frombuffer(num_top, np.int32),
        np.frombuffer(top_ids, np.int32).reshape(top_shape),
        np.frombuffer(top_logprobs, np.float32).reshape(top_shape),
    )


def _no_uids() -> Int64Array:
    return np.empty(0, np.int64)


def _no_tokens() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Entry i is one token: uids[i] sampled token_ids[i].

    The Finished or Failed of a uid comes in the same output as its last token, or later.
    Every Submit gets exactly one of them, but for an Abort without report.
    """

    uids: Int64Array = field(default_factory=_no_uids)
    token_ids: Int32Array = field(default_factory=_no_tokens)
    started: tuple[Started, ...] = ()
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    load: Load = field(default_factory=Load)
    committed_at: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __reduce__(self) -> _Remade["StepOutput"]:
        return _remade_output, (
            _bytes_of(self.uids, np.int64),
            _bytes_of(self.token_ids, np.int32),
            tuple(map(_fields_of_started, self.started)),
            tuple(map(_fields_of_finished, self.finished)),
            self.failed,
            _fields_of_load(self.load),
            self.committed_at,
            self.logprobs,
        )


_fields_of_load = attrgetter(*(each.name for each in fields(Load)))
_fields_of_started = attrgetter(*(each.name for each in fields(Started)))
_fields_of_finished = attrgetter(*(each.name for each in fields(Finished)))


def _remade_output(
    uids: bytes,
    token_ids: bytes,
    started: tuple[tuple[Any, ...], ...],
    finished: tuple[tuple[Any, ...], ...],
    failed: tuple[Failed, ...],
    load: tuple[Any, ...],
    committed_at: float,
    logprobs: tuple[TokenLogprobs, ...],
) -> StepOutput:
    return StepOutput(
        np.frombuffer(uids, np.int64),
        np.frombuffer(token_ids, np.int32),
        tuple(starmap(Started, started)),
        tuple(starmap(Finished, finished)),
        failed,
        Load(*load),
        committed_at,
        logprobs,
    )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The loop is alive; sent when there is nothing else to say."""

    load: Load


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """What the prefix cache holds now, as far as it is told; replaces what was told before."""

    # Four bytes for each prefix; see shared.prefix_hashes.
    fingerprints: bytes


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answers FlushCache."""

    call_id: int
    pages_freed: int


@dataclass(frozen=True, slots=True)
class Traced:
    """Answers Trace."""

    call_id: int
    # A Chrome trace-event file, gzip-compressed.
    trace_json_gz: bytes


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine process cannot go on; it exits after this."""

    message: str


Event = Progress | Ready | StepOutput | Heartbeat | CachedPrefixes | CacheFlushed | Traced | Fatal
