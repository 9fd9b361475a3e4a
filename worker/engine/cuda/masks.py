"""How masks that come after their step was launched reach the device."""

import torch

from worker.engine.cuda.row_state import mask_words
from worker.step import Int32Array


class Masks:
    """One pinned buffer and its device twin: a step's masks come when the one before is over.

    The copy runs on the scheduler's stream, beside the forward of the step that waits for it.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        size = (max_rows, mask_words(vocab_size))
        # [max_rows, mask words] int32
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._written: Int32Array = self._pinned.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None
        self._read = torch.cuda.Event() if is_cuda else None

    def buffer(self) -> Int32Array:
        """The pinned memory, to be written and then provided. RuntimeError: the device failed."""
        assert self._copied is not None
        # The last step's masks; they are over unless it failed.
        self._copied.synchronize()
        return self._written

    def provide(
        self,
        bitmasks: Int32Array,
        scheduler_stream: torch.cuda.Stream,
        engine_stream: torch.cuda.Stream,
    ) -> None:
        """Queues the copy, and that the engine's stream waits for it; returns at once.

        `bitmasks` are the first rows of `buffer`, or are copied there. The reader calls
        `was_read` when it has queued its reading.
        """
        assert self._copied is not None and self._read is not None
        count = len(bitmasks)
        if bitmasks.ctypes.data != self._pinned.data_ptr():
            self.buffer()[:count] = bitmasks
        with torch.cuda.stream(scheduler_stream):
            scheduler_stream.wait_event(self._read)
            self.words[:count].copy_(self._pinned[:count], non_blocking=True)
            self._copied.record(scheduler_stream)
        engine_stream.wait_event(self._copied)

    def was_read(self, engine_stream: torch.cuda.Stream) -> None:
        assert self._read is not None
        self._read.record(engine_stream)
