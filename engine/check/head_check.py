"""A known text run through trunk and head at load: a head that is dead is found before it is served.

A draft head that was damaged on its way (norms shifted twice or not at all, halves of its input swapped, weights of
another model) costs no correctness: every draft is refused and the server is merely slow. So it is asked here how it
ranks the tokens of a text that the trunk can tell, and if it cannot, which known fault, undone, revives it.
T = tokens of the text, H = hidden, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.check.teacher_forcing import TextReader, logits
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.link.messages import HeadCheck
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.trunk import Layer, Norm
from pilotfish.engine.round.prompt import read_text
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import TILE_ROWS

TEXT = """The harbour lies at the mouth of the river, where the water is deep enough for large ships. In the morning the
fishermen bring in the boats, and the women of the town come down to the quay to buy fish. There are two roads from the
harbour to the market: the first goes along the river, and the second goes up the hill and past the church.

def add(a, b):
    \"\"\"Return the sum of a and b.\"\"\"
    return a + b


def subtract(a, b):
    \"\"\"Return the difference of a and b.\"\"\"
    return a - b


for i in range(10):
    print(add(i, 1), subtract(i, 1))

One, two, three, four, five, six, seven, eight, nine, ten. Monday, Tuesday, Wednesday, Thursday, Friday, Saturday.
"""
MIN_POSITIONS = 32
NO_TEXT = "no text to test with: no tokenizer.json, or too short a context"
TRUNK_MUST_KNOW = 0.15
"""Share of the text's tokens that the trunk must rank first, or the text tells nothing about a head."""
LATER_MUST_KNOW = 0.4
"""The same for drafts after the first, whose places are few: a head half as good as the trunk is then right at one of
them but for one time in two hundred."""
DEAD_BELOW, WEAK_BELOW = 0.25, 0.6
"""Shares of the trunk's own share; sound heads reach 0.7 and more."""
NUM_STARTS = 24
"""Places from which the drafts after the first are tried, one by one."""

REVIVAL = 1.25
"""How much better a head must be without a fault for that fault to be named."""
SHIFTS = {
    -1.0: "its norms hold 1 + w in a file whose norms should hold w (shifted twice)",
    1.0: "its norms hold w in a file whose norms should hold 1 + w (not shifted)",
}
"""What is added to every norm, and the fault that it undoes."""
DEFAULTS = {
    "dead": "likely cause: its weights are random or of another model; no known fault, undone, revives it",
    "weak": "likely cause: a head of another fine-tune, or one that was quantised too far",
}


def text_of(folder: Path, vocab_size: int, num_tokens: int) -> list[int]:
    """Ids of the text in the checkpoint's tokenizer, [] without one or with ids that the model lacks."""
    if not (folder / "tokenizer.json").is_file():
        return []
    ids: list[int] = read_tokenizer(folder).encode(TEXT, add_special_tokens=False).ids[:num_tokens]
    return ids if all(i < vocab_size for i in ids) else []


def longest_text(max_model_len: int, depth: int) -> int:
    """Tokens that one page holds with the drafts after them."""
    return min(PAGE, max_model_len) - depth - 1


@torch.inference_mode()
def check_head(model: Model, ids: list[int], depth: int) -> HeadCheck:
    """Ranks of the text's tokens under the head for drafts 1 .. depth, and a verdict; writes to slot 1 and page 1."""
    head = model.head
    if not isinstance(head, MtpHead):
        return HeadCheck(verdict="untested", reason="the head has no weights")
    if len(ids) < MIN_POSITIONS + depth + 1:
        return HeadCheck(verdict="untested", reason=NO_TEXT)
    tokens = torch.tensor(ids, device=model.device)
    reader = TextReader(model)
    hidden = read_text(model, tokens)
    trunk_ranks = _ranks(model, hidden[1:-1], tokens[2:])
    rows = reader.head_rows(tokens, hidden)
    ranks = [_ranks(model, rows, tokens[2:]), *_later_ranks(reader, tokens, rows, depth)]
    trunk, shares = _share(trunk_ranks), tuple(map(_share, ranks))
    verdict, reason = _judge(trunk, shares)
    if verdict in ("dead", "weak") and not reason:
        wanted = max(WEAK_BELOW * trunk, REVIVAL * shares[0])
        reason = _likely_cause(model, head, tokens, hidden, wanted) or DEFAULTS[verdict]
    return HeadCheck(
        verdict=verdict,
        reason=reason,
        num_positions=len(trunk_ranks),
        trunk_top1=trunk,
        head_top1=shares,
        head_median_rank=tuple(int(r.median()) for r in ranks),
    )


@torch.inference_mode()
def trunk_share(model: Model, ids: list[int]) -> tuple[int, float]:
    """Places of the text, and the share of them whose token the trunk ranks first; writes to slot 1 and page 1."""
    tokens = torch.tensor(ids, device=model.device)
    ranks = _ranks(model, read_text(model, tokens)[1:-1], tokens[2:])
    return len(ranks), _share(ranks)


def describe(check: HeadCheck, vocab_size: int) -> str:
    """One line for the log and for a refusal."""
    if check.verdict == "untested" and not check.num_positions:
        return f"the draft head was not tested: {check.reason}"
    shares = ", ".join(
        f"draft {k}: {share:.0%}, median rank {rank}"
        for k, (share, rank) in enumerate(zip(check.head_top1, check.head_median_rank, strict=True), 1)
    )
    trunk = f"of {check.num_positions} tokens of a known text the trunk ranks {check.trunk_top1:.0%} first"
    verdict = {"ok": "", "weak": "; the head is weak", "dead": "; the head is dead", "untested": "; no verdict"}
    reason = f": {check.reason}" if check.reason else ""
    return f"{trunk}, the head: {shares} of {vocab_size}{verdict[check.verdict]}{reason}"


def _judge(trunk: float, shares: tuple[float, ...]) -> tuple[Literal["ok", "weak", "dead", "untested"], str]:
    """By draft 1. Later ones have few places: they count where not one is right, and the trunk knows enough of the text
    for that to tell."""
    if trunk < TRUNK_MUST_KNOW:
        return "untested", "the trunk itself does not know the text"
    if shares[0] < DEAD_BELOW * trunk:
        return "dead", ""
    if shares[0] < WEAK_BELOW * trunk:
        return "weak", ""
    lost = next((draft for draft in range(2, len(shares) + 1) if not any(shares[draft - 1 :])), None)
    if lost is not None and trunk >= LATER_MUST_KNOW:
        why = "likely cause: it was not made to go on from its own hidden state, or its attention is damaged"
        return (
            "weak",
            f"from draft {lost} on it is never right; {why}. --num-speculative-tokens {lost - 1} loses nothing",
        )
    return "ok", ""


def _later_ranks(reader: TextReader, tokens: torch.Tensor, rows: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    """Ranks of drafts 2 .. depth, each from the head's own hidden and the text's token before."""
    most = len(rows) - depth + 1
    starts = sorted({int(i * most / NUM_STARTS) for i in range(NUM_STARTS)}, reverse=True)
    found: list[list[torch.Tensor]] = [[] for _ in range(depth - 1)]
    for start in starts:
        for step, hidden in enumerate(reader.later_rows(tokens, rows, start, depth), 1):
            position = start + step
            found[step - 1].append(_ranks(reader.model, hidden, tokens[position + 2 : position + 3]))
    yield from (torch.cat(ranks) for ranks in found)


def _ranks(model: Model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """int64 [n]: how many tokens the model does not rank below each target; ties and NaN count against it."""
    ranks = []
    for part, wanted in zip(logits(model, hidden), targets.split(TILE_ROWS), strict=True):
        below = part < part.gather(1, wanted[:, None])
        ranks.append(part.shape[1] - 1 - below.sum(1))
    return torch.cat(ranks)


def _share(ranks: torch.Tensor) -> float:
    return float((ranks == 0).float().mean())


# What is wrong with a dead head.


class _Swapped(MtpHead):
    """The head with the halves of its input the other way round."""

    def pair(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return super().pair(hidden, embedded)


def _likely_cause(model: Model, head: MtpHead, tokens: torch.Tensor, hidden: torch.Tensor, wanted: float) -> str | None:
    """The known fault whose undoing serves the head best, if it brings it to the wanted share."""
    best, most = None, 0.0
    for cause, undone in _remedies(head):
        rows = TextReader(model, undone).head_rows(tokens, hidden)
        share = _share(_ranks(model, rows, tokens[2:]))
        # of equals the first: the faults are in the order of how often they are met
        if share >= wanted and share > most:
            best, most = f"likely cause: {cause}; without that draft 1 is right {share:.0%} of the time", share
    return best


def _remedies(head: MtpHead) -> Iterator[tuple[str, MtpHead]]:
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    yield from ((cause, _shifted(head, by)) for by, cause in SHIFTS.items())
    for which, shifted in (("pre_fc", _shifted_inputs), ("layer's", _shifted_layer)):
        yield f"its {which} norms alone hold 1 + w (shifted twice)", shifted(head, -1.0)
        yield f"its {which} norms alone hold w (not shifted)", shifted(head, 1.0)
    yield "its fc expects [hidden, embedding], not [embedding, hidden]", _Swapped(**fields)


def _shifted(head: MtpHead, by: float) -> MtpHead:
    return dataclasses.replace(_shifted_layer(_shifted_inputs(head, by), by), norm=shifted_norm(head.norm, by))


def _shifted_inputs(head: MtpHead, by: float) -> MtpHead:
    norms = shifted_norm(head.embedding_norm, by), shifted_norm(head.hidden_norm, by)
    return dataclasses.replace(head, embedding_norm=norms[0], hidden_norm=norms[1])


def _shifted_layer(head: MtpHead, by: float) -> MtpHead:
    return dataclasses.replace(head, layer=shifted_layer(head.layer, by))


def shifted_norm(norm: Norm, by: float) -> Norm:
    return dataclasses.replace(norm, scale=norm.scale + by)


def shifted_layer(layer: Layer, by: float) -> Layer:
    """The layer with all its norms shifted, those of queries and keys too."""
    mixer = layer.mixer
    if isinstance(mixer, GatedAttention):
        mixer = dataclasses.replace(mixer, qk_norm=mixer.qk_norm + by)
    norms = shifted_norm(layer.input_norm, by), shifted_norm(layer.post_norm, by)
    return dataclasses.replace(layer, input_norm=norms[0], mixer=mixer, post_norm=norms[1])
