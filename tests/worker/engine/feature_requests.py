"""Requests that ask for what the generation API offers, and what must hold of their answers.

The same for every engine that serves the tiny checkpoints.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared.types import SamplingParams, StructuredOutput, StructureKind
from tests.worker.engine.serving import Entry, bitmasks_of
from tests.worker.models.tiny import VOCAB_SIZE
from worker.messages import NewRequest
from worker.step import Int32Array, StepPlan

EOS = 2
ANY_RULE = StructuredOutput(StructureKind.REGEX, ".*")


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


def request(uid: int, prompt: list[int], max_tokens: int = 16, **fields: Any) -> NewRequest:
    """Greedy, unless it says otherwise."""
    fields.setdefault("sampling", SamplingParams(temperature=0.0))
    return NewRequest(uid, np.array(prompt, np.int32), max_tokens, **fields)


def varied(count: int) -> list[NewRequest]:
    """Requests for 20 tokens, each with another way of drawing them; at most 8."""
    params = [
        SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
        SamplingParams(temperature=1.2, seed=2, top_k=20, min_p=0.01, presence_penalty=-1.0),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, logit_bias=((7, 5.0), (8, -100.0))),
        SamplingParams(temperature=1.0, seed=4, allowed_token_ids=tuple(range(10, 60))),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, seed=6, top_k=20, top_p=0.9),
        SamplingParams(temperature=0.0),
    ]
    return [
        request(uid, prompt_of(9 + 4 * uid, uid), 20, sampling=one, ignore_eos=True)
        for uid, one in enumerate(params[:count], 1)
    ]


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_logprobs(
    entries: list[Entry], tokens: list[int], logits: torch.Tensor, num_top: int, *, rounding: float
) -> None:
    """Entry i is of tokens[i], which logits[i] predict. Ranks are left to the caller."""
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert [entry.token_id for entry in entries] == tokens
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(wanted[i, entry.token_id]), abs=rounding)
        assert len(entry.top_ids) == num_top == len(set(entry.top_ids))
        top = wanted[i].topk(num_top).values.tolist()
        assert list(entry.top_logprobs) == pytest.approx(top, abs=rounding)
        given = wanted[i, torch.tensor(entry.top_ids, dtype=torch.int64)].tolist()
        assert list(entry.top_logprobs) == pytest.approx(given, abs=rounding)


def rank_of(token_id: int, logits: torch.Tensor, *, margin: float) -> int:
    """One more than the tokens that are likelier by more than the margin; logits [vocab_size]."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return 1 + int((logprobs > logprobs[token_id] + margin).sum())


def only(*allowed: int) -> Int32Array:
    """A mask of one row."""
    flags = np.zeros((1, VOCAB_SIZE), np.bool_)
    flags[0, list(allowed)] = True
    return bitmasks_of(flags)


def by_position(plan: StepPlan) -> Int32Array:
    """A token that tells its position, or 3, is all that a masked row may sample."""
    positions = (plan.cached_lens + plan.extend_lens)[plan.masked]
    return np.concatenate([only(int(at) % VOCAB_SIZE, 3) for at in positions])
