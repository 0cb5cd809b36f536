"""Tests of `gdn_window`; run in Triton's interpreter and on a GPU by those that import them and give `device`, `dtype`,
`sizes` (key heads, value heads, dk, dv), `rounds` and `windows` (ROUNDS and WINDOWS or some of them)."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.cuda.delta_net import DeltaScratch, gdn_window, pending_width
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from tests.support.kernel_references import gdn_window_reference

NAN = float("nan")
EPS = 1e-6
NUM_SLOTS, MOST = 5, 9
ROUNDS = (
    # slots, width, pending rows accepted of each slot
    ([1, 2], 9, [0, 0, 0, 0, 0]),
    ([2, 1, 3], 2, [0, 9, 4, 0, 0]),
    ([1, 3], 1, [0, 1, 0, 2, 0]),
    ([3], 6, [0, 0, 0, 1, 0]),
    ([4, 3, 1], 4, [0, 1, 0, 3, 0]),
)
WINDOWS = ((9, 3), (2, 2), (1, 1), (4, 4), (6, 1), (3, 2))
"""Width, and rows accepted afterwards."""


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class DeltaLayer:
    """One linear layer's weights and memory."""

    def __init__(self, sizes, dtype=torch.float32, device="cpu", most=MOST):
        key_heads, heads, dk, dv = self.sizes = sizes
        self.channels = 2 * key_heads * dk + heads * dv
        self.dtype, self.device, self.most = dtype, torch.device(device), most
        weights = (
            draw(4, self.channels, seed=1, scale=0.5),
            -draw(heads, seed=2).exp(),
            draw(heads, seed=3),
            1 + 0.1 * draw(dv, seed=4),
        )
        memory = (
            draw(NUM_SLOTS, heads, dk, dv, seed=5),
            draw(NUM_SLOTS, 3, self.channels, seed=6).to(dtype),
            torch.full((NUM_SLOTS, most, pending_width(self.channels, heads)), NAN, dtype=dtype),
        )
        self.weights, self.memory = ([t.to(device) for t in tensors] for tensors in (weights, memory))

    @property
    def num_columns(self):
        _, heads, _, dv = self.sizes
        return self.channels + heads * dv + 2 * heads

    def rows(self, num_rows, seed):
        return draw(num_rows, self.num_columns, seed=seed).to(self.dtype)

    def step(self, projected, slots, counts, width, function=gdn_window, tiled=False, **options):
        """The output of a window, which is written as TiledRows if it is so wanted; changes the memory."""
        heads, dv, device = self.sizes[1], self.sizes[3], self.device
        out = torch.full((len(projected), heads * dv), NAN, dtype=self.dtype, device=device)
        out = TiledRows.of(out) if tiled else out
        scratch = DeltaScratch.empty(len(projected), heads, dv, device)
        scratch.read.fill_(NAN)
        slots, counts = torch.tensor(slots, dtype=torch.int32, device=device), torch.tensor(counts, device=device)
        operands = (projected.to(device), slots, counts, *self.memory, *self.weights, EPS, width, scratch, out)
        function(*operands, **options)
        return (out.plain() if tiled else out)[: len(slots) * width].cpu()

    def slot(self, index):
        """The slot's state, history and pending rows, NaN as a number so that equality sees it."""
        return [part[index].float().nan_to_num(7.5).cpu() for part in self.memory]


def counts_of(slot, count):
    return [count if index == slot else 0 for index in range(NUM_SLOTS)]


@pytest.mark.parametrize("most_pending", (0, 4))
def test_matches_the_reference(device, dtype, sizes, rounds, most_pending):
    ours, theirs = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype)
    # fp32 throughout but for the output
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for number, (slots, width, counts) in enumerate(rounds):
        rows = ours.rows(len(slots) * width, 20 + number)
        got = ours.step(rows, slots, counts, width, most_pending=most_pending)
        wanted = theirs.step(rows, slots, counts, width, gdn_window_reference, most_pending=most_pending)
        torch.testing.assert_close(got, wanted, **close)
        for slot in range(NUM_SLOTS):
            (state, *others), (wanted, *wanted_others) = ours.slot(slot), theirs.slot(slot)
            torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-5)
            for mine, other in zip(others, wanted_others, strict=True):
                assert torch.equal(mine, other)


def test_tiled_rows_have_the_bits_of_others(device, dtype, sizes):
    key_heads, heads, dk, dv = sizes
    # whole units of 128 columns
    sizes = sizes if heads * dv % 128 == 0 else (key_heads, 128 // dv, dk, dv)
    ours, others = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype, device)
    for slots, width in (([1], 1), ([1, 2], 5)):
        rows = ours.rows(len(slots) * width, 25)
        got = ours.step(rows, slots, counts_of(1, 0), width, tiled=True)
        assert got.isfinite().all() and torch.equal(got, others.step(rows, slots, counts_of(1, 0), width))


@pytest.mark.parametrize("junk", (NAN, 1e5))
def test_windows_have_the_bits_of_single_rows(device, dtype, sizes, windows, junk):
    alone, many = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype, device)
    num_rows = sum(kept for _, kept in windows)
    rows = alone.rows(num_rows + 1, 30)
    wanted = torch.cat([alone.step(rows[t : t + 1], [1], counts_of(1, min(t, 1)), 1) for t in range(num_rows)])
    first, accepted = 0, 0
    for width, kept in windows:
        # drafts that will be rejected
        window = torch.full((width, alone.num_columns), junk, dtype=dtype)
        window[:kept] = rows[first : first + kept]
        got = many.step(window, [1], counts_of(1, accepted), width)
        assert torch.equal(got[:kept], wanted[first : first + kept]), (width, first)
        first, accepted = first + kept, kept
    # one more row brings both memories to the same place
    last = rows[num_rows:]
    assert torch.equal(many.step(last, [1], counts_of(1, accepted), 1), alone.step(last, [1], counts_of(1, 1), 1))
    for mine, other in zip(many.slot(1)[:2], alone.slot(1)[:2], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("limits", ((4,), (MOST,), (4, 0, 8)))
def test_when_the_state_is_stored_changes_no_bit(device, dtype, sizes, limits):
    """`limits`: rows that may be pending, in turn, as in rounds of other sizes."""
    always, seldom = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype, device)
    accepted = pending = 0
    stored = []
    windows = (*[(1, 1)] * 9, (2, 1), (1, 1), (4, 3), (1, 0), (1, 1), (3, 2), (1, 1), (1, 1), (MOST, 0))
    for number, (width, kept) in enumerate(windows):
        rows, before = always.rows(width, 70 + number), seldom.slot(1)
        wanted = always.step(rows, [1], counts_of(1, accepted), width)
        most_pending = limits[number % len(limits)]
        assert torch.equal(seldom.step(rows, [1], counts_of(1, pending), width, most_pending=most_pending), wanted)
        stays = pending + width <= most_pending
        if pending:
            stored.append(not stays)
            after = seldom.slot(1)
            assert [torch.equal(*parts) for parts in zip(before[:2], after[:2], strict=True)] == [stays, stays]
        accepted, pending = kept, kept + (pending if stays else 0)
    # the last window has brought both to the same place
    assert any(stored) and not all(stored)
    for mine, other in zip(seldom.slot(1)[:2], always.slot(1)[:2], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("most", (1, 2, 4))
def test_how_many_rows_may_be_pending_changes_no_bit(device, dtype, sizes, most):
    """An engine has room for as many as its k asks for."""
    small, large = DeltaLayer(sizes, dtype, device, most), DeltaLayer(sizes, dtype, device)
    for number in range(6):
        rows, counts = small.rows(most, 60 + number), counts_of(1, number and most)
        assert torch.equal(small.step(rows, [1], counts, most), large.step(rows, [1], counts, most))
    for mine, other in zip(small.slot(1)[:2], large.slot(1)[:2], strict=True):
        assert torch.equal(mine, other)


def test_sequences_have_the_bits_they_have_alone(device, dtype, sizes):
    width, counts = 3, [4, 2, 0, 3, 0]
    together = DeltaLayer(sizes, dtype, device)
    rows = together.rows(5 * width, 40)
    # padding, twice, and a neighbour that overflows
    slots = [2, 0, 1, 3, 0]
    rows[3:6], rows[12:] = NAN, 1e5
    rows[9:12] *= 1e5
    together.memory[2][:, :4] = draw(NUM_SLOTS, 4, together.memory[2].shape[2], seed=41).to(device, dtype)
    start = [part.clone() for part in together.memory]
    got = together.step(rows, slots, counts, width)
    for place, slot in ((0, 2), (2, 1), (3, 3)):
        alone = DeltaLayer(sizes, dtype, device)
        for mine, part in zip(alone.memory, start, strict=True):
            mine.copy_(part)
        part = slice(place * width, (place + 1) * width)
        assert torch.equal(alone.step(rows[part], [slot], counts, width), got[part])
        for mine, other in zip(alone.slot(slot), together.slot(slot), strict=True):
            assert torch.equal(mine, other)
    # a slot of no sequence is left alone
    assert all(
        torch.equal(mine[4].nan_to_num(7.5), part[4].nan_to_num(7.5))
        for mine, part in zip(together.memory, start, strict=True)
    )


def test_nothing_accepted_leaves_state_and_history(device, dtype, sizes):
    layer = DeltaLayer(sizes, dtype, device)
    before = layer.slot(1)
    layer.step(layer.rows(4, 50), [1], [0] * NUM_SLOTS, 4)
    state, history, pending = layer.slot(1)
    assert torch.equal(state, before[0])
    assert torch.equal(history, before[1])
    assert not torch.equal(pending, before[2])
