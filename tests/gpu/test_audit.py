"""On a GPU: packed weights stay packed, and speculation changes no token and no bit."""

import pytest
import torch

from pilotfish.engine.check.audit import _parse, audit, make_auditor
from pilotfish.engine.model.trunk import Trunk
from pilotfish.kernels.linear import QuantizedLinear
from tests.support.findings import assert_nothing_found
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return build_tiny(tmp_path_factory.mktemp("gpu") / "moe", "moe", nvfp4=True, dtype="bfloat16")


@pytest.fixture(scope="module", params=["auto", "fp8"])
def auditor(folder, request):
    args = ["--device", "cuda", "--max-depth", "4", "--num-prompts", "4", "--max-tokens", "16"]
    return make_auditor(_parse([str(folder), *args, "--kv-cache-dtype", request.param]))


def test_packed_weights_stay_packed(auditor):
    trunk: Trunk = auditor.model.trunk
    products = [trunk.layers[0].mixer.output, trunk.layers[3].mixer.qkvg, trunk.layers[0].mlp.shared.gate_up]
    assert all(isinstance(product, QuantizedLinear) for product in products)
    # 4 bits a weight and one e4m3 scale for 16 of them
    for product in products:
        weights = product.out_features * product.in_features
        assert product.num_bytes < 0.57 * weights + 64


@torch.inference_mode()
def test_tokens_and_bits_do_not_depend_on_k_or_batch(auditor):
    results = list(audit(auditor, [1, 3, 4], [1, 3]))
    assert_nothing_found(results)
    assert all(result.num_rows > 1000 for result in results)
