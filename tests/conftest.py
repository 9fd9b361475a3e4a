"""What must be set before any test imports torch."""

import os
from pathlib import Path

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is
# imported, and torch or transformers import it on behalf of tests that have no kernels.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"
