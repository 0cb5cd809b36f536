"""GatedDeltaNet: the gated delta rule, one token at a time, and its chunk form for prefill.

One token, per value head, state S [dk, dv] in fp32 (Yang et al. 2024, arXiv:2412.06464):
    S <- decay * S;   d = beta * (v - S^T k);   S <- S + k d^T;   o = S^T q
`delta_step` is the only place where a decoded token changes the state: replay and window both call it, so a state
reached by replaying accepted rows has the bits it had inside the window.
N = leading axes (layers x sequences), T = tokens, Hv = value heads.
"""

from __future__ import annotations

import torch

CHUNK = 64
MOST_PENDING = 8
"""Rows of a sequence that may be pending side by side where kernels replay them."""
SHARED_PENDING = 8
"""Sequences up to which windows of several rows are left pending beside others."""


def most_pending(width: int, num_sequences: int) -> int:
    """Rows, accepted ones and a window's, up to which they stay pending and the state is not stored; no bit follows
    from it. A store spared is worth replaying a few rows again, on a GPU: of single rows so many as are convolved at
    once, so that the state is stored in every fourth round; of windows of several rows two of them, while batches are
    small (docs/measurements.md)."""
    if width == 1:
        return 4
    return MOST_PENDING if num_sequences <= SHARED_PENDING else 0


def delta_step(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """The state after one token. fp32: state [..., dk, dv], k [..., dk, 1], v [..., 1, dv], beta, decay [..., 1, 1]."""
    state = state * decay
    delta = (v - (state * k).sum(-2, keepdim=True)) * beta
    return torch.addcmul(state, k, delta)


def delta_read(state: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """o = S^T q, fp32 [..., dv]; q [..., dk, 1]."""
    return (state * q).sum(-2)


def _tokens(axis: int, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor):
    """The operands of `delta_step`, token by token along `axis`."""
    columns = (k.unsqueeze(-1), v.unsqueeze(-2), beta[..., None, None], decay[..., None, None])
    return zip(*(operand.unbind(axis) for operand in columns), strict=True)


def delta_window(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Outputs [B, W, Hv, dv] of a window that starts from `state` [B, Hv, dk, dv], which stays as it is.

    q, k [B, W, Hv, dk], v [B, W, Hv, dv], beta, decay [B, W, Hv]; q is already scaled.
    """
    outputs = []
    for query, token in zip(q.unsqueeze(-1).unbind(1), _tokens(1, k, v, beta, decay), strict=True):
        state = delta_step(state, *token)
        outputs.append(delta_read(state, query))
    return torch.stack(outputs, dim=1)


def delta_replay(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """The state [L, B, Hv, dk, dv] after the first counts[b] pending rows of every sequence b.

    k [L, B, W, Hv, dk] and so on, W the largest count; rows past a sequence's count are not read into its state,
    whatever they hold.
    """
    fewest = min(counts)
    for row, token in enumerate(_tokens(2, k, v, beta, decay)):
        after = delta_step(state, *token)
        if row < fewest:
            state = after
        else:
            live = torch.tensor([row < count for count in counts], device=state.device)
            state = torch.where(live[None, :, None, None, None], after, state)
    return state


def delta_prefill(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, Hv, dv] and the state [Hv, dk, dv] after T tokens of one sequence, by chunks of 64.

    q, k [T, Hv, dk], v [T, Hv, dv], beta and log_decay [T, Hv]; fp32. Differs from `delta_step` by rounding only.
    """
    outputs = []
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        output, state = _delta_chunk(state, *(t[part].transpose(0, 1) for t in (q, k, v, beta, log_decay)))
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _delta_chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, heads first. With c the running sum of log_decay and G[t, s] = exp(c_t - c_s) for s <= t:

    A = strictly_lower(beta * (K K^T) G),  D = (I + A)^-1 (beta * (V - exp(c) * K S)),
    O = exp(c) * Q S + lower((Q K^T) G) D,  S' = exp(c_T) S + (exp(c_T - c) * K)^T D.
    """
    total = log_decay.cumsum(-1)
    # exponent of the difference, never a quotient of exponents: exp(-c) overflows
    gap = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    coupling = ((k @ k.mT) * gap * beta[..., None]).tril(-1)
    grown = total.exp()[..., None]
    target = beta[..., None] * (v - grown * (k @ state))
    delta = torch.linalg.solve_triangular(coupling, target, upper=False, unitriangular=True)
    output = grown * (q @ state) + ((q @ k.mT) * gap) @ delta
    left = (total[:, -1:] - total).exp()[..., None]
    return output, total[:, -1].exp()[:, None, None] * state + (left * k).mT @ delta
