"""GatedDeltaNet over a prompt on a GPU: the chunked rule by fla-core (the `gpu` extra), between two launches of ours.

What differs from prompt to prompt of as many rows, the slot and how many rows are padding, is read on the device: so
what is launched can be captured. The rule is called below fla-core's public function, and its kernels below their
tuners: both do for every layer of every prompt what is decided once.

fla-core times several tilings of each of its kernels at first use and keeps the fastest. Which one wins may change from
start to start, and with it the order of sums and the bits of a prompt's state. Here each kernel has one tiling, the
middle of its list: the bits are a function of the prompt and the machine's kind, and nothing is timed while requests
wait. Products in bf16, sums and the carried state in fp32.
T = prompt rows, S = slots, C = convolution channels (q | k | v), J = taps, Hk / Hv = key / value heads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Heuristics

from pilotfish.kernels.cuda.delta_net import _silu

ROWS = 64
"""Prompt rows of a program."""
STATE_BLOCK = 4096
"""Numbers of a state that one program copies."""
_HISTORY = tl.constexpr(3)


@cache
def is_installed() -> bool:
    """Whether fla-core is."""
    return find_spec("fla") is not None


@triton.jit
def _source(t, history, projected, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the inputs of row t are; those before the span are in the history."""
    return tl.where(t < 0, history + (t + _HISTORY) * C, projected + t * COLUMNS)


@triton.jit
def _mixed(rows, columns, weight, C: tl.constexpr, mask):
    """silu(conv) of channels: `rows` are the pointers of the inputs, oldest first."""
    x = tl.load(rows[0] + columns, mask, other=0.0).to(tl.float32) * tl.load(weight + columns)
    x = tl.fma(tl.load(rows[1] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + C + columns), x)
    x = tl.fma(tl.load(rows[2] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + 2 * C + columns), x)
    x = tl.fma(tl.load(rows[3] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + 3 * C + columns), x)
    return _silu(x)


@triton.jit
def _state_kernel(states, numbers, state, SIZE: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr):
    """The slot's state to `state`, or back."""
    own = states + tl.load(numbers).to(tl.int64) * SIZE
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BACK:
        tl.store(own + i, tl.load(state + i, i < SIZE, other=0.0), i < SIZE)
    else:
        tl.store(state + i, tl.load(own + i, i < SIZE, other=0.0), i < SIZE)


@triton.jit(do_not_specialize=["T"])
def _mix_kernel(
    projected,
    histories,
    numbers,
    conv_weight,
    decay_rate,
    dt_bias,
    q_out,
    k_out,
    v_out,
    beta_out,
    log_decay_out,
    T,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of q, k or v over ROWS rows: convolution, then the norm, or the gates of a value head. Rows of padding
    are zeros, with beta 0 and log decay 0: they change no state."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    COLUMNS: tl.constexpr = C + HV * DV + 2 * HV
    PARTS: tl.constexpr = 2 * HK + HV
    part = tl.program_id(0) % PARTS
    history = histories + tl.load(numbers).to(tl.int64) * (_HISTORY * C)
    t = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    there = t < tl.load(numbers + 1)
    rows = t.to(tl.int64)
    inputs = (
        _source(rows - 3, history, projected, C, COLUMNS),
        _source(rows - 2, history, projected, C, COLUMNS),
        _source(rows - 1, history, projected, C, COLUMNS),
        projected + rows * COLUMNS,
    )
    if part < 2 * HK:
        d = t * 0 + tl.arange(0, DK)[None, :]
        x = _mixed(inputs, part * DK + d, conv_weight, C, there)
        x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)
        if part < HK:
            x = x * DK**-0.5
            tl.store(q_out + rows * (HK * DK) + part * DK + d, x.to(q_out.dtype.element_ty), t < T)
        else:
            tl.store(k_out + rows * (HK * DK) + (part - HK) * DK + d, x.to(k_out.dtype.element_ty), t < T)
    else:
        head = part - 2 * HK
        e = t * 0 + tl.arange(0, DV)[None, :]
        v = _mixed(inputs, 2 * HK * DK + head * DV + e, conv_weight, C, there)
        tl.store(v_out + rows * (HV * DV) + head * DV + e, v.to(v_out.dtype.element_ty), t < T)
        gates = projected + rows * COLUMNS + C + HV * DV + head
        b = tl.load(gates, there, other=0.0).to(tl.float32)
        a = tl.load(gates + HV, there, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        tl.store(beta_out + rows * HV + head, tl.where(there, 1.0 / (1.0 + tl.exp(-b)), 0.0), t < T)
        decay = tl.where(there, tl.load(decay_rate + head) * softplus, 0.0)
        tl.store(log_decay_out + rows * HV + head, decay, t < T)


@triton.jit
def _newest(row, T, columns, mask, projected, history, C: tl.constexpr, COLUMNS: tl.constexpr):
    """Inputs of row T - 3 + `row`, of T rows that are no padding, for the history."""
    t = (T - _HISTORY + row).to(tl.int64)
    return tl.load(_source(t, history, projected, C, COLUMNS) + columns, mask, other=0.0)


@triton.jit(do_not_specialize=["T"])
def _gate_kernel(
    projected,
    read,
    gate_norm,
    histories,
    numbers,
    out,
    eps,
    T,
    C: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """The gated norm of one head over ROWS rows; those of the first rows share the channels of the new history."""
    head = tl.program_id(0) % HV
    length = tl.load(numbers + 1)
    if tl.program_id(0) < HV:
        history = histories + tl.load(numbers).to(tl.int64) * (_HISTORY * C)
        columns = head * SHARE + tl.arange(0, SHARE)
        mask = columns < C
        # a thread has its channels in all rows: what it writes no other reads
        first = _newest(0, length, columns, mask, projected, history, C, C + HV * DV + 2 * HV)
        second = _newest(1, length, columns, mask, projected, history, C, C + HV * DV + 2 * HV)
        third = _newest(2, length, columns, mask, projected, history, C, C + HV * DV + 2 * HV)
        tl.store(history + columns, first, mask)
        tl.store(history + C + columns, second, mask)
        tl.store(history + 2 * C + columns, third, mask)
    t = (tl.program_id(0) // HV * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    d = tl.arange(0, DV)[None, :]
    cells = t * (HV * DV) + head * DV + d
    o = tl.load(read + cells, t < length, other=0.0).to(tl.float32)
    z = tl.load(projected + t * (C + HV * DV + 2 * HV) + C + head * DV + d, t < length, other=0.0).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / DV + eps) * tl.load(gate_norm + d)
    tl.store(out + cells, (o * _silu(z)).to(out.dtype.element_ty), t < T)


Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def gdn_prompt(
    projected: torch.Tensor,
    states: torch.Tensor,
    histories: torch.Tensor,
    numbers: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_norm: torch.Tensor,
    eps: float,
    rule: Rule | None = None,
) -> torch.Tensor:
    """A linear layer's mixer between its two products for T rows of one sequence: [T, Hv dv]; the state and history of
    its slot become those after them.

    projected  bf16 [T, C + Hv dv + 2 Hv] (u | z | b | a)
    states     fp32 [S, Hv, dk, dv]; histories bf16 [S, J-1, C]; contiguous
    numbers    int32 [2], on the device: the slot, and the rows that there are, at least 1; those past them are padding,
               and what comes of them is 0
    Weights as for kernels.cuda.delta_net.gdn_window. `rule`: in the place of fla-core's chunk_gated_delta_rule.
    """
    _, heads, dk, dv = states.shape
    channels, num_rows = histories.shape[2], len(projected)
    key_heads = (channels - heads * dv) // (2 * dk)
    projected = projected.contiguous()
    assert states.is_contiguous() and histories.is_contiguous() and conv_weight.is_contiguous()
    assert projected.shape[1] == channels + heads * dv + 2 * heads
    assert histories.shape[1] == 3 and len(conv_weight) == 4 and numbers.dtype == torch.int32

    def buffer(*shape: int, dtype: torch.dtype = projected.dtype) -> torch.Tensor:
        return torch.empty((1, num_rows, *shape), dtype=dtype, device=projected.device)

    q, k, v = buffer(key_heads, dk), buffer(key_heads, dk), buffer(heads, dv)
    beta, log_decay = (buffer(heads, dtype=torch.float32) for _ in range(2))
    blocks = -(-num_rows // ROWS)
    _mix_kernel[(blocks * (2 * key_heads + heads),)](
        projected, histories, numbers, conv_weight, decay_rate, dt_bias, q, k, v, beta, log_decay, num_rows,
        HK=key_heads, HV=heads, DK=dk, DV=dv, ROWS=ROWS, num_warps=8,
    )  # fmt: skip
    before = torch.empty((1, heads, dk, dv), dtype=states.dtype, device=states.device)
    size = heads * dk * dv
    grid = (-(-size // STATE_BLOCK),)
    _state_kernel[grid](states, numbers, before, SIZE=size, BLOCK=STATE_BLOCK, BACK=False)
    read, after = (rule or _chunked())(
        q, k, v, log_decay, beta, scale=1.0, initial_state=before, output_final_state=True
    )
    _state_kernel[grid](states, numbers, after, SIZE=size, BLOCK=STATE_BLOCK, BACK=True)
    out = torch.empty((num_rows, heads * dv), dtype=projected.dtype, device=projected.device)
    _gate_kernel[(blocks * heads,)](
        projected, read.contiguous(), gate_norm, histories, numbers, out, eps, num_rows, C=channels, HV=heads, DV=dv,
        ROWS=ROWS, SHARE=1 << (-(-channels // heads) - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return out


@cache
def _chunked() -> Rule:
    # other libraries' versions of an operator, where they are installed, are other bits
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    forward = import_module("fla.ops.gated_delta_rule.chunk").chunk_gated_delta_rule_fwd
    pinned: dict[int, Pinned] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, (Autotuner, Heuristics)):
                setattr(module, name, pinned.setdefault(id(value), Pinned(value)))

    def rule(*operands: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, read, _, after, *_ = forward(*operands, **options)
        return read, after

    return rule


class Pinned:
    """A tuned kernel in one of its configurations, without what its tuner does at every launch."""

    def __init__(self, kernel: Any):
        self.rules: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.options: dict[str, Any] = {}
        self.has_hook = False
        while isinstance(kernel, (Autotuner, Heuristics)):
            if isinstance(kernel, Heuristics):
                self.rules |= kernel.values
            else:
                config = kernel.configs[len(kernel.configs) // 2]
                self.has_hook |= config.pre_hook is not None
                self.options |= config.all_kwargs()
            kernel = kernel.fn
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        # none of ours; of other operators' kernels, which are pinned too, some may have one
        assert not self.has_hook, self.kernel

        def launch(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            for name, rule in self.rules.items():
                given[name] = rule(given)
            return self.kernel[grid](**given, **self.options)

        return launch
