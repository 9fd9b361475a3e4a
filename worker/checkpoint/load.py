"""From an opened checkpoint to a model that is ready to run."""

import torch

from worker.checkpoint.source import Checkpoint, Progress
from worker.models.build import build_model
from worker.models.config import ModelError
from worker.models.decoder import Decoder
from worker.models.layers import Build
from worker.models.ops import Ops


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    max_context: int | None = None,
) -> Decoder:
    """The checkpoint's model in `dtype` on `device`, packed for `ops`.

    `max_context` defaults to the model's own and cannot exceed it. Needs the model's size
    and one tensor of memory. Raises ModelError.
    """
    config = checkpoint.config
    if max_context is not None and max_context > config.max_context:
        raise ModelError(
            f"max_context {max_context} exceeds the {config.max_context} tokens of the model"
        )
    build = Build(
        config=config,
        ops=ops,
        dtype=dtype,
        device=device,
        max_context=max_context or config.max_context,
    )
    with torch.inference_mode():
        model = build_model(build)
        checkpoint.fill(model.slots(), progress)
        model.pack()
    return model
