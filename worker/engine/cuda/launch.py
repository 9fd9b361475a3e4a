"""Programmatic dependent launch: a kernel starts while the one before it still runs.

It hides the launch and lets a kernel fetch what no other kernel writes. In return every
program of such a kernel must call `gdc_wait` before it touches anything else, so that the
end of a kernel means the end of all before it.
"""

import triton


def dependent_launch() -> dict[str, bool]:
    """Options for kernels with a PDL parameter; the interpreter knows no such launches."""
    interpreted = triton.knobs.runtime.interpret
    return {"PDL": False} if interpreted else {"PDL": True, "launch_pdl": True}
