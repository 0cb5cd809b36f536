"""On a GPU: packed weights stay packed, and speculation changes no token and no bit."""

import pytest
import torch

from pilotfish.engine.check.audit.command import make_auditor, parse
from pilotfish.engine.check.audit.run import audit
from pilotfish.engine.model.trunk import Trunk
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import GroupedExperts
from pilotfish.kernels.cuda.packing import TILE, UNIT, Format
from tests.support.findings import assert_nothing_found
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return build_tiny(tmp_path_factory.mktemp("gpu") / "moe", "moe", nvfp4=True, dtype="bfloat16")


RUNS = {"auto": ([1, 4], [1, 3]), "fp8": ([4], [3])}
"""Depths and batches by the cache's dtype. Each of them captures an engine's rounds, which is most of its time; all of
k = 1..8 and batches of up to 8 are `pilotfish audit`'s, legs of their own."""


@pytest.fixture(scope="module", params=list(RUNS))
def auditor(folder, request):
    args = ["--device", "cuda", "--max-depth", "4", "--num-prompts", "4", "--max-tokens", "16"]
    return make_auditor(parse([str(folder), *args, "--kv-cache-dtype", request.param]))


def test_packed_weights_stay_packed(auditor):
    """4 bits a weight and one e4m3 scale for 16 of them, in tiles of 16 rows and units of 128 columns."""
    trunk: Trunk = auditor.model.trunk
    for product in (trunk.layers[0].mixer.output, trunk.layers[3].mixer.qkvg):
        assert isinstance(product, PackedLinear)
        assert_packed(product.ranges, product.num_bytes)
    experts = trunk.layers[0].mlp.experts
    assert isinstance(experts, GroupedExperts)
    # the routed ones and the shared one, which has another width
    assert [group.num_experts for group in experts.groups] == [8, 1]
    assert_packed([part for group in experts.groups for part in (group.gate_up, group.down)], experts.num_bytes)


def assert_packed(parts, num_bytes):
    """Each tile has 12 bytes beside its weights: 0.006 of a byte a weight."""
    assert {part.format for part in parts} == {Format.NVFP4}
    assert num_bytes == sum(part.num_bytes for part in parts)
    assert num_bytes < 0.57 * sum(part.num_tiles * TILE * part.num_units * UNIT for part in parts)


@torch.inference_mode()
def test_tokens_and_bits_do_not_depend_on_k_or_batch(auditor, request):
    results = list(audit(auditor, *RUNS[request.node.callspec.params["auditor"]]))
    assert_nothing_found(results)
    assert all(result.num_rows > 1000 for result in results if result.name.endswith("drafts"))
