"""Renders and encodes chats with transformers: cases as JSON on stdin, answers on stdout.

`python -m tests.gateway.reference_chat TOKENIZER_FOLDER`; a program of its own, because the
gateway's tests must not depend on how transformers is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast


def main(folder: str) -> None:
    config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(Path(folder) / "tokenizer.json"),
        **{name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    )
    answers = []
    for case in json.load(sys.stdin):
        tokenizer.chat_template = case["template"]
        arguments = {
            "tools": case.get("tools"),
            "add_generation_prompt": case.get("add_generation_prompt", False),
            "continue_final_message": case.get("continue_final_message", False),
            **case.get("variables", {}),
        }
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, **arguments)
        encoded = tokenizer.apply_chat_template(case["messages"], tokenize=True, **arguments)
        answers.append({"text": text, "ids": encoded["input_ids"]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
