"""Tokenizers in forms that only transformers can read.

Imports transformers, which takes seconds: imported by `TokenizerCache` when it must.
"""

import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from worker.checkpoint.tokenizer import CONFIG, TEMPLATE, TOKENIZER, normalised_bundle
from worker.messages import TokenizerBundle
from worker.models.config import read_json


def convert_gguf(path: Path, *, must_add_bos: bool) -> TokenizerBundle:
    """The tokenizer inside a GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = Path(folder)
        template = saved / TEMPLATE
        return normalised_bundle(
            (saved / TOKENIZER).read_bytes(),
            read_json((saved / CONFIG).read_bytes(), CONFIG),
            template=template.read_text("utf-8") if template.is_file() else None,
            must_add_bos=must_add_bos,
        )
