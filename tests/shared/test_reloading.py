"""Files that are read again when they have changed, and for as long as they cannot be."""

import os
from pathlib import Path

from shared.errors import SettingsError
from shared.reloading import Reloading


class Told:
    """What a file holds, as far as it can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_readable = True
        self.problems: list[str] = []
        self.reloading = Reloading(
            [path], self._load, lambda error: self.problems.append(str(error))
        )

    def _load(self) -> str:
        if not self.is_readable:
            # As when a process has too many files open.
            raise SettingsError("cannot be read now")
        return self.path.read_text()


def test_what_cannot_be_read_for_a_moment_is_read_when_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    told = Told(path)
    path.write_text("new")
    told.is_readable = False
    for _ in range(3):
        assert not told.reloading.refresh()
    assert told.reloading.value == "former"
    assert told.problems == ["cannot be read now"]
    told.is_readable = True
    assert told.reloading.refresh()
    assert told.reloading.value == "new"
    assert not told.reloading.refresh()


def test_a_problem_that_comes_again_after_a_good_file_is_told_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    told = Told(path)
    for content in ("second", "third"):
        told.is_readable = False
        path.write_text(content)
        assert not told.reloading.refresh()
        told.is_readable = True
        assert told.reloading.refresh()
    assert told.problems == ["cannot be read now"] * 2


def test_whoever_asks_for_a_broken_file_is_told_each_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    told = Told(path)
    told.is_readable = False
    for _ in range(2):
        assert not told.reloading.refresh(always=True)
    assert told.problems == ["cannot be read now"] * 2


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    told = Told(path)
    before = path.stat()
    path.write_text("latter")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert told.reloading.refresh()
    assert told.reloading.value == "latter"
