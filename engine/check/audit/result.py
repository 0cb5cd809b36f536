"""Outcome of one run of an audit."""

from __future__ import annotations

from dataclasses import dataclass, field

from pilotfish.engine.check.audit.transcript import Finding


@dataclass(frozen=True)
class RunResult:
    """Outcome of one (k, batch, drafts) run. `num_rows`: rows of tensors that the reference has too. `most_at_once`:
    sequences that any round had, 0 where it was not looked at."""

    name: str
    findings: list[Finding]
    num_tokens: int
    num_rows: int
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_first_drafted: int = 0
    num_first_accepted: int = 0
    most_at_once: int = field(default=0, kw_only=True)

    @property
    def first_draft_acceptance(self) -> float:
        """Share of rounds with a draft whose first draft was accepted."""
        return self.num_first_accepted / self.num_first_drafted if self.num_first_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens a sequence and round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0
