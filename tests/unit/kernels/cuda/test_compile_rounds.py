"""The kernels that rounds of every plan are made of, for sm_90, made without a GPU: launch by launch the same binary.

A row's bits are those of the instructions that made it. Triton deals a block out to registers, lanes and warps by the
block's shape and by what it knows of pointers and integers, and adds along an axis in that order: a constant that
follows k, or a pointer that is aligned for some batches alone, is another kernel, and may be other bits. So of k, the
number of sequences, the longest context, the draft vocabulary, the filters and the head none may choose a kernel; of
the number of rows, in a few steps, the products alone, which add in one order by construction.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.ledger import tensor_bytes
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.round import buffers
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.executor import make_executor
from pilotfish.engine.round.shapes import Shape
from pilotfish.kernels.cuda import attention_items, delta_net
from pilotfish.spec.slots import EVERYTHING, FILTERED
from tests.support.compiled import Code
from tests.support.launches import Launch, launches_of
from tests.support.rounds import CPU

DEMO = Path(__file__).parents[4] / "demo" / "model"
FAST_ROWS = 16
MIXERS = ("linear_attention", "linear_attention", "full_attention")
BIG = {
    "hidden_size": 2048, "num_hidden_layers": 3, "layer_types": MIXERS, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "rotary_dim": 64, "tie_word_embeddings": False,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
MODELS = {
    "demo": ("nvfp4", torch.bfloat16, {}),
    # layers, but for their number, experts and vocabulary, as the 35B-A3B has them
    "35B-A3B": (
        "mixed",
        torch.bfloat16,
        {**BIG, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts_per_tok": 8, "num_experts": 16},
    ),
    # a dense model's rank of eight, over FP8 pages: 3 linear heads of 12 bytes a pending row
    "27B": (
        "nvfp4",
        torch.float8_e4m3fn,
        {**BIG, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 0, "intermediate_size": 512},
    ),
}
DEPTHS, SEQUENCES = (0, 1, 3, 8), (1, 4, 5, 16)
LENGTHS = (200, 600, 4080)
"""Page tables of 1, 3 and 16 pages: for Triton one, no and a multiple of 16."""
PRODUCTS = ("linear._rows_kernel", "moe_kernels.experts_kernel", "moe_kernels.listed_kernel")
"""Compiled anew for more rows, see Found.add_rows. A row is a column of mma, its sum is over the same units in the same
order, by instructions that are written out, and nothing is contracted: test_run_products.py has their bits."""
STEPS = (1, 4, 8, FAST_ROWS, 32, 64, 256)
"""Rows up to which they are the same ones."""
LISTS = ("moe_kernels.list_groups_kernel", "moe_kernels.list_kernel", "moe_kernels.groups_kernel")
"""Launched for more than 8 rows alone."""
ROUTER = "router._route_kernel"
"""Launched for more than moe.CHOICE_ROWS rows alone, but always the same one; fewer rows' experts choose by
themselves."""
INTEGERS = (*LISTS, "commit._accept_commit_kernel", "lookup._look_up_kernel")
"""May be several: they compute integers alone, whose sums have one value in any order."""


@cache
def model_of(kind: str, head: str = "mtp"):
    if head in ("none", "lookup"):
        return dataclasses.replace(model_of(kind), head=LookupHead(5, 2) if head == "lookup" else None)
    layout, kv_dtype, changes = MODELS[kind]
    config = dataclasses.replace(ModelConfig.load(DEMO), **changes)
    sizes = CacheSizes(8, max(SEQUENCES) + 1, max(DEPTHS) + 1, kv_dtype)
    draft_ids = list(range(0, 4096, 2)) if head == "trimmed" else None
    weights = dummy_weights(config, layout, CPU)
    return build_model(weights, config, sizes, torch.bfloat16, CPU, fused=True, draft_ids=draft_ids)


@dataclasses.dataclass(frozen=True)
class Plan:
    """As engine.start.assemble takes it."""

    depth: int
    max_num_seqs: int
    max_model_len: int
    head: str = "mtp"

    def rounds(self, kind: str):
        model = model_of(kind, self.head)
        history_length = self.max_model_len + 9 if self.head == "lookup" else 0
        slots_and_depth = (self.max_num_seqs + 1, max(1, self.depth))
        state = BatchState(*slots_and_depth, model.config.vocab_size, CPU, history_length)
        return make_executor(model, state, self.depth, self.max_num_seqs, self.max_model_len, FAST_ROWS)


PLANS = [
    # each two of the three together: buffers are of rows, which depth and sequences make, and tables of the length
    *(Plan(DEPTHS[i], SEQUENCES[j], LENGTHS[(i + j) % 3]) for i, j in product(range(4), range(4))),
    *(Plan(0, 4, 600, "none"), Plan(3, 4, 600, "trimmed"), Plan(4, 3, 600, "lookup"), Plan(8, 4, 4080, "lookup")),
]


class Found:
    """What parts of rounds launched first, and by name the kernels that another plan or shape launched otherwise."""

    def __init__(self):
        self.first = {}
        self.different = defaultdict(list)

    def add(self, part: str, launches: list[Launch], where: str) -> None:
        before, at = self.first.setdefault(part, (launches, where))
        assert [launch.kernel for launch in before] == [launch.kernel for launch in launches], (part, at, where)
        for one, other in zip(before, launches, strict=True):
            if one != other and one.kernel not in INTEGERS:
                self.different[one.kernel].append(f"{part}: {one} of {at}; {other} of {where}")

    def add_rows(self, part: str, launches: list[Launch], num_rows: int, where: str) -> None:
        """A part whose products may be other kernels for more rows."""
        step = next(most for most in STEPS if num_rows <= most)
        self.add(f"{part}, up to {step} rows", launches, where)
        self.add(part, [launch for launch in launches if launch.kernel not in (*PRODUCTS, *LISTS, ROUTER)], where)
        if routed := [launch for launch in launches if launch.kernel == ROUTER]:
            self.add(f"{part}, routed", routed, where)


def add_plan(found: Found, kind: str, plan: Plan) -> None:
    rounds = plan.rounds(kind)
    for shape in (shapes := list(rounds.shapes)):
        if shape.num_sequences <= 3 or shape == shapes[-1] or shape.num_rows in (8, FAST_ROWS):
            add_shape(found, plan, rounds, shape)


def add_shape(found: Found, plan: Plan, rounds, shape: Shape) -> None:
    body, where = rounds.body, f"{plan}, {shape}"
    found.add_rows("verify", launches_of(lambda: body.verify(shape)), shape.num_rows, where)
    whole = launches_of(lambda: body.decide(shape, shape.depth, EVERYTHING))
    plain = launches_of(lambda: body.decide(shape, shape.depth, EVERYTHING & ~FILTERED))
    kept = {launch.kernel for launch in plain}
    found.add("decide", whole, where)
    found.add("decide without filters", plain, where)
    found.add("decide without filters", [launch for launch in whole if launch.kernel in kept], where)
    if shape.depth and plan.head == "lookup":
        found.add("look up", launches_of(lambda: body.draft(shape, shape.depth, EVERYTHING)), where)
    elif shape.depth and rounds.head_on:
        add_drafts(found, plan, body, shape, where)


def add_drafts(found: Found, plan: Plan, body, shape: Shape, where: str) -> None:
    count, head = shape.num_sequences, plan.head
    first = launches_of(lambda: body.model.head.propose(body, count, 1, EVERYTHING))
    found.add_rows(f"{head}: first draft", first, count, where)
    launches = launches_of(lambda: body.draft(shape, shape.depth, EVERYTHING))
    repair = len(launches_of(lambda: body.draft(shape, 1, EVERYTHING))) - len(first)
    found.add_rows("repair", launches[:repair], shape.num_rows, where)
    found.add_rows(f"{head}: first draft", launches[repair : repair + len(first)], count, where)
    later = launches[repair + len(first) :]
    for step in range(shape.depth - 1):
        size = len(later) // (shape.depth - 1)
        found.add_rows(f"{head}: next draft", later[step * size : (step + 1) * size], count, where)


@pytest.mark.parametrize("kind", MODELS)
def test_no_plan_and_no_batch_chooses_a_kernel(kind):
    found = Found()
    for plan in PLANS:
        add_plan(found, kind, plan)
    if found.different:
        pytest.fail("\n".join(f"{name}, {len(said)} times: {said[0]}" for name, said in found.different.items()))
    parts = {part.partition(":")[0].partition(",")[0] for part in found.first}
    assert parts == {"verify", "decide", "decide without filters", "look up", "repair", "mtp", "trimmed"}
    seen = {launch.kernel: launch for launches, _ in found.first.values() for launch in launches}
    assert {"delta_net._finish_kernel", "attention_items.items_kernel", PRODUCTS[0], "sample._choose_kernel"} < set(
        seen
    )
    # each compiles
    floats = {name for name, launch in seen.items() if launch.uses_floats}
    assert floats.isdisjoint(INTEGERS) and "norm._add_norm_kernel" in floats


@pytest.mark.parametrize("kind", MODELS)
def test_what_products_read_is_tiled_but_where_others_read_it_too(kind):
    """Who writes it and who reads it are of one mind. Row-major: what lm_head and the head's first product read, and
    what experts have inside."""

    def are_tiled(launches: list[Launch], *kernels: str, but: str) -> list[bool]:
        found = (launch.constants.split() for launch in launches if launch.kernel in kernels)
        return ["TILED=True" in constants for constants in found if but not in constants]

    body, shape = Plan(3, 4, 600).rounds(kind).body, Shape(1, 3)
    writers = ("norm._embed_rows_kernel", "norm._add_norm_kernel", "moe_kernels.combine_kernel")
    mixers = ("delta_net._finish_kernel", "attention_kernels.merge_kernel")
    verify = launches_of(lambda: body.verify(shape))
    draft = launches_of(lambda: body.draft(shape, 1, EVERYTHING))
    for launches, others in ((verify, 0), (draft, 1)):
        read = are_tiled(launches, *PRODUCTS, but="DOWN=True")
        assert len(read) > 5 and read == [False] * others + [True] * (len(read) - others - 1) + [False]
        # of the head's rows the last norm has those that are chosen
        written = are_tiled(launches, *writers, but="NORM=False")
        assert len(written) >= 2 and written == [True] * (len(written) - 1) + [False]
        assert set(are_tiled(launches, *mixers, but="")) == {True}
    inner = sum("TILED_OUT=True" in launch.constants.split() for launch in verify)
    assert inner == (3 if kind == "27B" else 0)


def test_buffers_are_counted_without_the_table_s_memory():
    body = Plan(3, 4, 600).rounds("demo").body
    before, whole = tensor_bytes(body.buffers), body.ops.bulk_scratch
    whole.reserve(whole.memory.numel() + (1 << 20))
    assert tensor_bytes(body.buffers) == before
    # rows that are tiled are views of what has been counted
    assert tensor_bytes(body.buffers.first(5)) == before


def arithmetic_of(launch: Launch) -> Counter[str]:
    """How many instructions of each kind that round the machine code has."""
    rounding = ("FADD", "FMUL", "FFMA", "MUFU", "HMMA", "DADD", "DMUL", "DFMA")
    return Counter(op for op in Code(launch.compiled).instructions if op.startswith(rounding))


@pytest.mark.parametrize(("shape", "kernels"), [(Shape(1, 3), 10), (Shape(2, 3), 11)], ids=["chosen", "routed"])
def test_dependent_launch_changes_no_arithmetic(shape, kernels):
    """Without it each kernel is another binary, which an audit compares with this one."""
    body = Plan(3, 4, 600).rounds("demo").body
    with_it = launches_of(lambda: body.verify(shape))
    body.ops.use_pdl(False)
    without = launches_of(lambda: body.verify(shape))
    # a kernel in one of its forms, which differ in constants
    pairs = {one.kernel: (one, other) for one, other in zip(with_it, without, strict=True)}
    assert len(pairs) >= kernels and all(one.hash != other.hash for one, other in pairs.values())
    for one, other in pairs.values():
        assert one.kernel == other.kernel and arithmetic_of(one) == arithmetic_of(other), one.kernel
        assert arithmetic_of(one)


def differences_of(*plans: Plan):
    found = Found()
    for plan in plans:
        add_plan(found, "demo", plan)
    return set(found.different)


def test_a_block_that_follows_k_is_found(monkeypatch):
    """As it was: rows of the gated norm's block, and with them the order of its sum over a head."""
    found = Found()
    for depth in (1, 8):
        monkeypatch.setattr(delta_net, "ROWS", triton.next_power_of_2(depth + 1))
        add_plan(found, "demo", Plan(depth, 1, 600))
    assert set(found.different) == {"delta_net._finish_kernel"}


def test_a_number_that_is_looked_at_is_found(monkeypatch):
    """Even where both plans' page tables have neither one nor sixteen pages."""
    plans = Plan(3, 1, 600), Plan(3, 1, 1200)
    assert not differences_of(*plans)
    param = next(param for param in attention_items.items_kernel.params if param.name == "max_pages")
    monkeypatch.setattr(param, "do_not_specialize", False)
    assert differences_of(*plans) == {"attention_items.items_kernel"}


def test_an_address_that_follows_the_batch_is_found(monkeypatch):
    def anywhere(sizes):
        return [40 * sizes.max_sequences, 8 * sizes.max_rows, 4 * sizes.max_rows]

    plans = Plan(3, 4, 600), Plan(3, 5, 600)
    assert not differences_of(*plans)
    monkeypatch.setattr(buffers, "_report_parts", anywhere)
    assert "norm._pair_norm_kernel" in differences_of(*plans)
