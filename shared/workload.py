"""The requests that the benchmarks send, the same whether to an engine or through the pair."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STANDARD = "standard"
STANDARD_NUM_REQUESTS = 256
# Its longest request has 2048 tokens.
STANDARD_CONTEXT = 4096
STANDARD_TOKEN_BUDGET = 16_384

_SHORTEST, _LONGEST = 100, 1024
_LARGEST_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt of token ids, and exactly how many tokens to sample: eos is to be ignored."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int


def standard_workload(
    seed: int = 0, num_requests: int = STANDARD_NUM_REQUESTS
) -> list[WorkloadRequest]:
    """The public offline benchmark's 256 requests at seed 0, or the first of them.

    Prompt and output lengths are uniform in 100 … 1024. Other seeds have other prompts of
    the same lengths, for warming up. More than 256 are drawn likewise.
    """
    rng = random.Random(0)
    count = max(num_requests, STANDARD_NUM_REQUESTS)
    prompts = []
    for _ in range(count):
        prompt_len = rng.randint(_SHORTEST, _LONGEST)
        prompts.append([rng.randint(0, _LARGEST_TOKEN_ID) for _ in range(prompt_len)])
    lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(count)]
    return [
        WorkloadRequest(
            prompt_token_ids=[(token_id + seed) % _LARGEST_TOKEN_ID for token_id in prompt],
            max_tokens=max_tokens,
            temperature=0.6,
            seed=1000 * seed + i,
        )
        for i, (prompt, max_tokens) in enumerate(zip(prompts, lengths, strict=True))
    ][:num_requests]
