"""What is slow for want of a package is told; what was asked for is not."""

import pytest
import torch

from pilotfish.engine import slow
from pilotfish.kernels.cuda import delta_prefill

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets what the machine has."""

    def has(driver=False, fla=True):
        path = tmp_path / "version"
        path.write_text("") if driver else path.unlink(missing_ok=True)
        monkeypatch.setattr(slow, "DRIVER", str(path))
        monkeypatch.setattr(delta_prefill, "is_installed", lambda: fla)

    return has


@pytest.mark.parametrize(
    ("has", "device", "fused", "wanted", "told"),
    [
        ({}, CPU, False, "auto", None),
        ({"driver": True}, CPU, False, "auto", "this build of torch cannot use it"),
        ({"driver": True}, CPU, False, "cpu", None),
        ({"driver": True}, GPU, True, "auto", None),
        ({"driver": True, "fla": False}, GPU, True, "auto", "fla-core is missing"),
        ({"driver": True, "fla": False}, GPU, False, "cuda", "plain torch operators"),
    ],
)
def test_slow_ways(machine, has, device, fused, wanted, told):
    machine(**has)
    found = slow.slow_ways(device, fused, wanted)
    assert (told in found[0] and len(found) == 1) if told else found == []
