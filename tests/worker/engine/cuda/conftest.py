"""Without a GPU, Triton kernels are interpreted, so that they are tested everywhere."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds alone")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is decorated, so before any test module imports one.
    triton.knobs.runtime.interpret = True


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def dtype() -> torch.dtype:
    """The interpreter computes in float32, which holds the kernels to a tighter bound."""
    return torch.bfloat16 if HAS_GPU else torch.float32
