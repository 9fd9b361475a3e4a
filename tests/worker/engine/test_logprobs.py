"""Log-probabilities of given logits: values, ranks, and the order of the likeliest."""

import numpy as np
import pytest
import torch

from worker.engine.logprobs import prompt_logprobs, token_logprobs

_VOCAB = 300


def _logits(rows: int, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(0, 3, (rows, _VOCAB)).astype(np.float32))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_values_ranks_and_likeliest_follow_the_definition(num_top: int) -> None:
    # Rounded, so that many logits tie.
    logits = _logits(12, num_top).round()
    token_ids = torch.arange(12) * 7
    entries = token_logprobs(logits, token_ids, num_top)
    values = logits.double().numpy()
    wanted = values - np.log(np.exp(values).sum(1, keepdims=True))
    for row, token in enumerate(token_ids.tolist()):
        assert entries.logprobs[row] == pytest.approx(wanted[row, token], abs=1e-5)
        assert entries.ranks[row] == 1 + (values[row] > values[row, token]).sum()
        order = np.lexsort((np.arange(_VOCAB), -values[row]))[:num_top].tolist()
        assert entries.top_ids[row].tolist() == order
        assert entries.top_logprobs[row] == pytest.approx(wanted[row, order], abs=1e-5)
    assert entries.top_ids.shape == entries.top_logprobs.shape == (12, num_top)
    assert entries.top_ids.dtype == entries.ranks.dtype == np.int32


def test_a_vocabulary_smaller_than_what_is_asked_gives_all_it_has() -> None:
    entries = token_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0]), 20)
    assert entries.top_ids.tolist() == [[1, 2, 0]]
    assert entries.ranks.tolist() == [3]


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = _logits(3, 1).bfloat16()
    entries = token_logprobs(logits, torch.tensor([1, 2, 3]), 2)
    wanted = torch.log_softmax(logits.double(), 1)[torch.arange(3), [1, 2, 3]].numpy()
    assert entries.logprobs == pytest.approx(wanted, abs=1e-5)


def test_slices_of_a_long_prompt_join_to_what_one_piece_gives() -> None:
    hidden = _logits(50, 2)
    targets = torch.arange(50)
    seen: list[int] = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part * 0.5

    # As if the vocabulary were so large that 16 rows of it fill a slice.
    parts = prompt_logprobs(hidden, targets, logits_of, num_top=4, vocab_size=(32 << 20) // 64)
    whole = token_logprobs(hidden * 0.5, targets, 4)
    assert seen == [16, 16, 16, 2]
    assert parts.logprobs == pytest.approx(whole.logprobs, abs=1e-6)
    assert (parts.ranks == whole.ranks).all()
    assert (parts.top_ids == whole.top_ids).all()


def test_a_row_that_is_not_finite_still_has_its_entry_and_spoils_no_other() -> None:
    logits = _logits(3, 3)
    healthy = token_logprobs(logits, torch.tensor([4, 5, 6]), 3)
    logits[1, 9] = float("nan")
    entries = token_logprobs(logits, torch.tensor([4, 5, 6]), 3)
    assert np.isnan(entries.logprobs[1])
    for row in (0, 2):
        assert entries.logprobs[row] == healthy.logprobs[row]
        assert (entries.top_ids[row] == healthy.top_ids[row]).all()
    logits[1] = float("inf")
    assert np.isnan(token_logprobs(logits, torch.tensor([4, 5, 6]), 3).logprobs[1])
