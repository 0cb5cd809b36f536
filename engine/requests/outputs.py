"""What a client is told of the tokens that a sequence has got."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotfish.engine.link.messages import FinishReason, RequestOutput
from pilotfish.engine.requests.sequence import Sequence

if TYPE_CHECKING:
    from pilotfish.engine.round.reports import SequenceReport


def output_of(sequence: Sequence, report: SequenceReport, after_round: bool) -> RequestOutput:
    """The output that a report comes to; it has a finish_reason where the sequence has ended, or must."""
    finish: FinishReason | None = None
    error = _error(sequence, report)
    if report.done or error is not None:
        finish = "error" if error is not None else "stop" if report.stopped or report.looped else "length"
    return RequestOutput(
        request_id=sequence.request_id,
        token_ids=report.token_ids,
        logprobs=report.logprobs,
        finish_reason=finish,
        error=error,
        error_code="nan" if report.has_nan else "invalid" if error is not None else None,
        stop_token_id=report.token_ids[-1] if report.stopped else None,
        num_drafted=report.num_drafted,
        num_accepted=report.num_accepted,
        num_forced=report.num_forced,
        round=after_round,
        queue_seconds=sequence.take_queue_seconds(),
        num_cached_tokens=sequence.take_num_cached(),
        looped=report.looped,
        prompt_logprobs=report.prompt_logprobs,
    )


def _error(sequence: Sequence, report: SequenceReport) -> str | None:
    """What ends this request alone; its neighbours do not notice."""
    if report.has_nan:
        return "the model's logits hold NaN: no token can be chosen"
    if sequence.allowed is not None and not sequence.allowed.issuperset(report.token_ids):
        return "no token is left to choose: allowed_token_ids, bad_words and the grammar forbid them all"
    return None
