"""The loss of drafts against the trunk's own distribution, without ever holding all logits.

N = positions, k = depths, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

ROWS_AT_ONCE = 256
ARGMAX_SHARE = 0.5
"""Of a target distribution, what its first choice gets beyond its probability: greedy requests accept by it alone."""


class DraftLoss(torch.autograd.Function):
    """Cross entropies of k drafts at the same N positions, mean over those to be kept, fp32 [k]; and shares [k] of them
    where draft and target have the same first choice.

    drafts [k, N, H], any float; keep bool [k, N]; teacher [N, H] the trunk's hidden states whose distributions are the
    targets, or labels int64 [N]; lm_head [V, H]. Gradients reach the drafts alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafts: torch.Tensor,
        keep: torch.Tensor,
        teacher: torch.Tensor | None,
        labels: torch.Tensor | None,
        lm_head: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = keep.sum(1).clamp(min=1)
        losses, hits = (torch.zeros(len(drafts), device=drafts.device) for _ in range(2))
        grads = torch.zeros(drafts.shape, dtype=lm_head.dtype, device=drafts.device)
        for begin in range(0, drafts.shape[1], ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            target, best = _target(None if teacher is None else teacher[part], labels, part, lm_head)
            for depth, rows in enumerate(drafts[:, part]):
                logits = _logits(rows, lm_head)
                kept = keep[depth, part].float() / counts[depth]
                top, first = _first_choice(logits)
                hits[depth] += ((first == best) * kept).sum()
                # row by row products: no [n, V] of their own
                wanted = (target[:, None] @ logits[:, :, None])[:, 0, 0]
                wrong = logits.sub_(top[:, None]).exp_()
                total = wrong.sum(1)
                losses[depth] += ((top + total.log() - wanted) * kept).sum()
                wrong.mul_((kept / total)[:, None]).addcmul_(target, kept[:, None], value=-1)
                grads[depth, part] = wrong.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return outputs[0][:, None, None] * grads.float(), None, None, None, None


def _target(
    teacher: torch.Tensor | None, labels: torch.Tensor | None, part: slice, lm_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n, V] that sums to 1, and its first choice int64 [n]."""
    if teacher is None:
        assert labels is not None
        best = labels[part]
        return torch.zeros(len(best), len(lm_head), device=best.device).scatter_(1, best[:, None], 1.0), best
    logits = _logits(teacher, lm_head)
    _, best = _first_choice(logits)
    target = logits.softmax(1).mul_(1 - ARGMAX_SHARE)
    return target.scatter_add_(1, best[:, None], target.new_full((len(best), 1), ARGMAX_SHARE)), best


def _logits(rows: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    return (rows.to(lm_head.dtype) @ lm_head.T).float()


def _first_choice(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row [n], and its id, the lowest of equals."""
    top = logits.amax(1)
    if logits.is_cuda:
        return top, logits.argmax(1)
    # argmax goes element by element here, half as long as a product takes
    rows, ids = torch.where(logits == top[:, None])
    # NaN has no place; the caller sees it in the loss
    best = ids.new_full((len(logits),), logits.shape[1] - 1)
    return top, best.scatter_reduce_(0, rows, ids, "amin")
