"""ghz: where it is, how it is told what to send, and what it says of a run.

Knows nothing of how the services are started.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
INSTALL = "go install github.com/bojand/ghz/cmd/ghz@latest"

# Beyond what the run itself may take: connecting, and writing the report.
_MARGIN_S = 20.0


class GhzError(Exception):
    """ghz could not be run to its end."""


@dataclass(frozen=True, slots=True)
class GhzRun:
    """What one run gave. Latencies are of whole calls, in milliseconds."""

    name: str
    call: str
    concurrency: int
    connections: int
    # Statuses that the run is meant to end with, and no other.
    expected: str
    seconds: float
    statuses: Mapping[str, int]
    # Percentile to latency; empty where no call ended OK.
    latency_ms: Mapping[int, float]

    @property
    def num_calls(self) -> int:
        return sum(self.statuses.values())

    @property
    def calls_per_s(self) -> float:
        return self.num_calls / self.seconds if self.seconds else 0.0

    @property
    def is_good(self) -> bool:
        """Whether there were calls, and all of them ended as they are meant to."""
        return set(self.statuses) == {self.expected}


def find_ghz() -> Path | None:
    """On the PATH, or where Go installs it."""
    found = shutil.which("ghz") or shutil.which("ghz", path=str(Path.home() / "go/bin"))
    return Path(found) if found else None


def read_config(name: str) -> dict[str, Any]:
    """One of the files beside this one, as ghz reads it too."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


async def run_ghz(ghz: Path, config: Mapping[str, Any], host: str, folder: Path) -> GhzRun:
    """Runs it to its end; what it was told and what it said are kept in `folder`.

    Raises GhzError when it fails or takes longer than its own limits allow.
    """
    told = {**config, "host": host, "insecure": True}
    stem = f"{config['name']}-{config['concurrency']}".replace(" ", "-")
    config_file, result_file = folder / f"{stem}.config.json", folder / f"{stem}.result.json"
    config_file.write_text(json.dumps(told, indent=2))
    limit_s = seconds(config.get("duration", "0s")) + seconds(config["timeout"]) + _MARGIN_S
    process = await asyncio.create_subprocess_exec(
        *(ghz, "--config", config_file, "--format", "json", "--output", result_file),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Of the one user at the terminal; Ctrl-C is for the parent to hear.
        process_group=0,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate()
    except TimeoutError:
        raise GhzError(f"ghz {config['name']} took more than {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or not result_file.exists():
        raise GhzError(f"ghz {config['name']} failed: {said.decode(errors='replace')[-500:]}")
    return parse_result(config, json.loads(result_file.read_text()))


def parse_result(config: Mapping[str, Any], result: Mapping[str, Any]) -> GhzRun:
    """A run from what ghz was told and its JSON."""
    percentiles = result.get("latencyDistribution") or []
    return GhzRun(
        name=config["name"],
        call=config["call"].rpartition(".")[2],
        concurrency=config["concurrency"],
        connections=config.get("connections", 1),
        # ghz cancels the calls that it cuts.
        expected="Canceled" if "stream-call-duration" in config else "OK",
        seconds=result["total"] / 1e9,
        statuses=result.get("statusCodeDistribution") or {},
        latency_ms={entry["percentage"]: entry["latency"] / 1e6 for entry in percentiles},
    )


def seconds(duration: str) -> float:
    """Of a duration as ghz has it, such as 300ms or 10s."""
    if duration.endswith("ms"):
        return float(duration[:-2]) / 1e3
    return float(duration.removesuffix("s"))
