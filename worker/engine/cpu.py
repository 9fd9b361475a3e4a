"""The embedded default: the model in plain torch, on a thread of its own.

`launch` prepares a step in the caller's thread, which is the scheduler's, while the step
before it computes: torch releases the GIL inside its operations. It does so in numpy:
libgomp gives each thread that enters a parallel region a team of its own, and once there
are more team members than cores it lets them sleep between operations, which made a
SmolLM2 decode step 23 ms instead of 15. So nothing but the engine's thread computes in
torch, not even to load the model.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cores import usable_cores
from shared.errors import EngineError
from worker.checkpoint.load import load_model
from worker.checkpoint.source import Checkpoint, Progress
from worker.engine.cpu_attention import AttentionPlan, AttentionPlanner, PagedAttention
from worker.engine.cpu_features import FeaturedSampling, StepFeatures, prepare, step_logprobs
from worker.engine.kv_pool import (
    KVPool,
    auto_memory_bytes,
    choose_num_pages,
    kv_bytes_per_token,
    pages_for,
)
from worker.engine.sampling import sample
from worker.models.config import ModelConfig, ModelError
from worker.models.decoder import Decoder
from worker.models.ops import TorchOps
from worker.step import BoolArray, EngineInfo, Int32Array, SamplingBatch, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class CpuEngineConfig:
    """Sizes of the engine; None is chosen by the model or the machine."""

    page_size: int = 16
    num_pages: int | None = None
    # Of the memory that is free now, for the KV cache; read where num_pages is None.
    memory_fraction: float | None = None
    max_rows: int = 64
    # At most what the model was loaded for.
    max_context: int | None = None
    threads: int | None = None


class CpuEngine:
    """Runs steps one after the other. Owns the KV cache and the token pool."""

    def __init__(self, load: Callable[[], Decoder], config: CpuEngineConfig) -> None:
        """`load` gives the model and is called on the engine's thread. Raises ModelError."""
        # Of the steps in flight that wait for their masks.
        self._awaited: list[Future[Int32Array]] = []
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="cpu-engine",
            initializer=torch.set_num_threads,
            initargs=(config.threads or min(torch.get_num_threads(), usable_cores()),),
        )
        try:
            self._model = model = self._thread.submit(load).result()
            self._info = info = _resolve(model, config)
        except BaseException:
            self.close()
            raise
        pool = KVPool(
            model.config,
            num_slots=info.num_pages * info.page_size,
            dtype=model.dtype,
        )
        self._attention = PagedAttention(model.config, pool)
        self._planner = AttentionPlanner(
            model.config,
            page_size=info.page_size,
            max_rows=info.max_rows,
            max_context=info.max_context,
        )
        self._features = FeaturedSampling(info.vocab_size)
        # One entry more than rows: the sentinel takes tokens that nobody may read.
        self._token_pool = torch.zeros(info.max_rows + 1, dtype=torch.int64)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> "CpuStep":
        try:
            inputs = self._prepare(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return CpuStep(plan.step_id, failed, Future())
        bitmasks: Future[Int32Array] = Future()
        if inputs.features is not None:
            bitmasks = inputs.features.bitmasks
            self._awaited = [masks for masks in self._awaited if not masks.done()]
            self._awaited += [bitmasks] if len(plan.masked) else []
        return CpuStep(plan.step_id, self._thread.submit(self._run, inputs), bitmasks)

    def close(self) -> None:
        for bitmasks in self._awaited:
            bitmasks.cancel()
        self._thread.shutdown(wait=True)

    def _prepare(self, plan: StepPlan) -> "_Inputs":
        lasts = np.cumsum(plan.extend_lens) - 1
        before = lasts + 1 - plan.extend_lens
        offsets = np.repeat(plan.cached_lens - before, plan.extend_lens)
        positions = np.arange(plan.num_tokens) + offsets
        samples = plan.samples
        outputs = lasts[samples]
        return _Inputs(
            num_rows=plan.num_rows,
            decode_rows=torch.from_numpy(plan.rows[: plan.num_decode].astype(np.int64)),
            prefill_token_ids=torch.from_numpy(plan.prefill_token_ids.astype(np.int64)),
            positions=torch.from_numpy(positions),
            attention=self._planner.plan(plan, positions),
            outputs=None if len(outputs) == plan.num_tokens else torch.from_numpy(outputs),
            samples=samples,
            write_rows=torch.from_numpy(plan.write_rows[samples].astype(np.int64)),
            sampled_positions=(plan.cached_lens + plan.extend_lens)[samples],
            sampling=_select(plan.sampling, samples),
            features=prepare(plan),
        )

    @torch.inference_mode()
    def _run(self, inputs: "_Inputs") -> StepResult:
        started_at = time.monotonic()
        features = inputs.features
        if features is not None:
            self._features.open(features)
        token_ids = self._token_pool.index_select(0, inputs.decode_rows)
        if len(inputs.prefill_token_ids):
            token_ids = torch.cat((token_ids, inputs.prefill_token_ids))
        self._attention.use(inputs.attention)
        hidden = self._model(token_ids, inputs.positions, self._attention)
        sampled = np.zeros(inputs.num_rows, np.int32)
        faulty = np.zeros(inputs.num_rows, np.bool_)
        of_prompts = of_sampled = None
        if features is not None:
            of_prompts = self._features.of_prompts(features, hidden, self._model.logits)
        if inputs.samples.any():
            if inputs.outputs is not None:
                hidden = hidden.index_select(0, inputs.outputs)
            logits = self._model.logits(hidden)
            positions, sampling = inputs.sampled_positions, inputs.sampling
            if features is None:
                tokens, is_faulty = sample(logits, positions, sampling)
            else:
                tokens, is_faulty, of_sampled = self._features.sample(
                    features, logits, positions, sampling
                )
            self._token_pool[inputs.write_rows] = tokens
            sampled[inputs.samples] = tokens.numpy()
            faulty[inputs.samples] = is_faulty.numpy()
        logprobs = None if features is None else step_logprobs(features, of_sampled, of_prompts)
        return StepResult(sampled, faulty, started_at, time.monotonic(), logprobs)


def open_cpu_engine(
    checkpoint: Checkpoint, config: CpuEngineConfig, *, dtype: torch.dtype, progress: Progress
) -> CpuEngine:
    """An engine with the checkpoint's model, its weights laid out for this CPU.

    `progress` is called on the engine's thread. Raises ModelError.
    """

    def load() -> Decoder:
        return load_model(
            checkpoint,
            TorchOps(prepack=True),
            dtype=dtype,
            device=torch.device("cpu"),
            progress=progress,
            max_context=config.max_context,
        )

    return CpuEngine(load, config)


class CpuStep:
    """A step that was launched."""

    def __init__(
        self, step_id: int, future: Future[StepResult], bitmasks: Future[Int32Array]
    ) -> None:
        self._step_id = step_id
        self._future = future
        self._bitmasks = bitmasks

    def mask_buffer(self) -> None:
        return None

    def provide_masks(self, bitmasks: Int32Array) -> None:
        # Cancelled if the engine was closed meanwhile, which ends the step.
        if not self._bitmasks.cancelled():
            self._bitmasks.set_result(bitmasks.copy())

    def result(self) -> StepResult:
        try:
            return self._future.result()
        except Exception as error:
            # What torch says is for the log, which has the cause, and not for clients.
            raise EngineError(f"the engine failed in step {self._step_id}") from error


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A step plan as the model takes it: tensors, and places worked out."""

    num_rows: int
    decode_rows: Tensor
    prefill_token_ids: Tensor
    # [num_tokens]
    positions: Tensor
    attention: AttentionPlan
    # Tokens whose logits are wanted, one for each row that samples; None: all tokens.
    outputs: Tensor | None
    # [num_rows]
    samples: BoolArray
    # For each row that samples:
    write_rows: Tensor
    sampled_positions: Int32Array
    sampling: SamplingBatch
    # None in an ordinary step.
    features: StepFeatures | None


def _select(batch: SamplingBatch, rows: BoolArray) -> SamplingBatch:
    return SamplingBatch(
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        seeds=batch.seeds[rows],
        is_greedy=batch.is_greedy[rows],
    )


def _resolve(model: Decoder, config: CpuEngineConfig) -> EngineInfo:
    """Fills in what the config leaves open, and refuses what cannot work."""
    max_context = config.max_context or model.max_context
    if max_context > model.max_context:
        raise ModelError(f"max_context {max_context} exceeds the model's {model.max_context}")
    return EngineInfo(
        num_pages=_num_pages(model.config, model.dtype, config, max_context),
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_context=max_context,
        vocab_size=model.config.vocab_size,
    )


def _num_pages(
    model: ModelConfig, dtype: torch.dtype, config: CpuEngineConfig, max_context: int
) -> int:
    least = pages_for(max_context, config.page_size)
    if config.num_pages is None:
        return choose_num_pages(
            kv_bytes_per_token(model, dtype) * config.page_size,
            page_size=config.page_size,
            max_context=max_context,
            max_rows=config.max_rows,
            memory_bytes=auto_memory_bytes(config.memory_fraction),
        )
    if config.num_pages < least:
        raise ModelError(
            f"kv_pages {config.num_pages} are fewer than the {least} pages that one request of "
            f"max_context {max_context} takes; raise kv_pages or lower max_context"
        )
    return config.num_pages
