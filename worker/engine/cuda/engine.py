"""Runs steps on one NVIDIA GPU.

Two streams: the scheduler's carries each step's staging copy, the engine's waits for it and
runs the step. A step's input tokens are gathered from the token pool, where the step before
wrote them on the device, so step N+1 can be queued while step N runs and nothing waits for
the host. Sampled tokens are copied to pinned memory; an event says when they are there.
"""

import time
from dataclasses import dataclass

import torch

from shared.errors import EngineError, EngineLostError
from worker.checkpoint.source import Progress
from worker.engine.cuda.attention import (
    DecodeAttend,
    KVPages,
    MixedAttend,
    PrefillAttention,
    StepRows,
)
from worker.engine.cuda.clock import DeviceClock, StepTiming
from worker.engine.cuda.decode_attention import DecodeShape, DecodeWork
from worker.engine.cuda.graphs import DecodeGraphs
from worker.engine.cuda.ops import CudaOps
from worker.engine.cuda.sampling import RowParams, Sampler
from worker.engine.cuda.staging import (
    CACHED_LENS,
    IS_GREEDY,
    LAST_TOKENS,
    MIN_P,
    NUM_FIELDS,
    POSITIONS,
    ROWS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WRITE_ROWS,
    Staged,
    Staging,
    align_words,
    dummy_plan,
    padding_block,
)
from worker.engine.cuda.step_kernels import begin_step, expand_tokens
from worker.models.decoder import Decoder
from worker.step import EngineInfo, Int32Array, StepPlan, StepResult

# A result may be read until its place comes round again; at most two steps are in flight.
_NUM_RESULTS = 4
_CONTEXT_LOST = "the CUDA context is lost"


@dataclass(frozen=True, slots=True)
class Memory:
    """What of the engine scales with its settings, all on one device."""

    info: EngineInfo
    shape: DecodeShape
    num_layers: int
    device: torch.device

    def pages(self) -> KVPages:
        """KV of all layers, with one page more than the scheduler knows of, for padding rows."""
        return KVPages.allocate(
            self.shape,
            num_layers=self.num_layers,
            num_pages=self.info.num_pages + 1,
            device=self.device,
        )

    def page_table(self) -> torch.Tensor:
        """One row more than there are, for padding rows, which point at the dummy page."""
        num_columns = align_words(-(-self.info.max_context // self.info.page_size))
        size = (self.info.max_rows + 1, num_columns)
        table = torch.zeros(size, dtype=torch.int32, device=self.device)
        table[self.info.max_rows] = self.info.num_pages
        return table


class CudaStep:
    """A step that was queued."""

    def __init__(
        self, engine: "CudaEngine", host_token_ids: Int32Array, timing: StepTiming
    ) -> None:
        self._engine = engine
        self._host_token_ids = host_token_ids
        self._timing = timing

    def result(self) -> StepResult:
        waited_from = time.monotonic()
        try:
            self._timing.end.synchronize()
            times = self._engine.clock.times(
                self._timing, waited_from=waited_from, now=time.monotonic()
            )
        except RuntimeError as error:
            raise self._engine.fault(error) from error
        token_ids = self._host_token_ids.copy()
        faulty = token_ids < 0
        token_ids[faulty] = 0
        return StepResult(token_ids, faulty, *times)


class CudaEngine:
    """The engine of one GPU. `close` it, on the thread that launches."""

    def __init__(
        self,
        model: Decoder,
        ops: CudaOps,
        memory: Memory,
        *,
        graph_batch_sizes: list[int],
        progress: Progress,
    ) -> None:
        """Captures a decode graph for each batch size; with none, every step is launched eagerly.

        Raises RuntimeError where the device cannot do it.
        """
        info, device = memory.info, memory.device
        self._model = model
        self._ops = ops
        self._info = info
        self._shape = memory.shape
        self._is_lost = False
        self._scheduler_stream = torch.cuda.Stream(device)
        self._engine_stream = torch.cuda.Stream(device)
        with torch.inference_mode(), torch.cuda.stream(self._engine_stream):
            self._pages = memory.pages()
            self._page_table = memory.page_table()
            self._token_pool = torch.zeros(info.max_rows + 1, dtype=torch.int32, device=device)
            self._work = DecodeWork(self._shape, info.max_rows, device)
            self._sampler = Sampler(info.max_rows, info.vocab_size, device)
            self._prefill = PrefillAttention(self._shape, device)
            self._padding = padding_block(info.max_rows, align_words(info.max_rows)).to(device)
            self._inputs = self._padding.flatten().clone()
            self._token_ids = torch.zeros(info.max_rows, dtype=torch.int32, device=device)
        with torch.inference_mode(), torch.cuda.stream(self._scheduler_stream):
            self._staging = Staging(info.max_rows, device)
        self._host_token_ids = torch.zeros(
            _NUM_RESULTS, info.max_rows, dtype=torch.int32, pin_memory=True
        )
        self._num_launched = 0
        torch.cuda.synchronize(device)
        self._graphs = DecodeGraphs(graph_batch_sizes)
        with torch.inference_mode(), torch.cuda.stream(self._engine_stream):
            self._graphs.capture(self._pad_inputs, self._decode, self._engine_stream, progress)
        self.clock = DeviceClock(self._engine_stream)
        self._warm_up(progress)

    def _warm_up(self, progress: Progress) -> None:
        """Compiles what prefill and mixed steps need, by running one of each on the dummy row.

        So that no request waits for a compiler.
        """
        progress("compiling prefill kernels; the first time this takes about two minutes")
        for num_decode in (0, 1):
            with torch.inference_mode():
                step = self._launch(dummy_plan(self._info.max_rows, num_decode=num_decode))
            step.result()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> CudaStep:
        """Queues a step. Raises EngineError; EngineLostError if the CUDA context is lost."""
        if self._is_lost:
            raise EngineLostError(_CONTEXT_LOST)
        try:
            with torch.inference_mode():
                return self._launch(plan)
        except RuntimeError as error:
            raise self.fault(error) from error

    def fault(self, error: RuntimeError) -> EngineError:
        """What a CUDA error means for the step that met it; notes if it was the last one.

        To be raised from that error: its words are for the log, not for clients.
        """
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self._is_lost = True
            return EngineLostError(_CONTEXT_LOST)
        return EngineError("the step failed on the device")

    def close(self) -> None:
        if self._is_lost:
            # Nothing can be freed any more; the driver does it when the process ends.
            return
        torch.cuda.synchronize()
        self._graphs.close()

    def _launch(self, plan: StepPlan) -> CudaStep:
        is_decode = plan.num_decode == plan.num_rows
        graph_batch = self._graphs.batch_for(plan.num_rows) if is_decode else None
        num_columns = align_words(graph_batch or plan.num_rows)
        with torch.cuda.stream(self._scheduler_stream):
            staged = self._staging.stage(plan, num_columns, self._scheduler_stream)
        timing = StepTiming()
        with torch.cuda.stream(self._engine_stream):
            self._engine_stream.wait_event(staged.slot.copied)
            timing.begin.record(self._engine_stream)
            inputs = self._inputs[: NUM_FIELDS * num_columns]
            begin_step(staged.row_block, inputs, staged.updates, self._page_table)
            timing.queued()
            if is_decode:
                staged.slot.read.record(self._engine_stream)
                self._run_decode(plan.num_rows, graph_batch)
                if graph_batch is not None:
                    timing.queued()
            else:
                self._extend(plan, staged)
            host = self._host_token_ids[self._num_launched % _NUM_RESULTS, : plan.num_rows]
            host.copy_(self._token_ids[: plan.num_rows], non_blocking=True)
            timing.end.record(self._engine_stream)
        self._num_launched += 1
        return CudaStep(self, host.numpy(), timing)

    def _run_decode(self, num_rows: int, graph_batch: int | None) -> None:
        assert torch.cuda.current_stream() == self._engine_stream
        if graph_batch is None:
            self._decode(num_rows)
        else:
            self._graphs.replay(graph_batch)

    def _decode(self, batch: int) -> None:
        """A whole decode step from the inputs to the token pool."""
        block = self._block(batch)
        step = StepRows(block[ROWS, :batch], block[CACHED_LENS, :batch], self._page_table)
        token_ids = self._token_pool.index_select(0, step.rows)
        attend = DecodeAttend(self._ops, self._pages, self._work, step)
        hidden = self._model(token_ids, step.cached_lens, attend)
        self._sample(hidden, block, batch)

    def _extend(self, plan: StepPlan, staged: Staged) -> None:
        """A step with prefill rows, from the inputs to the token pool."""
        assert torch.cuda.current_stream() == self._engine_stream
        num_rows, num_decode = plan.num_rows, plan.num_decode
        block = self._block(num_rows)
        rows, cached_lens = block[ROWS, :num_rows], block[CACHED_LENS, :num_rows]
        token_ids, positions, slots = torch.empty(
            3, align_words(plan.num_tokens), dtype=torch.int32, device=rows.device
        )[:, : plan.num_tokens]
        expand_tokens(
            token_ids,
            positions,
            slots,
            num_decode=num_decode,
            rows=rows,
            cached_lens=cached_lens,
            token_pool=self._token_pool,
            prefill_token_ids=staged.prefill_token_ids,
            prefill_rows=staged.prefill_rows,
            first_tokens=staged.first_tokens,
            page_table=self._page_table,
            page_size=self._info.page_size,
        )
        staged.slot.read.record(self._engine_stream)
        attend = MixedAttend(
            self._ops,
            self._shape,
            self._pages,
            num_decode=num_decode,
            decode=self._decode_part(rows[:num_decode], cached_lens[:num_decode]),
            prefill=self._prefill.plan(
                plan.cached_lens[num_decode:],
                plan.extend_lens[num_decode:],
                StepRows(rows[num_decode:], cached_lens[num_decode:], self._page_table),
            ),
            slots=slots,
            positions=positions,
        )
        hidden = self._model(token_ids, positions, attend)
        self._sample(hidden.index_select(0, block[LAST_TOKENS, :num_rows]), block, num_rows)

    def _decode_part(self, rows: torch.Tensor, cached_lens: torch.Tensor) -> DecodeAttend | None:
        if len(rows) == 0:
            return None
        step = StepRows(rows, cached_lens, self._page_table)
        return DecodeAttend(self._ops, self._pages, self._work, step)

    def _sample(self, hidden: torch.Tensor, block: torch.Tensor, num_rows: int) -> None:
        """Draws for hidden states [num_rows, hidden_size] into token pool and results."""
        floats = block.view(torch.float32)
        params = RowParams(
            temperature=floats[TEMPERATURE],
            top_k=block[TOP_K],
            top_p=floats[TOP_P],
            min_p=floats[MIN_P],
            seed_low=block[SEED_LOW],
            seed_high=block[SEED_HIGH],
            is_greedy=block[IS_GREEDY],
            positions=block[POSITIONS],
        )
        logits = self._model.logits(hidden)
        self._sampler.sample(logits, params, block[WRITE_ROWS], self._token_pool, self._token_ids)

    def _block(self, batch: int) -> torch.Tensor:
        """The row block of a batch, [NUM_FIELDS, its columns], where the graphs read it."""
        num_columns = align_words(batch)
        return self._inputs[: NUM_FIELDS * num_columns].view(NUM_FIELDS, num_columns)

    def _pad_inputs(self, batch: int) -> None:
        num_columns = align_words(batch)
        self._block(batch).copy_(self._padding[:, :num_columns])
