"""A tokenizer with the first of its tokens alone, which is read in a fraction of the time."""

import json
from collections.abc import Mapping


def first_tokens(files: Mapping[str, bytes], count: int) -> dict[str, bytes]:
    """Byte-level BPE of ids below `count`: merges come in the order of the ids that they make."""
    document = json.loads(files["tokenizer.json"])
    model = document["model"]
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token_id < count}
    merges = [[left, right] for left, right in model["merges"] if left + right in vocab]
    assert len(vocab) == count
    document["model"] = {**model, "vocab": vocab, "merges": merges}
    return {**files, "tokenizer.json": json.dumps(document).encode()}
