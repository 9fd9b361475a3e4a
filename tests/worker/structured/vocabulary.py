"""A small byte-level vocabulary, and the grammar library over it."""

from functools import cache

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.step import Int32Array
from worker.structured.contract import Matcher
from worker.structured.library import LLGuidance

# A model's vocabulary is often rounded up, and need not fill its last word of 32 ids.
VOCAB_SIZE = 525
EOS_IDS = (1, 3)
SPECIAL = ("<s>", "</s>", "<pad>", "<|end|>")
_CORPUS = [
    'true false null {"name": "value", "id": 12, "kind": "left"} [1, 2.5, -3] ["a", "b"],',
    "The quick brown fox jumps over the lazy dog; größe 日本 é red green blue 2024-05-17",
    '"a longer value"}, {"ok":true}, {"left":[{"id":100}]} abc xyz fdef 550e8400-e29b-41d4',
]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE; the ids beyond its own up to VOCAB_SIZE are in no text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_CORPUS, trainer)
    assert len(SPECIAL) + 256 < made.get_vocab_size() < VOCAB_SIZE
    return made


def library(*, threads: int = 1) -> LLGuidance:
    return LLGuidance(
        tokenizer().to_str(), vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS, threads=threads
    )


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(token_ids: list[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=False))


def allowed(grammars: LLGuidance, matcher: Matcher) -> set[int]:
    """Ids that the matcher's mask allows now."""
    bitmasks = np.zeros((1, grammars.mask_words), np.int32)
    grammars.fill([(matcher, 0)], bitmasks)
    return ids_of(bitmasks[0])


def ids_of(bitmask: Int32Array) -> set[int]:
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
