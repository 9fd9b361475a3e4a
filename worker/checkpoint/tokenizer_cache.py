"""Converted tokenizers on disk: a conversion takes seconds, reading one milliseconds."""

import importlib
import importlib.metadata
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Protocol, cast

from worker.checkpoint.source import Progress
from worker.checkpoint.tokenizer import CONFIG, TOKENIZER, make_bundle
from worker.messages import TokenizerBundle

# Raise it whenever bundles are made otherwise than before.
_FORMAT = 1


class _Converter(Protocol):
    def convert_gguf(self, path: Path, *, must_add_bos: bool) -> TokenizerBundle: ...


class TokenizerCache:
    """One zip file for each converted tokenizer; zip's checksums find corrupt ones."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when the first entry is written."""
        self._folder = folder

    def get_gguf(
        self, path: Path, key: str, *, must_add_bos: bool, progress: Progress
    ) -> TokenizerBundle:
        """The tokenizer of a GGUF file whose metadata has the hash `key`."""
        # A newer version may convert better.
        version = importlib.metadata.version("transformers")
        entry = self._folder / f"gguf-{key}-{_FORMAT}-{version}.zip"
        cached = _read(entry)
        if cached is not None:
            return cached
        progress("converting the tokenizer (once; it is cached)")
        # transformers takes seconds to import: only where it is needed.
        converter = cast(_Converter, importlib.import_module("worker.checkpoint.convert"))
        bundle = converter.convert_gguf(path, must_add_bos=must_add_bos)
        self._write(entry, bundle, progress)
        return bundle

    def _write(self, entry: Path, bundle: TokenizerBundle, progress: Progress) -> None:
        """Writes aside and renames, so that no reader ever sees half an entry."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
                for file_name, content in bundle.files.items():
                    archive.writestr(file_name, content)
            Path(name).replace(entry)
        except OSError as error:
            # A cache that cannot be written costs time at each start, nothing else.
            progress(f"cannot cache the converted tokenizer in {self._folder}: {error.strerror}")


def _read(entry: Path) -> TokenizerBundle | None:
    """None for an entry that is missing or damaged."""
    try:
        with zipfile.ZipFile(entry) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return None
    return make_bundle(files) if {TOKENIZER, CONFIG} <= files.keys() else None
