"""NVFP4 as the demo model ships it: blocks of 16 values, e2m1 codes, e4m3 block scales, one power of two a matrix.

w = e2m1 * weight_scale / weight_global_scale. With a power of two as the global scale every dequantised value is exact
in bf16, so the weights that training sees are the weights that ship.
"""

import torch

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
QUANTISED = (
    *("experts.gate_up_proj", "experts.down_proj", "gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    *("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"),
)


def is_quantised(name: str) -> bool:
    """Whether this parameter (in training's fused names) ships as NVFP4."""
    return name.endswith(QUANTISED)


def matrices(w: torch.Tensor, name: str) -> torch.Tensor:
    """The matrices that are quantised on their own, as (n, rows, columns): fused experts hold gate above up."""
    rows = w.shape[-2] // 2 if name.endswith("gate_up_proj") else w.shape[-2]
    return w.reshape(-1, rows, w.shape[-1])


def quantise(w: torch.Tensor):
    """fp32 matrices (n, rows, columns) to codes 0..15, block scales as fp32 and global scales (n, 1, 1)."""
    levels, bounds = LEVELS.to(w.device), BOUNDS.to(w.device)
    peak = w.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12)
    glob = torch.exp2(torch.floor(torch.log2(448 * 6 / peak)))
    blocks = w.view(*w.shape[:-1], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 * glob).clamp(max=448).to(torch.float8_e4m3fn).float()
    divided = blocks * torch.where(scale > 0, glob / scale, 0)[..., None]
    index = torch.bucketize(divided.abs(), bounds)
    codes = index + 8 * (divided < 0)
    values = (levels[index] * divided.sign() * (scale / glob)[..., None]).view_as(w)
    return codes.view_as(w), scale, glob, values


def round_trip(w: torch.Tensor, name: str) -> torch.Tensor:
    """The values that the quantised copy of w stands for."""
    return quantise(matrices(w, name))[3].view_as(w)
