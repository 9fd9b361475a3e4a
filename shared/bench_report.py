"""What every bench prints: where and what was run first, one line of JSON last.

Knows nothing of what is measured.
"""

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "transformers", "flashinfer-python", "numpy", "grpcio", "protobuf", "uvloop")
_REPOSITORY = Path(__file__).resolve().parents[1]


def header(title: str) -> None:
    """Prints the title, then the hardware, versions, commit and command of this run."""
    print(f"# {title}")
    for name, value in describe().items():
        print(f"# {name:<9} {value}")
    print(flush=True)


def describe() -> Mapping[str, str]:
    """The hardware, versions, commit and command of this run."""
    return {
        "hardware": _hardware(),
        "software": _software(),
        "commit": _commit(),
        "command": _command(),
    }


def result(figures: Mapping[str, object]) -> None:
    """Prints the bench's last line: its figures as one line of JSON."""
    sys.stderr.flush()
    print(json.dumps(figures), flush=True)


def table(title: str, rows: Mapping[str, str]) -> None:
    """Prints figures for people: what it is, and its value with the unit."""
    shown = Table("figure", title=title, title_justify="left", title_style="bold")
    shown.add_column("value", justify="right")
    for name, value in rows.items():
        shown.add_row(name, value)
    Console(highlight=False).print(shown)


def rounded(value: float | None, digits: int) -> float | None:
    """For JSON, which has no NaN: what could not be measured is null."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def shown(value: float | None, unit: str, digits: int = 2) -> str:
    """The same for people."""
    if value is None or not math.isfinite(value):
        return "not measured"
    return f"{value:,.{digits}f} {unit}".rstrip()


def percent(ratio: float | None) -> str:
    """A ratio for people."""
    return shown(None if ratio is None else 100 * ratio, "%")


def _hardware() -> str:
    parts = [f"{_cpu_model()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB"]
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    if gpus:
        parts.append(f"{len(gpus)} × {gpus[0].strip()}")
    return "; ".join(parts)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _software() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def _commit() -> str:
    if not (_REPOSITORY / ".git").exists():
        # Installed: whatever repository lies around it is another one.
        return "unknown"
    revision = _output(["git", "rev-parse", "--short=12", "HEAD"])
    if not revision:
        return "unknown"
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    return f"{revision} with uncommitted changes" if changed else revision


def _command() -> str:
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _output(command: Sequence[str]) -> str:
    """What a command prints, or nothing when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
