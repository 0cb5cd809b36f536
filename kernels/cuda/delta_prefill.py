"""GatedDeltaNet over a prompt by fla-core's chunked kernels (the `gpu` extra), with their choices pinned.

fla-core times several tilings of each kernel at first use and keeps the fastest. Which one wins may change from start
to start, and with it the order of sums and the bits of a prompt's state. Here each kernel has one tiling, the middle of
its list: the bits are a function of the prompt and the machine's kind, and nothing is timed while requests wait.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def is_installed() -> bool:
    return find_spec("fla") is not None


def delta_prefill(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.delta_net.delta_prefill. Products in bf16, sums and the carried state in fp32."""
    q, k, v = (part[None].to(torch.bfloat16) for part in (q, k, v))
    output, after = _chunked()(
        q, k, v, log_decay[None], beta[None], scale=1.0, initial_state=state[None], output_final_state=True
    )
    return output[0].float(), after[0]


@cache
def _chunked() -> Any:
    chunked = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in vars(module).values():
                pin(value)
    return chunked


def pin(kernel: Any) -> None:
    """Leaves a tuned kernel one of its configurations; decorators may lie around the tuner."""
    while hasattr(kernel, "fn"):
        if isinstance(getattr(kernel, "configs", None), list):
            kernel.configs = [kernel.configs[len(kernel.configs) // 2]]
        kernel = kernel.fn
