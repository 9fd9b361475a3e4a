"""The lowest logit that top-k, top-p and min-p admit, one for each row, exactly.

Filters keep tokens by value, so what they keep is all from some logit on, which is searched.
Keys are integers that order as logits do. A pass over a row weighs what lies above each of a
few thresholds and leaves the part of the range between two of them; the search is over when
one logit is left in it. As soon as what may still be admitted is little, it is listed, and
later passes are over the list alone.

With few rows a row's pieces are shared among programs, which meet after each pass: every one
writes what its pieces weigh, waits for the others, and adds up all pieces, so all go on alike.
Pieces are the same and added up in the same order whoever weighs them: a row has the same
bound in any batch. Programs take rows in the order in which they begin to run, so that whom
one waits for runs already or begins before any later row.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda.logits import (
    has_filter,
    is_drawn,
    is_permitted,
    load_logits,
    ordered,
    value_of_ordered,
)
from worker.engine.cuda.row_params import RowParams

# Tokens of a piece, and of a list.
_PIECE = 8192
# Thresholds of a pass.
_WAYS = 4
# What is said of a piece: a weight for each threshold, and four numbers more.
_WORDS = 8
# What one reads of a meeting no other overwrites at the next.
_TURNS = 2
# Programs that run at a time, with two on each multiprocessor.
_PROGRAMS = 264


class Bounds:
    """Space for the bounds of up to `max_rows` rows; one step at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_pieces = triton.cdiv(vocab_size, _PIECE)
        self._bounds = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._lists = torch.empty(max_rows, _PIECE, dtype=torch.float32, device=device)
        words = (max_rows, _TURNS, self._num_pieces, _WORDS)
        self._said = torch.empty(words, dtype=torch.float32, device=device)
        # Zero between steps: how many programs have begun; how many have come to a row's
        # meetings, and how many have left it for good.
        self._begun = torch.zeros(1, dtype=torch.int32, device=device)
        self._comings = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)

    def find(
        self, logits: torch.Tensor, params: RowParams, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[max_rows] float32, of logits [num_rows, vocab_size]; -inf where nothing is filtered.

        The logits are float32, or the int16 bits of bfloat16. Without `masks` the bounds are of
        rows that have none, and with them of those that have one, of what it permits. A row that
        filters nothing costs next to nothing.
        """
        num_rows = logits.shape[0]
        programs = min(max(_PROGRAMS // num_rows, 1), self._num_pieces)
        if triton.knobs.runtime.interpret:
            # It runs one program after the other.
            programs = 1
        _bound_kernel[(programs * num_rows,)](
            logits,
            params.mask_number,
            # Something to point at: it is not read.
            logits if masks is None else masks,
            self._bounds,
            self._lists,
            self._said,
            self._begun,
            self._comings,
            params.temperature,
            *params.filters,
            self._vocab_size,
            logits.stride(0),
            programs,
            IS_MASKED=masks is not None,
            NUM_PIECES=self._num_pieces,
            PIECES=triton.next_power_of_2(self._num_pieces),
            PIECE=_PIECE,
            WAYS=_WAYS,
            WORDS=_WORDS,
            num_warps=8,
            maxnreg=128,
        )
        return self._bounds


@triton.jit(do_not_specialize=["programs"])
def _bound_kernel(  # type: ignore[no-untyped-def]
    logits,
    mask_numbers,
    masks,
    bounds,
    lists,
    said,
    begun,
    comings,
    temperature,
    top_k,
    top_p,
    min_p,
    is_greedy,
    vocab_size,
    stride,
    programs,
    IS_MASKED: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):
    order = tl.atomic_add(begun, 1, sem="relaxed")
    if order == tl.num_programs(0) - 1:
        tl.store(begun, 0)
    mine = order % programs
    row = order // programs
    if not has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
        if mine == 0:
            tl.store(bounds + row, float("-inf"))
        return
    mask_number = tl.load(mask_numbers + row)
    if not is_drawn(mask_number, IS_MASKED):
        return
    base = logits + row.to(tl.int64) * stride
    mask = masks
    if IS_MASKED:
        mask = masks + (mask_number - 1) * tl.cdiv(vocab_size, 32)
    lists += row * PIECE
    said += row * (2 * NUM_PIECES * WORDS)
    comings += row * 2
    lowest, highest = _range(
        base, mask, vocab_size, mine, programs, said, comings,
        IS_MASKED, NUM_PIECES, PIECES, PIECE, WORDS,
    )  # fmt: skip
    last = ordered(highest).to(tl.int64)
    bound = ordered(lowest).to(tl.int64)

    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    inverse_temperature = tl.minimum(1.0 / tl.load(temperature + row), 1e30)
    meeting = 1
    length = vocab_size
    # One loop for both, or the kernel would be twice as long.
    for phase in range(2):
        is_top_p = phase == 1
        # For top-k, at a temperature at which every token weighs 1.
        sharpness = tl.where(is_top_p, inverse_temperature, 0.0)
        share = tl.where(is_top_p, p, 1.0)
        most_wanted = tl.where(is_top_p, float("inf"), k * 1.0)
        if tl.where(is_top_p, p < 1.0, (k > 0) & (k < vocab_size)):
            bound, meeting, length = _reach(
                base, mask, lists, length, vocab_size, bound, last, highest,
                sharpness, share, most_wanted, mine, programs, said, comings, meeting,
                IS_MASKED, NUM_PIECES, PIECES, PIECE, WAYS, WORDS,
            )  # fmt: skip
    if programs > 1:
        # The last to leave knows that none waits any more.
        if tl.atomic_add(comings + 1, 1, sem="acq_rel") == programs - 1:
            tl.store(comings, 0)
            tl.store(comings + 1, 0)
    # The first alone reads lists to their end.
    if mine == 0:
        least = value_of_ordered(bound.to(tl.int32))
        fraction = tl.load(min_p + row)
        if fraction > 0.0:
            least = tl.maximum(least, highest + tl.log(fraction) / inverse_temperature)
        # The likeliest token is always admitted.
        tl.store(bounds + row, tl.where(least <= highest, least, highest))


@triton.jit
def _range(  # type: ignore[no-untyped-def]
    base,
    mask,
    vocab_size,
    mine,
    programs,
    said,
    comings,
    IS_MASKED: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The row's lowest finite and its highest logit."""
    # The first meeting's turn is that of all odd ones.
    turn = said + NUM_PIECES * WORDS
    for piece in range(mine, NUM_PIECES, programs):
        x = _piece(base, mask, piece, vocab_size, IS_MASKED, PIECE)
        tl.store(turn + piece * WORDS, tl.min(tl.where(x > float("-inf"), x, float("inf"))))
        tl.store(turn + piece * WORDS + 1, tl.max(x))
    _meet(comings, 1, programs)
    lowest = tl.min(_heard(turn, 0, float("inf"), NUM_PIECES, PIECES, WORDS), 0)
    highest = tl.max(_heard(turn, 1, float("-inf"), NUM_PIECES, PIECES, WORDS), 0)
    return tl.minimum(lowest, highest), highest


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    base,
    mask,
    lists,
    length,
    vocab_size,
    lo,
    hi,
    highest,
    sharpness,
    share,
    most_wanted,
    mine,
    programs,
    said,
    comings,
    meeting,
    IS_MASKED: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The highest key from which on tokens weigh enough, of keys lo … hi (int64).

    Enough is a share of what weighs from `lo` on, but no more than `most_wanted`. Any key that
    admits the same tokens is as good. `length` is that of the list, or `vocab_size` while there
    is none. Returns how many meetings there were and the length, too. When there is a list, the
    first program alone goes on.
    """
    way = tl.arange(0, WAYS)
    by_value = True
    wanted = 0.0
    while (lo < hi) & ((length == vocab_size) | (mine == 0)):
        is_listed = length < vocab_size
        num_pieces = tl.where(is_listed, 1, NUM_PIECES)
        first = lo.to(tl.int32)
        meeting += 1
        turn = said + (meeting % 2) * (NUM_PIECES * WORDS)
        for piece in range(mine, num_pieces, programs):
            if is_listed:
                x = _piece(lists, mask, piece, length, False, PIECE)
            else:
                x = _piece(base, mask, piece, vocab_size, IS_MASKED, PIECE)
            words = turn + piece * WORDS
            _weigh(x, words, lo, hi, by_value, highest, sharpness, WAYS)
        _meet(comings, meeting, tl.where(is_listed, 1, programs))
        piece = tl.arange(0, PIECES)
        heard = tl.load(
            turn + piece[:, None] * WORDS + way[None, :],
            piece[:, None] < num_pieces,
            0.0,
            cache_modifier=".cg",
        )
        sums = tl.sum(heard, 0)
        total = tl.sum(_heard(turn, WAYS, 0.0, num_pieces, PIECES, WORDS), 0)
        counts = _heard(turn, WAYS + 1, 0.0, num_pieces, PIECES, WORDS).to(tl.int32)
        least = tl.min(_heard(turn, WAYS + 2, float("inf"), num_pieces, PIECES, WORDS), 0)
        most = tl.max(_heard(turn, WAYS + 3, float("-inf"), num_pieces, PIECES, WORDS), 0)
        wanted = tl.where(wanted > 0.0, wanted, tl.minimum(share * total, most_wanted))
        thresholds = _threshold(lo, hi, by_value, way, WAYS)
        is_reached = sums >= wanted
        above = tl.max(tl.where(is_reached, thresholds, lo), 0)
        below = tl.min(tl.where(is_reached, hi, thresholds - 1), 0)
        # The least that reaches: if it is no more than that, nothing above it does.
        is_exact = tl.min(tl.where(is_reached, sums, float("inf")), 0) == wanted
        # With one logit left, all keys up to it are alike.
        is_one = least >= most
        hi = tl.where(is_one, lo, tl.where(is_exact, above, below))
        lo = tl.where(is_one, lo, above)
        by_value = not by_value
        count = tl.sum(counts, 0)
        if (length == vocab_size) & (count <= PIECE) & (count < vocab_size):
            _list(
                base, mask, lists, counts, first, vocab_size, mine, programs,
                IS_MASKED, NUM_PIECES, PIECES, PIECE,
            )  # fmt: skip
            length = count
            meeting += 1
            _meet(comings, meeting, programs)
    return lo, meeting, length


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    x, words, lo, hi, by_value, highest, sharpness, WAYS: tl.constexpr
):
    """Says of a piece what weighs from each threshold on and from `lo` on, how many those
    are, and the least and the most of its logits in lo … hi."""
    key = ordered(x)
    # Finite, so that at any temperature nothing comes of -inf but 0.
    below = tl.maximum(x - highest, -3e38)
    is_kept = (key >= lo.to(tl.int32)) & (x > float("-inf"))
    weight = tl.where(is_kept, tl.exp(below * sharpness), 0.0)
    for way in tl.static_range(WAYS):
        threshold = _threshold(lo, hi, by_value, way, WAYS).to(tl.int32)
        tl.store(words + way, tl.sum(tl.where(key >= threshold, weight, 0.0)))
    inside = is_kept & (key <= hi.to(tl.int32))
    tl.store(words + WAYS, tl.sum(weight))
    tl.store(words + WAYS + 1, tl.sum(is_kept.to(tl.float32)))
    tl.store(words + WAYS + 2, tl.min(tl.where(inside, x, float("inf"))))
    tl.store(words + WAYS + 3, tl.max(tl.where(inside, x, float("-inf"))))


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    base,
    mask,
    lists,
    counts,
    first,
    vocab_size,
    mine,
    programs,
    IS_MASKED: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Writes the logits from the key `first` on, of which each piece has `counts` [PIECES]."""
    for piece in range(mine, NUM_PIECES, programs):
        x = _piece(base, mask, piece, vocab_size, IS_MASKED, PIECE)
        is_kept = ((ordered(x) >= first) & (x > float("-inf"))).to(tl.int32)
        before = tl.sum(tl.where(tl.arange(0, PIECES) < piece, counts, 0), 0)
        tl.store(lists + before + tl.cumsum(is_kept, 0) - 1, x, is_kept != 0)


@triton.jit
def _piece(  # type: ignore[no-untyped-def]
    base, mask, piece, length, IS_MASKED: tl.constexpr, PIECE: tl.constexpr
):
    """The logits of a piece, of so many in all; -inf beyond the last and where masked out."""
    token = piece * PIECE + tl.arange(0, PIECE)
    exists = token < length
    x = load_logits(base + token, exists)
    if IS_MASKED:
        exists = exists & is_permitted(mask, token, exists)
    return tl.where(exists, x, float("-inf"))


@triton.jit
def _meet(comings, meeting, programs):  # type: ignore[no-untyped-def]
    """Until all of a row's programs have come as often: what they stored, all may load."""
    # What any of a program's threads wrote comes before its coming.
    tl.debug_barrier()
    if programs > 1:
        tl.atomic_add(comings, 1, sem="acq_rel")
        while tl.atomic_add(comings, 0, sem="acquire") < meeting * programs:
            pass
        tl.debug_barrier()


@triton.jit
def _heard(turn, word, other, num_pieces, PIECES: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What was said of each piece [PIECES]; `other` where there is none."""
    piece = tl.arange(0, PIECES)
    # .cg: what other multiprocessors wrote is not in this one's L1.
    return tl.load(turn + piece * WORDS + word, piece < num_pieces, other, cache_modifier=".cg")


@triton.jit
def _threshold(lo, hi, by_value, way, WAYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A key in lo + 1 … hi, int64; the higher, the higher the way in 0 … WAYS - 1.

    By value, logits fall evenly into the parts; by key, a part is a fifth of the keys whatever
    the values are, so that the search ends after 28 passes at the worst.
    """
    by_key = lo + (way + 1) * ((hi - lo) // (WAYS + 1) + 1)
    low, high = value_of_ordered(lo.to(tl.int32)), value_of_ordered(hi.to(tl.int32))
    # Halves, for the difference of two float32 may be none.
    value = low + (high * 0.5 - low * 0.5) * ((way + 1) * (2.0 / (WAYS + 1)))
    threshold = tl.where(by_value, ordered(value).to(tl.int64), by_key)
    return tl.minimum(tl.maximum(threshold, lo + 1), hi)
