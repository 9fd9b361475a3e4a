"""Files that may change while a service runs: certificates, keys, tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from shared.errors import SettingsError

_T = TypeVar("_T")
# Inode, time and size: renaming another file into place changes the first. The time is that
# of the last change to the file, its permissions among it, and cannot be set by anybody.
_Stamp: TypeAlias = tuple[int, int, int] | None


class Reloading(Generic[_T]):
    """What was read from some files, read again when one of them has changed.

    Files that are broken leave the old value in force and are tried again whether or not they
    change: what was wrong may lie elsewhere. They are complained of once, and to whoever asks.
    """

    def __init__(
        self,
        files: Sequence[Path],
        load: Callable[[], _T],
        on_problem: Callable[[SettingsError], None],
    ) -> None:
        """Raises what `load` raises, which is to be SettingsError."""
        self._files = tuple(files)
        self._load = load
        self._on_problem = on_problem
        # Before the files are read: whatever changes meanwhile is seen the next time.
        self._stamps = self._stamp()
        self._problem = ""
        self.value = load()

    def refresh(self, *, always: bool = False) -> bool:
        """Whether `value` is new. Reads the disk; may be called from any thread.

        With `always`, because somebody asked, the files are read even if none seems to have
        changed, and complained of even if nothing else is wrong with them than before.
        """
        stamps = self._stamp()
        if stamps == self._stamps and not always:
            return False
        try:
            self.value = self._load()
        except SettingsError as error:
            if always or str(error) != self._problem:
                self._problem = str(error)
                self._on_problem(error)
            return False
        self._stamps, self._problem = stamps, ""
        return True

    def _stamp(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(file) for file in self._files)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The whole file. Raises SettingsError naming it."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise SettingsError(f"{path} is larger than {max_bytes} bytes")
    return content


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size
