"""Fits a head to a frozen trunk: steps, held-out figures, and a state to go on from.

Muon moves the matrices, AdamW everything else. Which rows a step reads is a function of (seed, step) alone, so a run
that was interrupted ends with the same weights. B = rows a step, T = tokens of a row, k = depths, H = hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from pilotfish.draft_heads.training.hidden import HiddenStates
from pilotfish.draft_heads.training.loss import DraftLoss
from pilotfish.draft_heads.training.module import TrainableHead
from pilotfish.engine.convert.write import write_tensors, write_text
from pilotfish.engine.errors import OptionError

WARMUP_SHARE, DECAY_SHARE = 0.05, 0.6
BALANCE = 0.01
"""Weight of the experts' balancing loss."""
CLIP = 1.0
ADAM_RATE = 0.15
"""AdamW's share of the learning rate: norms and the router want smaller steps than Muon's orthogonal ones."""
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
ROUTERS = ("mlp.gate.weight", "shared_expert_gate.weight")
WRITTEN_TOGETHER = 256
"""At least so many rows: on a CPU fewer of them take longer each."""
STATE_FILE, STEP_FILE = "state.safetensors", "step.json"

Target = Literal["trunk", "text"]
"""What drafts are held against: the trunk's own distribution, or the text's tokens."""


@dataclass(frozen=True)
class FitOptions:
    """`batch_size` is in rows; the first `shallow_steps` train the first draft alone, which costs a third and teaches
    most of what deeper ones need. Everything that decides what weights come out."""

    steps: int
    batch_size: int
    learning_rate: float
    depths: int
    seed: int
    target: Target
    optimizer: Literal["muon", "adamw"]
    dtype: torch.dtype
    shallow_steps: int = 0


@dataclass(frozen=True)
class Figures:
    """Mean loss a depth, and share of positions where draft and target have the same first choice, per depth."""

    losses: tuple[float, ...]
    agreement: tuple[float, ...]

    def line(self) -> str:
        return "/".join(f"{share:.3f}" for share in self.agreement)


class Fit:
    """`embedding` and `lm_head`, both [V, H] in the products' dtype, are the trunk's and do not change."""

    def __init__(
        self,
        head: TrainableHead,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        train: HiddenStates,
        heldout: HiddenStates,
        options: FitOptions,
    ):
        self.head, self.embedding, self.lm_head = head, embedding, lm_head
        self.train, self.heldout, self.options = train, heldout, options
        self.step_number = 0
        self._optimizers = _optimizers(head, options)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self) -> Figures:
        """One step. Raises OptionError if the loss is no number any more."""
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self._factor()
        numbers, together = self._batch(self.step_number)
        depths = 1 if self.step_number < self.options.shallow_steps else self.options.depths
        losses, shares = self._forward(*self.train.take(numbers, together), depths)
        total = losses.sum() + BALANCE * self.head.balance()
        if not bool(total.isfinite()):
            raise OptionError(
                f"--learning-rate: the loss of step {self.step_number + 1} is {float(total.detach())}; want less"
            )
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        return Figures(tuple(losses.tolist()), tuple(shares.tolist()))

    @torch.no_grad()
    def evaluate(self, num_rows: int) -> Figures:
        """Figures of the first held-out rows."""
        numbers = list(range(min(num_rows, len(self.heldout))))
        rows = (self.heldout.take([number], numbers) for number in numbers)
        losses, shares = torch.stack([torch.stack(self._forward(*row, self.options.depths)) for row in rows]).mean(0)
        return Figures(tuple(losses.tolist()), tuple(shares.tolist()))

    def _forward(self, tokens: torch.Tensor, hidden: torch.Tensor, depths: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and agreement [k] of rows [B, T] and [B, T, H]. Drafts start at the first T - k positions."""
        starts = tokens.shape[1] - depths

        def embed_next(depth: int, _: torch.Tensor) -> torch.Tensor:
            return F.embedding(tokens[:, depth : depth + starts], self.embedding).float()

        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.options.dtype == torch.bfloat16):
            outputs = self.head.unroll(hidden[:, :starts].float(), depths, embed_next)
        # a draft of depth d that starts at i stands at position i + d, where the trunk chose the token it is meant for
        places = [(depth, depths - depth) for depth in range(1, depths + 1)]
        drafts = torch.stack([F.pad(out, (0, 0, *place)) for out, place in zip(outputs, places, strict=True)])
        kept = torch.ones(len(tokens), starts, dtype=torch.bool, device=tokens.device)
        keep = torch.stack([F.pad(kept, place) for place in places])
        is_text = self.options.target == "text"
        if is_text:
            keep[:, :, -1] = False  # what comes after the row is not known
        teacher = None if is_text else hidden.flatten(0, 1)
        text = F.pad(tokens[:, 1:], (0, 1)).flatten()
        losses, shares = DraftLoss.apply(drafts.flatten(1, 2), keep.flatten(1), teacher, text, self.lm_head)
        return losses, shares

    def _batch(self, step: int) -> tuple[list[int], list[int]]:
        """Rows of a step, in a new random order each epoch; and those of all steps whose rows are written together."""
        steps = -(-WRITTEN_TOGETHER // self.options.batch_size)
        return self._rows(step, 1), self._rows(step // steps * steps, steps)

    def _rows(self, step: int, count: int) -> list[int]:
        """Which rows `count` steps from this one take."""
        num_rows, size = len(self.train), self.options.batch_size
        wanted = range(step * size, (step + count) * size)
        orders = {epoch: self._order(epoch) for epoch in {number // num_rows for number in wanted}}
        return [int(orders[number // num_rows][number % num_rows]) for number in wanted]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.options.seed, epoch)).permutation(len(self.train))

    def _factor(self) -> float:
        """This step's share of the learning rate: up, level, and in a straight line down to zero."""
        done = (self.step_number + 1) / self.options.steps
        return min(1.0, done / WARMUP_SHARE, (1 - done + 1 / self.options.steps) / DECAY_SHARE)

    # -- the state --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """What `load` goes on from. The step's number is written last, with the name of the file it belongs to."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
        file = f"{self.step_number}-{STATE_FILE}"
        write_tensors(folder / file, tensors)
        write_text(folder / STEP_FILE, json.dumps({"step": self.step_number, "file": file}))
        for old in folder.glob(f"*-{STATE_FILE}"):
            if old.name != file:
                old.unlink()

    def load(self, folder: Path) -> None:
        """Goes on from what `save` left; a folder without a state is the beginning."""
        if not (folder / STEP_FILE).exists():
            return
        saved = json.loads((folder / STEP_FILE).read_text())
        tensors = load_file(folder / saved["file"])
        self.head.load_state_dict(
            {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}
        )
        for number, optimizer in enumerate(self._optimizers):
            states: dict[int, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                kind, which, *rest = name.split(".")
                if kind == "optimizer" and int(which) == number:
                    states.setdefault(int(rest[0]), {})[rest[1]] = tensor
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        self.step_number = saved["step"]


def _optimizers(head: TrainableHead, options: FitOptions) -> list[torch.optim.Optimizer]:
    named, rate = dict(head.named_parameters()), options.learning_rate
    if options.optimizer == "adamw":
        return [torch.optim.AdamW(named.values(), lr=rate, **ADAM)]
    matrices = [name for name, p in named.items() if p.dim() == 2 and not name.endswith(ROUTERS)]
    rest = [p for name, p in named.items() if name not in matrices]
    muon = torch.optim.Muon([named[name] for name in matrices], rate, 0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate * ADAM_RATE, **ADAM)]
