"""Packed experts on a GPU: a row's bits depend on that row alone, and its values are those of the checkpoint."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.cuda import moe
from pilotfish.kernels.cuda.moe import ExpertScratch, ExpertWeights, GroupedExperts, combine
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows
from tests.support.kernel_references import combine_reference, expert_rows_reference
from tests.support.routed import choosing, outputs, run_routed
from tests.unit.kernels.cuda.test_experts import expert

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

H, E, TOP_K, MOST = 256, 24, 4, 256


def on_gpu(weights: ExpertWeights) -> ExpertWeights:
    parts = (weights.gate, weights.up, weights.down)
    return ExpertWeights(*(part.cuda() if isinstance(part, torch.Tensor) else part.to("cuda") for part in parts))


def make(kind: str, shared_kind: str | None = None, shared_width: int = 96) -> GroupedExperts:
    routed = [on_gpu(expert(kind, number, 96)) for number in range(E)]
    return GroupedExperts(routed, on_gpu(expert(shared_kind or kind, 99, shared_width)), TOP_K)


def inputs(rows: int):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator).bfloat16()
    ids = torch.rand(rows, E, generator=generator).topk(TOP_K, -1).indices.int()
    ids[rows // 2 :, 0] = 7  # one expert with many rows; twice in a row of its own at most
    for row in ids:
        if len(set(row.tolist())) < TOP_K:
            row.copy_(torch.randperm(E, generator=generator)[:TOP_K])
    return x.cuda(), ids.cuda()


def run(packed: GroupedExperts, x: AnyRows, ids: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    scratch = ExpertScratch.make(len(ids), TOP_K, E, packed.width, H, ids.device)
    for buffer in (scratch.inner, scratch.out):
        buffer.fill_(float("nan"))
    scratch.lists.fill_(-1)
    return run_routed(packed, x, ids, scratch, pdl)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(
    ("kind", "shared_kind", "width"),
    [
        ("nvfp4", "nvfp4", 96),
        ("nvfp4", "bf16", 160),
        ("modelopt", "fp8 block", 96),
        ("fp8 channel", None, 96),
        ("bf16", None, 96),
    ],
)
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_values(kind, shared_kind, width, rows):
    packed, (x, ids) = make(kind, shared_kind, width), inputs(rows)
    scratch = ExpertScratch.make(rows, TOP_K, E, packed.width, H, x.device)
    want = expert_rows_reference(packed, x, ids, scratch)
    got = run(packed, x, ids)
    # both round the inner activations to bf16, where sums in another order may differ by an ulp of it
    torch.testing.assert_close(got.double(), want.double(), rtol=0.02, atol=0.01 * float(want.abs().max()))


@pytest.mark.parametrize(("kind", "shared_kind"), [("nvfp4", None), ("fp8 block", "bf16")])
def test_a_rows_bits_depend_on_no_other_row(kind, shared_kind):
    packed, (x, ids) = make(kind, shared_kind), inputs(MOST)
    alone = torch.cat(
        [run(packed, x[row : row + 1].contiguous(), ids[row : row + 1].contiguous()) for row in range(MOST)]
    )
    assert alone.isfinite().all()
    for rows in (2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 100, MOST):
        assert same_bits(run(packed, x[:rows].contiguous(), ids[:rows].contiguous()), alone[:rows]), rows
        row = rows * 2 // 3
        for fill in (float("nan"), 1e5):
            others = torch.full_like(x[:rows], fill)
            others[row] = x[row]
            assert same_bits(run(packed, others, ids[:rows].contiguous())[row], alone[row]), (rows, fill)


@pytest.mark.parametrize(("kind", "shared_kind"), [("nvfp4", None), ("fp8 block", "bf16")])
def test_tiled_rows_give_the_bits_of_others(kind, shared_kind):
    packed, (x, ids) = make(kind, shared_kind), inputs(100)
    for rows in (1, 3, 8, 9, 16, 17, 64, 65, 100):
        own_ids = ids[:rows].contiguous()
        want = run(packed, x[:rows].contiguous(), own_ids)
        tiled = TiledRows.of(torch.cat((x[:rows], torch.full_like(x[:8], float("nan")))))
        for pdl in (False, True):
            assert want.isfinite().all() and same_bits(run(packed, tiled, own_ids, pdl), want), (rows, pdl)


def combine_inputs(hidden: int) -> tuple[torch.Tensor, ...]:
    """Parts, weights, the shared gate, the stream and the norm's scale of 9 rows."""
    generator = torch.Generator(device="cuda").manual_seed(hidden)
    parts = torch.randn(9, TOP_K + 1, hidden, generator=generator, device="cuda").bfloat16()
    sizes = ((9, TOP_K), (9,), (9, hidden), (hidden,))
    return parts, *(torch.rand(*size, generator=generator, device="cuda") for size in sizes)


@pytest.mark.parametrize("hidden", [384, 2048, 5120])
def test_combine_writes_tiled_rows(hidden):
    parts, weights, gate, x, _ = combine_inputs(hidden)
    plain, tiled = torch.empty(9, hidden, dtype=torch.bfloat16, device="cuda"), TiledRows.empty(9, hidden, x.device)
    for out in (plain, tiled):
        combine(parts, weights, gate, x.clone(), torch.ones(hidden, device="cuda"), 1e-6, out, True)
    assert plain.isfinite().all() and same_bits(tiled.plain(), plain)


def test_rows_that_all_choose_the_same_experts():
    packed, (x, ids) = make("nvfp4"), inputs(16)
    ids[:] = ids[0]
    alone = torch.cat([run(packed, x[row : row + 1].contiguous(), ids[:1].contiguous()) for row in range(16)])
    assert same_bits(run(packed, x, ids), alone)
    many, same = x.repeat(3, 1), ids.repeat(3, 1)
    assert same_bits(run(packed, many, same), alone.repeat(3, 1, 1))


@pytest.mark.parametrize(("kind", "shared_kind", "width"), [("nvfp4", None, 96), ("fp8 channel", "bf16", 160)])
@pytest.mark.parametrize("rows", [9, 40, 100])
def test_bits_depend_on_no_number_of_programs(monkeypatch, kind, shared_kind, width, rows):
    """So few that each has many units of work; as many as there is room for have one here."""
    packed, (x, ids) = make(kind, shared_kind, width), inputs(rows)
    want = run(packed, x, ids)
    for programs in (1, 7, 150):
        monkeypatch.setattr(moe, "num_programs", lambda *shape, most=programs: most)
        assert same_bits(run(packed, x, ids, pdl=programs != 7), want), programs


@pytest.mark.parametrize("rows", [9, 40, 64, 128])
def test_one_launch_lists_what_two_do(monkeypatch, rows):
    _, ids = inputs(rows)
    lists = [torch.full((moe.list_size(rows, TOP_K, E),), -7, dtype=torch.int32).cuda() for _ in range(2)]
    assert ids.numel() <= moe.ONE_LIST_PAIRS
    moe.list_experts(ids, E, lists[0])
    monkeypatch.setattr(moe, "ONE_LIST_PAIRS", 0)
    moe.list_experts(ids, E, lists[1])
    assert torch.equal(*lists)


@pytest.mark.parametrize(("rows", "programs"), [(1, 0), (5, 0), (8, 0), (16, 0), (40, 0), (40, 24), (200, 0)])
def test_a_chain_of_dependent_launches_gives_the_same_bits(monkeypatch, rows, programs):
    if programs:
        monkeypatch.setattr(moe, "num_programs", lambda *shape: programs)
    packed, (x, ids) = make("nvfp4"), inputs(rows)
    scratch = ExpertScratch.make(rows, TOP_K, E, packed.width, H, x.device)
    weights, chosen, gate = outputs(rows, TOP_K, "cuda")
    scale = torch.rand(H, device="cuda")
    # other experts each time: stale logits or ids would be seen
    logits = [choosing((ids + step) % E, E)[0] for step in range(30)]

    def chain(pdl: bool) -> torch.Tensor:
        stream, h = x.float(), x.clone()
        for own in logits:
            parts = packed.rows(h, own, weights, chosen, gate, scratch, pdl)
            combine(parts, weights, gate, stream, scale, 1e-6, h, pdl)
        return stream

    want = chain(False)
    assert torch.equal(chain(True), want)
    # captured, and replayed one straight after the other
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(100):
        graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("hidden", [384, 2048, 5120])
def test_combine_values_and_bits(hidden):
    parts, weights, gate, x, scale = combine_inputs(hidden)
    want, got = x.clone(), x.clone()
    outs = [torch.empty(9, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    combine_reference(parts, weights, gate, want, scale, 1e-6, outs[0])
    combine(parts, weights, gate, got, scale, 1e-6, outs[1])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(outs[1].float(), outs[0].float(), rtol=0.01, atol=0.01)
    for row in range(9):
        one, out = x[row : row + 1].clone(), torch.empty_like(outs[0][:1])
        at = slice(row, row + 1)
        combine(parts[at], weights[at].contiguous(), gate[at], one, scale, 1e-6, out)
        assert torch.equal(one[0], got[row]) and torch.equal(out[0], outs[1][row])


@pytest.mark.parametrize(("kind", "shared_kind"), [("nvfp4", None), ("fp8 channel", "bf16")])
def test_bulk_agrees_with_the_rows(kind, shared_kind):
    packed, (x, ids) = make(kind, shared_kind), inputs(200)
    weights, gate = torch.rand(200, TOP_K, device="cuda"), torch.rand(200, device="cuda")
    want = torch.zeros(200, H, device="cuda")
    combine(run(packed, x, ids), weights, gate, want)
    scratch = torch.full((packed.scratch_size,), float("nan"), dtype=torch.bfloat16, device="cuda")
    got = packed.bulk(x, weights, ids, gate, scratch)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * float(want.abs().max()))
