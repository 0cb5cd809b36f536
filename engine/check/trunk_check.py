"""A known text run through the trunk at load: a model that cannot tell it writes nonsense, at full speed.

Weights of another convention, a damaged file, another model's tokenizer: each loads, answers and, since trunk and head
are wrong alike, may even have its drafts accepted.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.engine.check.head_check import MIN_POSITIONS, NO_TEXT, TRUNK_MUST_KNOW, trunk_share
from pilotfish.engine.checkpoint.findings import NOT_FINITE, ZEROS, findings
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.link.messages import HeadCheck, TrunkCheck
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.trunk import Layer, Norm

SHIFTS = {
    -1.0: "likely cause: its norms hold 1 + w in a file whose norms should hold w (shifted twice)",
    1.0: "likely cause: its norms hold w in a file whose norms should hold 1 + w (not shifted)",
}
"""What is added to every norm, and the fault that it undoes."""
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
            return cause
    return None


def _shifted(model: Model, by: float) -> Model:
    def norm(one: Norm) -> Norm:
        return replace(one, scale=one.scale + by)

    def layer(one: Layer) -> Layer:
        mixer = one.mixer
        if isinstance(mixer, GatedAttention):
            mixer = replace(mixer, qk_norm=mixer.qk_norm + by)
        return replace(one, input_norm=norm(one.input_norm), mixer=mixer, post_norm=norm(one.post_norm))

    trunk = replace(model.trunk, layers=[layer(one) for one in model.trunk.layers], norm=norm(model.trunk.norm))
    return replace(model, trunk=trunk)


def describe(check: TrunkCheck) -> str:
    """One line for the log."""
    if check.verdict == "untested":
        return f"the trunk was not tested: {check.reason}"
    known = f"of {check.num_positions} tokens of a known text the trunk ranks {check.top1:.0%} first"
    if check.verdict == "ok":
        return known
    return f"THE MODEL DOES NOT KNOW A PLAIN TEXT: {known}, want at least {TRUNK_MUST_KNOW:.0%}; {check.reason}"
