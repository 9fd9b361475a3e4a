"""Tokenizers by the digest of their files: fetched and built once, however many workers."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from weakref import WeakValueDictionary

from gateway.tokenizer import TemplateLimits, Tokenizer, build_tokenizer

FetchFiles = Callable[[], Awaitable[Mapping[str, bytes]]]


class TokenizerStore:
    """Builds tokenizers off the event loop and keeps those of the models served now."""

    # A rolling change of models has an old and a new one; more only fill memory.
    MAX_KEPT = 4

    def __init__(self, executor: Executor, limits: TemplateLimits) -> None:
        self._executor = executor
        self._limits = limits
        self._kept: dict[tuple[str, int], Tokenizer] = {}
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    async def get(self, sha256: str, vocab_size: int, fetch: FetchFiles) -> Tokenizer:
        """The tokenizer of that digest; `fetch` is called when it is new.

        Raises what `fetch` raises, and ValueError for files that make no tokenizer.
        """
        key = (sha256, vocab_size)
        # Two workers that start together would fetch the same files; one that hangs
        # in the middle must hold up only those that serve what it serves.
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._kept:
                files = await fetch()
                self._kept[key] = await asyncio.get_running_loop().run_in_executor(
                    self._executor, build_tokenizer, files, vocab_size, self._limits
                )
                while len(self._kept) > self.MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key]


def bundle_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the names, sizes and contents of the files, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
