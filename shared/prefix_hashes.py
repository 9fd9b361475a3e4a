"""Names for the beginnings of prompts, by which gateways learn what a worker has cached.

Both sides make them alike: a prompt's pages are hashed one after another, each together with
the hash of all before it, so one hash stands for all tokens up to its page's end. On the wire
is a part of it: two prompts that share that by chance cost a detour, never a wrong answer.
"""

from bisect import bisect_right
from hashlib import blake2b

HASH_BYTES = 8
FINGERPRINT_BYTES = 4


def root_hash(salt: str) -> bytes:
    """What the first page's hash goes on from: prompts of unlike salts never meet."""
    if not salt:
        return bytes(HASH_BYTES)
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()


def page_hashes(root: bytes, token_bytes: bytes, page_bytes: int) -> list[bytes]:
    """One for each whole page of the tokens, which are int32 in the machine's order."""
    hashes = []
    for start in range(0, len(token_bytes) - page_bytes + 1, page_bytes):
        page = token_bytes[start : start + page_bytes]
        root = blake2b(root + page, digest_size=HASH_BYTES).digest()
        hashes.append(root)
    return hashes


def fingerprint(page_hash: bytes) -> int:
    """The part of a hash that is told."""
    return int.from_bytes(page_hash[:FINGERPRINT_BYTES], "little")


def milestones(most: int) -> list[int]:
    """Lengths in pages of which a worker tells although nothing ends there: 1 to 8, 10, 12,
    14, 16, 20, …: a prompt that shares a part of a cached one finds four fifths of it."""
    lengths = [length for length in (1, 2, 3) if length <= most]
    step = 1
    while 4 * step <= most:
        lengths += [k * step for k in (4, 5, 6, 7) if k * step <= most]
        step *= 2
    return lengths


def between(lengths: list[int], after: int, upto: int) -> list[int]:
    """Those of the sorted lengths in (after, upto]."""
    return lengths[bisect_right(lengths, after) : bisect_right(lengths, upto)]
