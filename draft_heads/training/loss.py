"""The loss of drafts against the trunk's own distribution, without ever holding all logits.

N = positions, n = some of them, k = depths, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

ROWS_AT_ONCE = 256
ARGMAX_SHARE = 0.5
"""What a target's first choice gets beyond its probability: greedy requests accept by it alone."""
LEAST_REACH = 0.05
"""What is reached more seldom is left out: it would cost as much as the rest."""


class DraftLoss(torch.autograd.Function):
    """Cross entropies fp32 [k] of k drafts at the same N positions, and shares [k] of them where draft and target have
    the same first choice.

    A draft counts only if all before it were right, so each is weighed by its reach: the chance that those before it,
    by their own probabilities, were the text's tokens. A loss is the sum over drafts that are kept, weighed, over their
    number; a share is of the weights.

    drafts [k, N, H], any float, where draft d + 1 at position n + 1 follows draft d at n; keep bool [k, N]; teacher
    [N, H] the trunk's hidden states whose distributions are the targets, or None where the text is; text int64 [N] the
    token behind each position; lm_head [V, H]. Gradients reach the drafts alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafts: torch.Tensor,
        keep: torch.Tensor,
        teacher: torch.Tensor | None,
        text: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        depths, num_rows, _ = drafts.shape
        counts = keep.sum(1).clamp(min=1)
        losses, hits = (torch.zeros(depths, device=drafts.device) for _ in range(2))
        grads = torch.zeros(drafts.shape, dtype=lm_head.dtype, device=drafts.device)
        # a column more, for what would follow the last position
        reach = torch.zeros(depths + 1, num_rows + 1, device=drafts.device)
        reach[0] = 1
        for begin in range(0, num_rows, ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            target, best = _target(None if teacher is None else teacher[part], text[part], lm_head)
            for depth in range(depths):
                reach[depth, :-1][part] *= keep[depth, part]
                (some,) = torch.where(reach[depth, :-1][part])
                rows = begin + some
                weight, wanted = reach[depth, rows], target[some]
                logits = _logits(drafts[depth, rows], lm_head)
                top, first = logits.max(1)
                hits[depth] += ((first == best[some]) * weight).sum()
                # row by row products: no [n, V] of their own
                likely = (wanted[:, None] @ logits[:, :, None])[:, 0, 0]
                wrong = logits.sub_(top[:, None]).exp_()
                total = wrong.sum(1)
                after = weight * wrong.gather(1, text[rows, None])[:, 0] / total
                reach[depth + 1, rows + 1] = F.threshold(after, LEAST_REACH, 0.0)
                weight = weight / counts[depth]
                losses[depth] += ((top + total.log() - likely) * weight).sum()
                wrong.mul_((weight / total)[:, None]).addcmul_(wanted, weight[:, None], value=-1)
                grads[depth, rows] = wrong.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(grads)
        shares = hits / reach[:-1, :-1].sum(1).clamp(min=LEAST_REACH)
        ctx.mark_non_differentiable(shares)
        return losses, shares

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return outputs[0][:, None, None] * grads.float(), None, None, None, None


def _target(
    teacher: torch.Tensor | None, text: torch.Tensor, lm_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n, V] that sums to 1, and its first choice int64 [n]."""
    if teacher is None:
        return torch.zeros(len(text), len(lm_head), device=text.device).scatter_(1, text[:, None], 1.0), text
    logits = _logits(teacher, lm_head)
    best = logits.argmax(1)
    target = logits.softmax(1).mul_(1 - ARGMAX_SHARE)
    return target.scatter_add_(1, best[:, None], target.new_full((len(best), 1), ARGMAX_SHARE)), best


def _logits(rows: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    return (rows.to(lm_head.dtype) @ lm_head.T).float()
