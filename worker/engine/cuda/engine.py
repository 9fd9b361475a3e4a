"""Runs steps on one NVIDIA GPU.

Two streams: the scheduler's carries each step's staging copy, the engine's waits for it and
runs the step. A step's input tokens are gathered from the token pool, where the step before
wrote them on the device, so step N+1 can be queued while step N runs and nothing waits for
the host. Sampled tokens are copied to pinned memory; an event says when they are there.

A step with masked rows is queued up to the draw of its other rows, and the rest of it when the
masks come, with the step that was launched since, if one was. Nothing on the device waits for
masks, so a step that never gets them is just dropped.
"""

from dataclasses import dataclass

import numpy as np
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
from worker.engine.cuda.features import FeaturedSampling, FeaturedStep, StepOutputs
from worker.engine.cuda.graphs import DecodeGraphs
from worker.engine.cuda.handle import CudaStep, Results, Undrawn
from worker.engine.cuda.ops import CudaOps
from worker.engine.cuda.packing import pack
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.row_state import mask_words
from worker.engine.cuda.sampling import Sampler
from worker.engine.cuda.staging import (
    CACHED_LENS,
    LAST_TOKENS,
    NUM_FIELDS,
    ROWS,
    WRITE_ROWS,
    Slot,
    Staged,
    Staging,
    align_words,
    padding_block,
)
from worker.engine.cuda.step_kernels import begin_step, expand_tokens
from worker.engine.cuda.warm_up import dummy_plan, featured_plan
from worker.models.decoder import Decoder
from worker.step import EngineInfo, Int32Array, StepPlan

# A result may be read until its place comes round again; at most two steps are in flight.
_NUM_RESULTS = 4
_NO_WORDS = np.empty(0, np.int32)
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
        self._is_closed = False
        # Whether the last step waits for masks, and what was launched behind it.
        self._waits = False
        self._behind: tuple[StepPlan, CudaStep] | None = None
        self._scheduler_stream = torch.cuda.Stream(device)
        self._engine_stream = torch.cuda.Stream(device)
        with torch.inference_mode(), torch.cuda.stream(self._engine_stream):
            self._pages = memory.pages()
            self._page_table = memory.page_table()
            self._token_pool = torch.zeros(info.max_rows + 1, dtype=torch.int32, device=device)
            self._work = DecodeWork(self._shape, info.max_rows, device)
            self._sampler = Sampler(info.max_rows, info.vocab_size, device)
            self._featured = FeaturedSampling(info, self._sampler, device)
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
            self._graphs.capture(
                self._pad_inputs, self._decode, self._draw_masked, self._engine_stream, progress
            )
        self.clock = DeviceClock(self._engine_stream)
        self._warm_up(progress)

    def _warm_up(self, progress: Progress) -> None:
        """Compiles what prefill, mixed and featured steps need, by running each on the dummy row.

        So that no request waits for a compiler.
        """
        progress("compiling prefill kernels; the first time this takes about two minutes")
        dummy_row, vocab_size = self._info.max_rows, self._info.vocab_size
        for plan in (
            dummy_plan(dummy_row, num_decode=0),
            dummy_plan(dummy_row, num_decode=1),
            featured_plan(dummy_row),
        ):
            step = self.launch(plan)
            if len(plan.masked):
                step.provide_masks(np.full((1, mask_words(vocab_size)), -1, np.int32))
            step.result()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> CudaStep:
        """Queues a step. Raises EngineError; EngineLostError if the CUDA context is lost."""
        step = CudaStep(self)
        if self._waits:
            # Its inputs are still to be drawn.
            assert self._behind is None, "at most one other step is in flight"
            self._behind = plan, step
        else:
            self._queue(plan, step)
        return step

    def resume(self) -> None:
        """Queues what was launched behind a step that has now been drawn, or given up."""
        self._waits = False
        behind, self._behind = self._behind, None
        if behind is not None:
            plan, step = behind
            try:
                self._queue(plan, step)
            except EngineError as error:
                step.failed(error)

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

    def mask_buffer(self) -> Int32Array | None:
        """Pinned memory from which masks need not be copied once more; any step's that waits."""
        try:
            return self._featured.masks.buffer()
        except RuntimeError:
            # Met again, as that step's fault, when its masks are provided.
            return None

    def draw_masked(self, undrawn: Undrawn, bitmasks: Int32Array, results: Results) -> None:
        """Queues the rest of a step that waited for masks. Raises EngineError."""
        assert len(bitmasks) == undrawn.num_masked, "a mask for each row that waits"
        self._check_usable()
        stream, masks = self._engine_stream, self._featured.masks
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                masks.provide(bitmasks, self._scheduler_stream, stream)
                if undrawn.graph_batch is None:
                    self._draw_masked(undrawn.outputs.logits)
                else:
                    self._graphs.draw_masked(undrawn.graph_batch)
                self._draw_features(undrawn.featured, undrawn.outputs, undrawn.slot)
                masks.was_read(stream)
                self._queue_results(results)
        except RuntimeError as error:
            raise self.fault(error) from error

    def close(self) -> None:
        self._is_closed = True
        if self._is_lost:
            # Nothing can be freed any more; the driver does it when the process ends.
            return
        torch.cuda.synchronize()
        self._graphs.close()

    def _check_usable(self) -> None:
        if self._is_lost:
            raise EngineLostError(_CONTEXT_LOST)
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _queue(self, plan: StepPlan, step: CudaStep) -> None:
        self._check_usable()
        try:
            with torch.inference_mode():
                step.queued(*self._launch(plan))
        except RuntimeError as error:
            raise self.fault(error) from error
        self._waits = len(plan.masked) > 0

    def _launch(self, plan: StepPlan) -> tuple[Results, Undrawn | None]:
        is_decode = plan.num_decode == plan.num_rows
        graph_batch = self._graphs.batch_for(plan.num_rows) if is_decode else None
        num_columns = align_words(graph_batch or plan.num_rows)
        features = pack(plan, self._info.vocab_size)
        words = _NO_WORDS if features is None else features.words
        with torch.cuda.stream(self._scheduler_stream):
            staged = self._staging.stage(plan, num_columns, words, self._scheduler_stream)
        timing = StepTiming()
        with torch.cuda.stream(self._engine_stream):
            self._engine_stream.wait_event(staged.slot.copied)
            timing.begin.record(self._engine_stream)
            inputs = self._inputs[: NUM_FIELDS * num_columns]
            begin_step(staged.row_block, inputs, staged.updates, self._page_table)
            featured = None if features is None else self._featured.open(features, staged.extra)
            timing.queued()
            if is_decode:
                staged.slot.read.record(self._engine_stream)
                logits = self._run_decode(plan.num_rows, graph_batch)
                if graph_batch is not None:
                    timing.queued()
            else:
                logits = self._extend(plan, staged, featured)
            host = self._host_token_ids[self._num_launched % _NUM_RESULTS, : plan.num_rows]
            self._num_launched += 1
            results = Results(host, timing, featured)
            block = inputs.view(NUM_FIELDS, num_columns)
            outputs = StepOutputs(block, logits, self._token_ids, self._token_pool)
            num_masked = len(plan.masked)
            if num_masked:
                return results, Undrawn(outputs, num_masked, graph_batch, featured, staged.slot)
            self._draw_features(featured, outputs, staged.slot)
            self._queue_results(results)
        return results, None

    def _draw_features(
        self, featured: FeaturedStep | None, outputs: StepOutputs, slot: Slot
    ) -> None:
        if featured is not None:
            self._featured.draw(featured, outputs)
            # Later than the step's inputs, which were read before: the slot is free only now.
            slot.read.record(self._engine_stream)

    def _queue_results(self, results: Results) -> None:
        host = results.host_token_ids
        host.copy_(self._token_ids[: len(host)], non_blocking=True)
        results.timing.end.record(self._engine_stream)

    def _run_decode(self, num_rows: int, graph_batch: int | None) -> torch.Tensor:
        assert torch.cuda.current_stream() == self._engine_stream
        if graph_batch is None:
            return self._decode(num_rows)
        return self._graphs.replay(graph_batch)

    def _decode(self, batch: int) -> torch.Tensor:
        """A decode step from the inputs to the token pool, but for masked rows; its logits."""
        block = self._block(batch)
        step = StepRows(block[ROWS, :batch], block[CACHED_LENS, :batch], self._page_table)
        token_ids = self._token_pool.index_select(0, step.rows)
        attend = DecodeAttend(self._ops, self._pages, self._work, step)
        hidden = self._model(token_ids, step.cached_lens, attend)
        return self._sample(hidden, block, batch)

    def _extend(
        self, plan: StepPlan, staged: Staged, featured: FeaturedStep | None
    ) -> torch.Tensor:
        """A step with prefill rows, as `_decode`; its logits."""
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
        if featured is not None:
            self._featured.of_prompts(featured, hidden, self._model.logits)
        hidden = hidden.index_select(0, block[LAST_TOKENS, :num_rows])
        return self._sample(hidden, block, num_rows)

    def _decode_part(self, rows: torch.Tensor, cached_lens: torch.Tensor) -> DecodeAttend | None:
        if len(rows) == 0:
            return None
        step = StepRows(rows, cached_lens, self._page_table)
        return DecodeAttend(self._ops, self._pages, self._work, step)

    def _sample(self, hidden: torch.Tensor, block: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Draws for hidden states [num_rows, hidden_size] into token pool and results.

        Gives the logits. Rows that wait for a mask are left out.
        """
        logits = self._model.logits(hidden)
        self._draw(logits, block, None)
        return logits

    def _draw_masked(self, logits: torch.Tensor) -> None:
        """Draws for those rows of logits [num_rows, vocab_size] that `_sample` left out."""
        self._draw(logits, self._block(len(logits)), self._featured.masks.words)

    def _draw(self, logits: torch.Tensor, block: torch.Tensor, masks: torch.Tensor | None) -> None:
        self._sampler.sample(
            logits,
            RowParams.of_block(block),
            block[WRITE_ROWS],
            self._token_pool,
            self._token_ids,
            masks,
        )

    def _block(self, batch: int) -> torch.Tensor:
        """The row block of a batch, [NUM_FIELDS, its columns], where the graphs read it."""
        num_columns = align_words(batch)
        return self._inputs[: NUM_FIELDS * num_columns].view(NUM_FIELDS, num_columns)

    def _pad_inputs(self, batch: int) -> None:
        num_columns = align_words(batch)
        self._block(batch).copy_(self._padding[:, :num_columns])
