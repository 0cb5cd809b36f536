"""Accept and commit: how much of a window becomes text. Everything stays on the device.

B = sequences, K = drafted tokens, W = K + 1 window rows. The rule is agreement: a draft is accepted iff it equals the
token the trunk itself chooses at that position (Leviathan et al. 2023, arXiv:2211.17192, with a shared random source).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Verdict:
    """int64 [B] each: drafts accepted, and tokens committed (accepted + 1, fewer at a stop or the limit; 0 if done
    before). `stopped` and `done` bool [B]: the last committed token is a stop id; nothing more will be committed."""

    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    stopped: torch.Tensor
    done: torch.Tensor


def accept(
    chosen_BW: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_offered_B: torch.Tensor,
    stop_ids_BS: torch.Tensor,
    remaining_B: torch.Tensor,
    done_B: torch.Tensor,
) -> Verdict:
    """chosen: the trunk's token of every row. Drafts at or past num_offered[b] cannot match.

    stop_ids pad with -1; remaining: tokens the sequence may still commit, >= 1 unless done.
    """
    width = chosen_BW.shape[1]
    columns = torch.arange(width, device=chosen_BW.device)
    offered = columns[: width - 1] < num_offered_B[:, None]
    matches = (chosen_BW[:, : width - 1] == drafts_BK) & offered
    num_accepted = matches.long().cumprod(1).sum(1)
    is_stop = (chosen_BW[:, :, None] == stop_ids_BS[:, None, :]).any(-1)
    # tokens up to and with the first stop; a row without a stop id counts them all
    until_stop = (is_stop.long().cumsum(1) - is_stop.long() == 0).sum(1)
    num_committed = torch.minimum(torch.minimum(num_accepted + 1, until_stop), remaining_B)
    num_committed = torch.where(done_B, 0, num_committed)
    last = (num_committed - 1).clamp_(min=0)
    stopped = is_stop.gather(1, last[:, None])[:, 0] & (num_committed > 0)
    done = done_B | stopped | (num_committed == remaining_B)
    return Verdict(num_accepted, num_committed, stopped, done)
