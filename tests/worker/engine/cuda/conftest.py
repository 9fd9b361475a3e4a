"""Without a GPU, Triton kernels are interpreted, so that they are tested everywhere."""

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def pytest_ignore_collect() -> bool | None:
    """Triton comes with torch's CUDA builds alone."""
    return True if importlib.util.find_spec("triton") is None else None


@pytest.fixture
def device() -> torch.device:
    if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU, which torch cannot use, so Triton is not interpreted")
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def dtype() -> torch.dtype:
    """The interpreter computes in float32, which holds the kernels to a tighter bound."""
    return torch.bfloat16 if HAS_GPU else torch.float32
