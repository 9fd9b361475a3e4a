"""One declaration, two ways to set it, and errors that name the flag."""

import os
import subprocess
import sys
import time

import pytest

from worker.config import WorkerConfig, load_config, resolve

PROGRAM = """
import os, sys
from worker.config import load_config

config = load_config(sys.argv[1:], os.environ)
print(config.page_size, config.max_context, config.kv_pages, config.overlap)
"""


def test_flag_and_variable_set_the_same_and_the_flag_wins() -> None:
    variables = {
        "TANDEM_WORKER_PAGE_SIZE": "64",
        "TANDEM_WORKER_MAX_CONTEXT": "512",
        "TANDEM_WORKER_KV_PAGES": "auto",
        "TANDEM_WORKER_OVERLAP": "false",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--page-size", "4"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.stdout.split() == ["4", "512", "None", "False"], ran.stderr


@pytest.mark.parametrize(
    ("value", "overlaps"), [("1", False), ("true", False), ("0", True), ("", True)]
)
def test_the_plain_variable_turns_overlap_off(value: str, overlaps: bool) -> None:
    environment = {"TANDEM_DISABLE_OVERLAP_SCHEDULING": value}
    assert load_config([], environment).overlap is overlaps
    assert load_config(["--no-overlap"], environment).overlap is False


def test_auto_is_resolved_by_the_engine() -> None:
    auto = resolve(WorkerConfig(engine=None))
    assert (auto.engine, auto.max_running, auto.token_budget) == ("cpu", 64, 512)
    gpu = resolve(WorkerConfig(engine=None), has_cuda=True)
    assert (gpu.engine, gpu.max_running, gpu.token_budget) == ("cuda", 256, 16384)
    assert resolve(WorkerConfig(engine="cpu"), has_cuda=True).engine == "cpu"
    echo = load_config(["--engine", "echo"], {})
    assert (echo.max_running, echo.token_budget) == (256, 8192)


def test_what_is_set_is_kept() -> None:
    config = load_config(["--token-budget", "16", "--max-running", "3", "--kv-pages", "auto"], {})
    assert (config.token_budget, config.max_running, config.kv_pages) == (16, 3, None)


def test_every_wrong_setting_gets_a_line_that_names_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--page-size", "3", "--max-running", "0", "--policy", "random"], {})
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    flags = [line.split(": ")[1] for line in lines]
    assert sorted(flags) == ["--max-running", "--page-size", "--policy"]
    assert any("(got '3')" in line for line in lines)


def test_settings_cannot_be_changed() -> None:
    config = WorkerConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.page_size = 4


def test_help_names_every_flag_and_is_quick() -> None:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "worker", "--help"], capture_output=True, text=True, timeout=30
    )
    assert time.monotonic() - began < 5
    assert ran.returncode == 0
    for name in WorkerConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in ran.stdout
