"""How much of a prompt a worker is likely to have in its prefix cache.

Knows pages and hashes only, and nothing of workers' loads or of choosing among them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from shared.prefix_hashes import (
    FINGERPRINT_BYTES,
    between,
    fingerprint,
    milestones,
    page_hashes,
    root_hash,
)

# 0.8 µs a page, on the event loop; a longer prompt counts as this much of it.
_MAX_PAGES = 1024
_MILESTONES = milestones(_MAX_PAGES)
_TOKEN_BYTES = 4
_HEAD_TOKENS = 64


class PromptPrefix:
    """The beginnings of one prompt, named as workers name them."""

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._names: dict[int, list[int]] = {}

    @property
    def head(self) -> bytes:
        """What prompts of one kind have in common, where nothing else is known of them."""
        return self._salt.encode() + array("i", self._token_ids[:_HEAD_TOKENS]).tobytes()

    def names(self, page_size: int) -> list[int]:
        """One for each whole page, of all tokens up to its end."""
        names = self._names.get(page_size)
        if names is None:
            # The last token is always computed, so a page that it ends is never taken.
            tokens = self._token_ids[: min(len(self._token_ids) - 1, page_size * _MAX_PAGES)]
            token_bytes = array("i", tokens).tobytes()
            hashes = page_hashes(root_hash(self._salt), token_bytes, _TOKEN_BYTES * page_size)
            names = self._names[page_size] = [fingerprint(one) for one in hashes]
        return names


class PrefixMemory:
    """Of one worker: what it told last, and what was sent to it, which is fresher.

    What was sent may have been evicted since, so only the last of it counts.
    """

    def __init__(self, max_sent: int = 8192, max_told: int = 16384) -> None:
        """Of what it is told, the first `max_told`: a worker tells of 2048, the freshest first."""
        self._max_sent = max_sent
        self._max_told_bytes = max_told * FINGERPRINT_BYTES
        self._told: frozenset[int] = frozenset()
        self._sent: OrderedDict[int, None] = OrderedDict()

    def tell(self, fingerprints: bytes) -> None:
        """Replaces what the worker told before. Nothing at all: its cache is empty."""
        if not fingerprints:
            self.forget()
            return
        # A message that is full of them would take the event loop seconds.
        num_bytes = min(len(fingerprints), self._max_told_bytes)
        whole = num_bytes // FINGERPRINT_BYTES * FINGERPRINT_BYTES
        self._told = frozenset(
            int.from_bytes(fingerprints[at : at + FINGERPRINT_BYTES], "little")
            for at in range(0, whole, FINGERPRINT_BYTES)
        )

    def send(self, prompt: PromptPrefix, page_size: int) -> None:
        """The worker is given this prompt now."""
        names = prompt.names(page_size)
        if not names:
            return
        for length in (*between(_MILESTONES, 0, len(names) - 1), len(names)):
            name = names[length - 1]
            self._sent[name] = None
            self._sent.move_to_end(name)
        while len(self._sent) > self._max_sent:
            self._sent.popitem(last=False)

    def forget(self) -> None:
        """Its cache is empty now."""
        self._told = frozenset()
        self._sent.clear()

    def matched_tokens(self, prompt: PromptPrefix, page_size: int) -> int:
        """Of the longest beginning that is known of."""
        names = prompt.names(page_size)
        for length in range(len(names), 0, -1):
            name = names[length - 1]
            if name in self._told or name in self._sent:
                return length * page_size
        return 0
