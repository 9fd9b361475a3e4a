"""The committed stubs are what the protos say."""

from pathlib import Path

import pytest

from shared.codegen import ROOT, generate


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, a developer's package, is not here")
    generate(tmp_path)
    fresh = contents_of(tmp_path / "shared/pb")
    committed = contents_of(ROOT / "shared/pb")
    assert sorted(committed) == sorted(fresh)
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, "run `python -m shared.codegen`"


def contents_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for pattern in ("*.py", "*.pyi")
        for path in folder.rglob(pattern)
    }
