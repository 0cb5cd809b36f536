"""Judges mutants of the engine: `python -m tests.mutation.campaign` all of them (make mutation), or some by name.

A mutant is named if the audit finds something or the engine raises. One that is not must leave every text as it was
(subject.changes_text), and stands in survivors.py with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from tests.mutation.mutants import Mutant, generate
from tests.mutation.subject import Subject, quiet
from tests.mutation.survivors import SURVIVORS


@dataclass(frozen=True)
class Judgement:
    """`named`: what the audit said; `changed`: what became of the texts, looked at where it said nothing."""

    mutant: Mutant
    named: str | None
    changed: str | None

    @property
    def complaint(self) -> str | None:
        """Why the test must fail."""
        name = self.mutant.name
        if self.named is not None:
            return f"listed as a survivor, but named: {name}: {self.named}" if name in SURVIVORS else None
        if self.changed is not None:
            return f"NOT NAMED, and {self.changed}: {name}"
        return None if name in SURVIVORS else f"survives and is not listed: {name}"


def judge(subject: Subject, mutant: Mutant) -> Judgement:
    """With the fault in, and out again."""
    with mutant.applied():
        named = subject.named()
        return Judgement(mutant, named, None if named is not None else subject.changes_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="those whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    complaints: list[str] = []
    began = time.monotonic()
    with quiet(), TemporaryDirectory() as folder:
        subject = Subject(Path(folder))
        everyone = generate(subject.lines())
        mutants = [mutant for mutant in everyone if args.only in mutant.name]
        for mutant in tqdm(mutants, desc="mutants", disable=not sys.stderr.isatty()):
            judgement = judge(subject, mutant)
            if judgement.complaint is not None:
                complaints.append(judgement.complaint)
                print(judgement.complaint, flush=True)
    gone = [] if args.only else sorted(set(SURVIVORS) - {mutant.name for mutant in everyone})
    for name in gone:
        print(f"listed as a survivor, but no mutant any more: {name}")
    print(
        f"{len(mutants)} of {len(everyone)} mutants in {time.monotonic() - began:.0f} s, {len(complaints)} complaints"
    )
    return 1 if complaints or gone else 0


if __name__ == "__main__":
    raise SystemExit(main())
