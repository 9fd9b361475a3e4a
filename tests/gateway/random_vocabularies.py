"""Tokenizers with random vocabularies, of the two kinds that most models have.

And of one whose decoder has a step that the gateway does not know.

Each comes with the bytes of its tokens, which are known from how it was made.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from gateway.tokenizer import TemplateLimits, TextTokenizer
from gateway.vocabulary import byte_alphabet

# Whether they are normalized is told beside each: the normalizer changes what they read.
SPECIAL = {"<s>": False, "</s>": True, "<|im_end|>": False}
# Added, but text like any other.
ORDINARY = {"<tool>": False, "<a b>": False, "<call>": True, "<b é>": True}

# Characters of one to four bytes, some that share their first bytes, and the one that
# stands for faults.
CHARACTERS = "ab é世丗😀😁\ufffd"
_BYTES = tuple(bytes([byte]) for byte in range(256))
# The stand-in for the space.
_SPACE = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what its tokens stand for; the longer and the added ones come last."""

    tokenizer: TextTokenizer = field(repr=False)
    pieces: list[bytes] = field(repr=False)
    special_ids: frozenset[int]
    # What its normalizer puts before each text, and each token.
    prefix: str = ""
    # Whether the library's decoder takes off a leading space.
    takes_off_space: bool = False
    # Whether the library's decoder gives up valid bytes beside invalid ones.
    gives_up: bool = False

    def bytes_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[bytes]:
        """Of each token; of special ones nothing, when they are left out."""
        left_out = self.special_ids if skip_special_tokens else frozenset()
        return [b"" if token_id in left_out else self.pieces[token_id] for token_id in token_ids]


def byte_level(seed: int) -> Vocabulary:
    """Every byte is a token, and some longer strings of bytes are, characters or not."""
    draw = random.Random(seed)
    pieces = dict.fromkeys(_BYTES)
    for _ in range(8):
        text = _text(draw).encode()
        begin = draw.randrange(len(text))
        piece = text[begin : begin + draw.randint(1, 6)]
        # Now and then bytes that no text has.
        piece = draw.randbytes(3) if draw.random() < 0.2 else piece
        # BPE has to go through its beginnings to make it.
        pieces |= dict.fromkeys(piece[:size] for size in range(1, len(piece) + 1))
    stand_in = {byte: char for char, byte in byte_alphabet().items()}
    built = tokenizers.Tokenizer(
        _bpe(["".join(stand_in[byte] for byte in piece) for piece in pieces])
    )
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return _vocabulary(built, list(pieces))


def metaspace(seed: int) -> Vocabulary:
    """Words with a stand-in for the space, and a token for each byte of all other text."""
    return _metaspace(seed, decoders.Strip(" ", 1, 0), takes_off_space=True)


def unknown_decoder(seed: int) -> Vocabulary:
    """The same, but for a last step that no table can take; it does nothing to these texts."""
    return _metaspace(seed, decoders.Replace(Regex("z{99}"), ""), takes_off_space=False)


def _metaspace(seed: int, last_step: decoders.Decoder, *, takes_off_space: bool) -> Vocabulary:
    draw = random.Random(seed)
    # Real ones all have the space; as bytes, its stand-in would be a character of its own.
    words = {" ": None}
    for _ in range(draw.randint(0, 6)):
        word = _text(draw)
        words |= dict.fromkeys([*word, *(word[:size] for size in range(1, len(word) + 1))])
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    built = tokenizers.Tokenizer(_bpe([word.replace(" ", _SPACE) for word in words], first))
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    built.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            last_step,
        ]
    )
    pieces = [b"<unk>", *_BYTES, *(word.encode() for word in words)]
    return _vocabulary(built, pieces, " ", takes_off_space=takes_off_space, gives_up=True)


def _text(draw: random.Random) -> str:
    return "".join(draw.choices(CHARACTERS, k=draw.randint(1, 4)))


def _bpe(tokens: Sequence[str], first: Sequence[str] = ()) -> models.BPE:
    """Merges make every token from its beginning and its last character."""
    token_ids = {token: token_id for token_id, token in enumerate([*first, *tokens])}
    merges = [(token[:-1], token[-1]) for token in tokens if len(token) > 1]
    if not first:
        return models.BPE(token_ids, merges)
    return models.BPE(token_ids, merges, unk_token=first[0], byte_fallback=True, fuse_unk=True)


def _vocabulary(
    built: tokenizers.Tokenizer,
    pieces: Sequence[bytes],
    prefix: str = "",
    *,
    takes_off_space: bool = False,
    gives_up: bool = False,
) -> Vocabulary:
    built.add_special_tokens(
        [AddedToken(token, special=True, normalized=SPECIAL[token]) for token in SPECIAL]
    )
    built.add_tokens(
        [AddedToken(token, special=False, normalized=ORDINARY[token]) for token in ORDINARY]
    )
    added = [
        (prefix if is_normalized else "") + token
        for token, is_normalized in (SPECIAL | ORDINARY).items()
    ]
    whole = [*pieces, *(token.encode() for token in added)]
    assert built.get_vocab_size() == len(whole)
    files = {"tokenizer.json": built.to_str().encode()}
    return Vocabulary(
        tokenizer=TextTokenizer(files, len(whole), TemplateLimits()),
        pieces=whole,
        special_ids=frozenset(range(len(pieces), len(pieces) + len(SPECIAL))),
        prefix=prefix,
        takes_off_space=takes_off_space,
        gives_up=gives_up,
    )
