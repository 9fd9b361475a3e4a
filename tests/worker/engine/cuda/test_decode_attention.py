"""The decode kernel against attention written out in float64."""

import pytest
import torch
from torch import Tensor

from worker.engine.cuda.decode_attention import DecodeShape, DecodeWork, Rotary, decode_attention
from worker.engine.cuda.decode_plan import programs_at_once

EPS = 1e-6


class Case:
    """Random KV of some rows in scattered pages, and one new token for each row."""

    def __init__(
        self, shape: DecodeShape, lens: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.shape = shape
        batch, head_dim = len(lens), shape.head_dim
        columns = max(lens) // shape.page_size + 1
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.rows = torch.randperm(batch, device=device).int()
        pages = torch.randperm(batch * columns, device=device).int()
        self.table = pages.view(batch, columns)
        size = (batch * columns, shape.num_kv_heads, shape.page_size, head_dim)
        self.keys = torch.randn(size, device=device).to(dtype)
        self.values = torch.randn(size, device=device).to(dtype)
        num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
        self.qkv = torch.randn(batch, num_heads * head_dim, device=device).to(dtype)
        angles = torch.randn(max(lens) + 1, head_dim // 2, device=device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        self.norm = (torch.rand(head_dim, device=device) + 0.5).to(dtype)

    def run(self, work: DecodeWork, rotary: Rotary | None) -> Tensor:
        q_size = self.shape.num_q_heads * self.shape.head_dim
        kv_size = self.shape.num_kv_heads * self.shape.head_dim
        q, k, v = self.qkv.split((q_size, kv_size, kv_size), 1)
        out = torch.full_like(q, float("nan")).contiguous()
        work.plan(self.rows, self.lens)
        decode_attention(
            work,
            out,
            q,
            k,
            v,
            k_pages=self.keys,
            v_pages=self.values,
            page_table=self.table,
            rotary=rotary,
        )
        return out

    def expected(self, rotary: Rotary | None) -> Tensor:
        return torch.stack([self._row(i, rotary) for i in range(len(self.lens))])

    def _row(self, i: int, rotary: Rotary | None) -> Tensor:
        shape, length = self.shape, int(self.lens[i])
        heads = self.qkv[i].double().view(-1, shape.head_dim)
        q, k, v = heads.split((shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads))
        if rotary is not None:
            q, k = (
                _rotated(q, rotary, rotary.q_norm, length),
                _rotated(k, rotary, rotary.k_norm, length),
            )
        positions = torch.arange(length, device=q.device)
        pages = self.table[self.rows[i]].long()[positions // shape.page_size]
        offsets = positions % shape.page_size
        keys = torch.cat((self.keys[pages, :, offsets].double(), k[None]))
        values = torch.cat((self.values[pages, :, offsets].double(), v[None]))
        group = shape.num_q_heads // shape.num_kv_heads
        scores = torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(group, 1))
        weights = (scores * shape.head_dim**-0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(group, 1)).flatten()

    def new_slots(self) -> tuple[Tensor, Tensor]:
        """Where each row's new token belongs: pages and offsets."""
        column = (self.lens // self.shape.page_size).long()
        return self.table[self.rows.long(), column].long(), self.lens.long() % self.shape.page_size


def _rotated(x: Tensor, rotary: Rotary, norm: Tensor | None, position: int) -> Tensor:
    if norm is not None:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * norm.double()
    cos, sin = rotary.cos_sin[position].double().chunk(2)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def _error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def _bound(dtype: torch.dtype) -> float:
    return 1e-2 if dtype == torch.bfloat16 else 1e-5


SHAPES = [
    DecodeShape(num_q_heads=2, num_kv_heads=2, head_dim=64, page_size=1),
    DecodeShape(num_q_heads=4, num_kv_heads=2, head_dim=128, page_size=16),
    DecodeShape(num_q_heads=8, num_kv_heads=1, head_dim=64, page_size=64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_all_lengths_attend_to_all_their_tokens(
    shape: DecodeShape, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(shape, [0, 1, 63, 64, 65, 300], dtype, device)
    rotary = Rotary(case.cos_sin, case.norm, case.norm, EPS)
    exact = case.expected(rotary)
    work = DecodeWork(shape, len(case.lens), device)
    # Twice, for the counters of the first run must not be left over for the second.
    for _ in range(2):
        assert _error(case.run(work, rotary), exact) < _bound(dtype)


def test_the_new_token_is_written_to_its_page(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(SHAPES[1], [0, 15, 16, 100], dtype, device)
    case.run(DecodeWork(SHAPES[1], 4, device), None)
    pages, offsets = case.new_slots()
    heads = case.qkv.view(4, -1, SHAPES[1].head_dim)
    assert torch.equal(case.keys[pages, :, offsets], heads[:, 4:6])
    assert torch.equal(case.values[pages, :, offsets], heads[:, 6:])


def test_tokens_that_are_rotated_already_are_left_alone(
    dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(SHAPES[0], [5, 200], dtype, device)
    ours = case.run(DecodeWork(SHAPES[0], 2, device), None)
    assert _error(ours, case.expected(None)) < _bound(dtype)


def test_one_long_row_is_cut_into_chunks_that_add_up(
    dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(SHAPES[0], [1500], dtype, device)
    work = DecodeWork(SHAPES[0], 1, device)
    rotary = Rotary(case.cos_sin, None, None, 0.0)
    exact = case.expected(rotary)
    assert _error(case.run(work, rotary), exact) < _bound(dtype)
    assert int((work.items[:, 0] >= 0).sum()) > 16


QWEN = DecodeShape(num_q_heads=16, num_kv_heads=8, head_dim=128, page_size=16)
LENGTHS = {
    "one wave with room to spare": [700] * 5,
    "nearly two waves": [1430] * 48,
    "two waves for many rows": list(range(100, 1124, 4)),
    "empty rows": [0, 0, 5000, 1],
    "a few long rows among many": [300] * 248 + [4000] * 8,
}


def _chunks(lens: list[int], device: torch.device) -> list[tuple[int, ...]]:
    """The lines of a plan: b, row, length, begin, end, first, count."""
    work = DecodeWork(QWEN, len(lens), device)
    rows = torch.arange(len(lens), dtype=torch.int32, device=device) + 3
    work.plan(rows, torch.tensor(lens, dtype=torch.int32, device=device))
    lines = work.items[: work.num_items(len(lens)), :7].tolist()
    return [tuple(line) for line in lines if line[0] >= 0]


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS.keys())
def test_each_row_is_cut_into_neighbouring_chunks(lens: list[int], device: torch.device) -> None:
    chunks = _chunks(lens, device)
    for b, length in enumerate(lens):
        first, count = next(chunk[5:] for chunk in chunks if chunk[0] == b)
        own = chunks[first : first + count]
        assert all(chunk[:3] == (b, b + 3, length) for chunk in own)
        assert all(chunk[5:] == (first, count) for chunk in own)
        assert [own[0][3], own[-1][4]] == [0, length]
        assert [chunk[4] for chunk in own[:-1]] == [chunk[3] for chunk in own[1:]]
    assert len(chunks) == sum(next(c[6] for c in chunks if c[0] == b) for b in range(len(lens)))


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_longest_chunks_come_first(lens: list[int], device: torch.device) -> None:
    # By tiles, and by a row's first chunk: its last one may be shorter.
    tiles = [-(-chunk[4] // 64) for chunk in _chunks(lens, device) if chunk[3] == 0]
    assert tiles == sorted(tiles, reverse=True)


def test_chunks_are_of_whole_waves(device: torch.device) -> None:
    wave = programs_at_once(device) // QWEN.num_kv_heads
    assert len(_chunks([500] * 24, device)) <= wave
    assert 1.5 * wave < len(_chunks([1430] * 48, device)) <= 2 * wave


def test_a_long_row_among_many_is_cut(device: torch.device) -> None:
    lens = LENGTHS["a few long rows among many"]
    longest = max(chunk[4] - chunk[3] for chunk in _chunks(lens, device))
    # Four times what each program would read if all read the same, and a tile.
    assert longest <= 4 * sum(lens) / (2 * programs_at_once(device) // QWEN.num_kv_heads) + 64
