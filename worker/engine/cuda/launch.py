"""Programmatic dependent launch: a kernel starts while the one before it still runs.

It hides the launch and lets a kernel fetch what no other such kernel writes: weights, the
chunks of a step, KV of the steps before. (What was written before the step's last ordinary
launch is there, for that one waits for all before it.) In return some program of such a
kernel must call `gdc_wait`, and each before it touches anything else, so that the end of a
kernel means the end of all before it.
"""

import triton
import triton.language as tl

# Up to here a kernel lets the next one start when its loop is done, and above at once.
FEW_ROWS = 32


def dependent_launch() -> dict[str, bool]:
    """Options for kernels with a PDL parameter; the interpreter knows no such launches."""
    interpreted = triton.knobs.runtime.interpret
    return {"PDL": False} if interpreted else {"PDL": True, "launch_pdl": True}


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Asks the L2 for the lines that these pointers lie in. Not interpretable."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
