"""README.md and docs/ against the code they speak of."""

import re
from pathlib import Path

import pytest

from shared.errors import Code
from tests.docs.settings_table import README, with_fresh_tables

ROOT = README.parent
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
# What gRPC itself answers; never raised as an error of ours.
ALSO_A_STATUS = {"CANCELLED"}
NEVER_SENT = {"FAILED_PRECONDITION"}


def test_the_settings_tables_are_those_of_the_code() -> None:
    text = README.read_text()
    assert with_fresh_tables(text) == text, "run `python -m tests.docs.settings_table`"


@pytest.mark.parametrize("document", [README, ROOT / "docs/status-codes.md"])
def test_every_status_that_is_sent_is_in_the_table(document: Path) -> None:
    rows = re.findall(r"^\| `([A-Z_]+)`", document.read_text(), re.MULTILINE)
    assert set(rows) == {code.name for code in Code} - NEVER_SENT | ALSO_A_STATUS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_folder_that_is_named_is_there(document: Path) -> None:
    pattern = r"`((?:gateway|worker|shared|tests|protos|docs)/[\w./]*)`"
    for name in re.findall(pattern, document.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_that_is_named_is_there(document: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE):
        assert name in targets, name
