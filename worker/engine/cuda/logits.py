"""How kernels read logits: the model's own, which are bfloat16, or adjusted ones, float32."""

import torch
import triton
import triton.language as tl


def as_words(logits: torch.Tensor) -> torch.Tensor:
    """Logits as kernels take them: bfloat16 as int16, for the interpreter does not know it."""
    return logits if logits.dtype == torch.float32 else logits.view(torch.int16)


@triton.jit
def value_of_bits(bits):  # type: ignore[no-untyped-def]
    """The float32 of a bfloat16 given as int16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(pointers, mask):  # type: ignore[no-untyped-def]
    """float32 of logits that are float32 or bits of bfloat16; 0 where masked out."""
    if pointers.dtype.element_ty == tl.float32:
        return tl.load(pointers, mask, 0.0)
    else:
        return value_of_bits(tl.load(pointers, mask, 0))


@triton.jit
def is_drawn(mask_number, IS_MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a row draws now, by the number of its late mask, 0 if it has none."""
    return mask_number != 0 if IS_MASKED else mask_number == 0


@triton.jit
def is_permitted(mask, token, exists):  # type: ignore[no-untyped-def]
    """Whether a mask, one bit for each token, has those of these tokens."""
    word = tl.load(mask + token // 32, exists, 0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """An int32 that orders as the float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_ordered(key):  # type: ignore[no-untyped-def]
    """The inverse of `ordered`, which is its own."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a row's draw is from some of its tokens alone."""
    k = tl.load(top_k + row)
    filters = ((k > 0) & (k < vocab_size)) | (tl.load(top_p + row) < 1.0)
    return (filters | (tl.load(min_p + row) > 0.0)) & (tl.load(is_greedy + row) == 0)
