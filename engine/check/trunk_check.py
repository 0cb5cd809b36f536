"""A known text run through the trunk at load: a model that cannot tell it writes nonsense, at full speed.

Weights of another convention, a damaged file, another model's tokenizer: each loads, answers and, since trunk and head
are wrong alike, may even have its drafts accepted.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.engine.check.head_check import (
    MIN_POSITIONS,
    NO_TEXT,
    SHIFTS,
    TRUNK_MUST_KNOW,
    shifted_layer,
    shifted_norm,
    trunk_share,
)
from pilotfish.engine.checkpoint.findings import NOT_FINITE, ZEROS, findings
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.link.messages import HeadCheck, TrunkCheck
from pilotfish.engine.model.build import Model

CAUSES = (
    "likely causes: weights of another convention than their file says (scales of another writer, another order),"
    " a damaged file, another model's tokenizer.json, or a model that was never trained on English or code"
)


def check_trunk(model: Model, ids: list[int], checkpoint: Checkpoint, head: HeadCheck | None = None) -> TrunkCheck:
    """Whether the trunk ranks enough of the text's tokens first; writes to slot 1 and pages 1..

    `head`: what the head's test saw of the same text, so that the trunk need not read it again.
    """
    if head is not None and head.num_positions:
        count, top1 = head.num_positions, head.trunk_top1
    elif len(ids) < MIN_POSITIONS + 1:
        return TrunkCheck(verdict="untested", reason=NO_TEXT)
    else:
        count, top1 = trunk_share(model, ids)
    if top1 >= TRUNK_MUST_KNOW:
        return TrunkCheck(verdict="ok", num_positions=count, top1=top1)
    trunk = (module for name, module in checkpoint.modules.items() if not is_mtp(name))
    found = findings(trunk)
    reasons = [found.get(NOT_FINITE) or _likely_cause(model, ids) or CAUSES, found.get(ZEROS)]
    return TrunkCheck(verdict="failed", reason="; ".join(filter(None, reasons)), num_positions=count, top1=top1)


def _likely_cause(model: Model, ids: list[int]) -> str | None:
    """The known fault that, undone, makes the trunk know the text."""
    for by, cause in SHIFTS.items():
        if trunk_share(_shifted(model, by), ids)[1] >= TRUNK_MUST_KNOW:
            return f"likely cause: {cause}"
    return None


def _shifted(model: Model, by: float) -> Model:
    layers = [shifted_layer(layer, by) for layer in model.trunk.layers]
    return replace(model, trunk=replace(model.trunk, layers=layers, norm=shifted_norm(model.trunk.norm, by)))


def describe(check: TrunkCheck) -> str:
    """One line for the log."""
    if check.verdict == "untested":
        return f"the trunk was not tested: {check.reason}"
    known = f"of {check.num_positions} tokens of a known text the trunk ranks {check.top1:.0%} first"
    if check.verdict == "ok":
        return known
    return f"THE MODEL DOES NOT KNOW A PLAIN TEXT: {known}, want at least {TRUNK_MUST_KNOW:.0%}; {check.reason}"
