"""What runs far slower here than it could, and what would mend it: nobody should have to find that out by the clock."""

from __future__ import annotations

import os

import torch

DRIVER = "/proc/driver/nvidia/version"
"""A file that is there where NVIDIA's driver runs, whatever torch was built for."""


def slow_ways(device: torch.device, fused: bool, wanted: str) -> list[str]:
    """A sentence for each. `wanted` is the option that chose the device: none for a CPU that was asked for."""
    if device.type != "cuda":
        if wanted == "auto" and os.path.exists(DRIVER):
            return ["a GPU is here, and this build of torch cannot use it: install torch for CUDA, or say --device cpu"]
        return []
    if not fused:
        return ["rounds run by plain torch operators: fused kernels want bfloat16 on compute capability 8.0 or more"]
    # imports Triton
    from pilotfish.kernels.cuda.delta_prefill import is_installed

    if not is_installed():
        return ["prompts run through GatedDeltaNet by plain torch: fla-core is missing, pip install 'pilotfish[gpu]'"]
    return []
