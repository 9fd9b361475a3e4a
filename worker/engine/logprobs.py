"""The reference for log-probabilities: exact ranks, and ties in the order of their ids."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from worker.step import Float32Array, Int32Array, TokenLogprobs

# Logits of a whole prompt would be gigabytes; this much of them at a time is not noticed.
_SLICE_BYTES = 32 << 20
_FLOAT_BYTES = 4


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Of each row [n, vocab_size], what it says of its token [n] and of the likeliest ones."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    normalizers = logits.logsumexp(1, keepdim=True)
    top_ids, top_logits = _likeliest(logits, min(num_top, logits.shape[1]))
    with np.errstate(invalid="ignore"):  # of a faulty row, where infinities meet
        top_logprobs = top_logits - normalizers.numpy()
    return TokenLogprobs(
        logprobs=(chosen - normalizers).squeeze(1).numpy(),
        ranks=(logits > chosen).sum(1, dtype=torch.int32).add_(1).numpy(),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def prompt_logprobs(
    hidden: Tensor,
    targets: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    num_top: int,
    vocab_size: int,
) -> TokenLogprobs:
    """Of each row [n, hidden_size], what its logits say of its target [n]; in slices."""
    size = max(1, _SLICE_BYTES // (_FLOAT_BYTES * vocab_size))
    slices = [
        token_logprobs(logits_of(hidden[at : at + size]), targets[at : at + size], num_top)
        for at in range(0, len(targets), size)
    ]
    return TokenLogprobs(
        logprobs=np.concatenate([part.logprobs for part in slices]),
        ranks=np.concatenate([part.ranks for part in slices]),
        top_ids=np.concatenate([part.top_ids for part in slices]),
        top_logprobs=np.concatenate([part.top_logprobs for part in slices]),
    )


def _likeliest(logits: Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """Ids and logits [n, count] of the greatest, of equal ones the lowest id first."""
    if not count:
        shape = (len(logits), 0)
        return np.empty(shape, np.int32), np.empty(shape, np.float32)
    # A row with a NaN has no order; zeros, so that it still has its entries.
    usable = torch.nan_to_num(logits, nan=0.0) if logits.isnan().any() else logits
    top = usable.topk(min(count + 1, usable.shape[1]), dim=1)
    values, ids = top.values[:, :count].numpy(), top.indices[:, :count].numpy()
    # topk leaves open which of equal logits it takes, should the last not be the only one.
    if top.values.shape[1] > count:
        tied = top.values[:, count - 1] == top.values[:, count]
        for row in tied.nonzero().ravel().tolist():
            ids[row] = _first_of_equal(usable[row], top.values[row, count - 1], count)
            values[row] = usable[row].numpy()[ids[row]]
    order = np.lexsort((ids, -values), axis=1)
    return (
        np.take_along_axis(ids, order, axis=1).astype(np.int32),
        np.take_along_axis(values, order, axis=1),
    )


def _first_of_equal(logits: Tensor, last: Tensor, count: int) -> np.ndarray:
    """Ids of a row's `count` greatest logits, the lowest ids of those that equal the last."""
    greater = (logits > last).nonzero().ravel().numpy()
    equal = (logits == last).nonzero().ravel().numpy()
    return np.concatenate((greater, equal[: count - len(greater)]))
