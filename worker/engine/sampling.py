"""The reference sampler: exact, seeded, and blind to a row's batch mates.

Sampling draws the argmax of logit / temperature + Gumbel noise, which is a draw from the
softmax (https://arxiv.org/abs/1411.0030, section 2.1). The noise of a token is a hash of
(seed, position, token id) alone, so a request that is preempted and computed again, or
computed in other company, draws the same tokens.

Filters keep tokens by value, never by rank, so ties are always kept or dropped together:
- top-k keeps every token at least as likely as the k-th likeliest;
- top-p keeps, of what top-k left and renormalised to 1, every token at least as likely as
  the last of the fewest likeliest that hold p together;
- min-p keeps tokens with at least min_p of the likeliest token's probability.

The hash, in 32-bit unsigned arithmetic that wraps (`mix` is MurmurHash3's finaliser):
    stream = mix(mix(low half of seed) + 0x9E3779B9 + high half of seed)
    stream = mix(stream + position * 0x9E3779B1)
    bits   = mix(token_id * 0x9E3779B1 + stream)
    noise  = -log(-log(1 - u)),  u = (float32(bits) + 0.5) / 2**32
Likely winners have small u, where float32 is fine enough not to distort the draw.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.step import Int32Array, SamplingBatch

UInt32Array = NDArray[np.uint32]

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_ODD = 0x9E3779B1
# The largest float32 below 1.
_BELOW_ONE = 1.0 - 2.0**-24
# Tried before sorting a whole vocabulary: most top-p sets are smaller.
_HEAD = 1024


def sample(logits: Tensor, positions: Int32Array, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Token ids (int64) and faultiness (bool), [n] each, for logits [n, vocab_size].

    `positions` is where each drawn token will stand in its request. Of tokens that tie in
    an argmax the lowest id wins. A row is faulty, and its token meaningless, if a logit is
    NaN or +inf, or if all of them are -inf.
    """
    highest, token_ids = logits.max(dim=-1)
    faulty = ~torch.isfinite(highest)
    if not batch.is_greedy.all():
        usable = ~(batch.is_greedy | faulty.numpy())
        for row in map(int, np.flatnonzero(usable)):
            token_ids[row] = _draw(logits[row].float(), int(positions[row]), batch, row)
    return token_ids, faulty


def noise_bits(seed: int, position: int, token_ids: UInt32Array) -> UInt32Array:
    """The hash of each token id.

    In numpy, which has unsigned words that wrap: with int64 in torch a draw from 49 thousand
    tokens took 0.9 ms instead of 0.5 (one core of an EPYC).
    """
    stream = _mix_int(_mix_int(seed & _WORD) + _GOLDEN + (seed >> 32))
    stream = _mix_int(stream + position * _ODD)
    return _mix(token_ids * np.uint32(_ODD) + np.uint32(stream))


def gumbel(bits: UInt32Array) -> Tensor:
    """Gumbel noise, float32, of hashed bits."""
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, np.float32(_BELOW_ONE), out=u)
    return torch.from_numpy(u).neg_().log1p_().neg_().log_().neg_()


def lowest_admitted(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The logit that a token of a row [vocab_size] must reach to pass top-k and top-p."""
    if not 0 < top_k < len(logits):
        return _nucleus_bound(logits, temperature, top_p)
    bound = logits.topk(top_k).values[-1]
    return bound if top_p >= 1.0 else _nucleus_bound(logits[logits >= bound], temperature, top_p)


def _draw(logits: Tensor, position: int, batch: SamplingBatch, row: int) -> int:
    """One token of a row [vocab_size], float32."""
    temperature, min_p = float(batch.temperature[row]), float(batch.min_p[row])
    top_k, top_p = int(batch.top_k[row]), float(batch.top_p[row])
    # At most 0, so that a temperature next to 0 cannot overflow to +inf.
    scaled = (logits - logits.max()).div_(temperature)
    token_ids = np.arange(len(logits), dtype=np.uint32)
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        admitted = logits >= lowest_admitted(logits, temperature, top_k, top_p)
        if min_p > 0.0:
            admitted &= _weights(logits, logits.max(), temperature) >= min_p
        token_ids, scaled = token_ids[admitted.numpy()], scaled[admitted]
    noise = gumbel(noise_bits(int(batch.seeds[row]), position, token_ids))
    return int(token_ids[int(scaled.add_(noise).argmax())])


def _nucleus_bound(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The highest logit such that it and those above hold top_p of the mass."""
    if top_p >= 1.0:
        return logits.min()
    highest = logits.max()
    wanted = _weights(logits, highest, temperature).sum() * top_p
    size = min(_HEAD, len(logits))
    while True:
        ranked = logits.topk(size).values
        mass = _weights(ranked, highest, temperature).cumsum_(0)
        if mass[-1] >= wanted or size == len(logits):
            # Rounding may leave the whole mass just short of a top_p next to 1.
            last = torch.searchsorted(mass, wanted).clamp_(max=size - 1)
            return ranked[last]
        size = len(logits)


def _weights(logits: Tensor, highest: Tensor, temperature: float) -> Tensor:
    """Unnormalised probabilities, in float64 so that borders fall where they should."""
    return (logits.double() - highest).div_(temperature).exp_()


def _mix(h: UInt32Array) -> UInt32Array:
    """`mix` of each value, in place."""
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def _mix_int(h: int) -> int:
    h &= _WORD
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)
