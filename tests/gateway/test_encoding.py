"""Texts that wait for the tokenizer are bounded, and the bound is told at once."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.chat_template import ChatTemplate
from gateway.detokenizer import Detokenizer
from gateway.encoding import PromptEncoder
from gateway.request import TextPrompt
from gateway.served_model import ModelInfo, ServedModel
from shared.errors import QueueFullError


class HeldTokenizer:
    """Encodes nothing until it is let go."""

    chat_template: ChatTemplate | None = None
    bos_token_id: int | None = None

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self.may_go.wait(30)
        return [len(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def min_tokens(self, text: str) -> int:
        return 1

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        raise NotImplementedError


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_more_texts_than_may_wait_are_refused_until_one_is_done(
    executor: ThreadPoolExecutor,
) -> None:
    tokenizer = HeldTokenizer()
    info = ModelInfo("m", "echo", "int32", "cpu", 100, 50, 10, (2,), "", "", True)
    model = ServedModel(info, tokenizer)
    encoder = PromptEncoder(executor, max_prompt_bytes=1000, max_pending=2)
    waiting = [encoder.tokenize(TextPrompt(text), model) for text in ("a", "bb")]
    with pytest.raises(QueueFullError, match="the limit is 2") as refused:
        encoder.decode([1], model, skip_special_tokens=True)
    assert refused.value.retry_after_ms > 0
    tokenizer.may_go.set()
    assert [await future for future in waiting] == [[1], [2]]
    assert await encoder.decode([1], model, skip_special_tokens=True) == "[1]"
