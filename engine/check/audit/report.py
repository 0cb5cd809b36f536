"""What an audit says: a line a run, then what was compared, the digest of it, and a verdict that claims no more."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass, field

from tqdm import tqdm

from pilotfish.engine.check.audit.hits import Hits
from pilotfish.engine.check.audit.result import RunResult
from pilotfish.engine.check.audit.run import Auditor


@dataclass
class Report:
    """Prints runs as they come, and sums them up. `as_json`: one object a run, the last one for all.

    `hits` is None where nothing could be held against cold runs.
    """

    auditor: Auditor
    depths: list[int]
    batches: list[int]
    as_json: bool
    hits: Hits | None = None
    num_runs: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_findings: int = 0
    kinds: set[str] = field(default_factory=set)

    def add(self, result: RunResult) -> None:
        """Counts and prints a run."""
        self.num_runs += 1
        self.num_tokens += result.num_tokens
        self.num_rows += result.num_rows
        self.num_findings += len(result.findings)
        self.kinds.add(", ".join(result.name.split(", ")[2:]) or result.name)
        if self.as_json:
            row = dataclasses.asdict(result) | {"acceptance_length": result.acceptance_length}
            row |= {"first_draft_acceptance": result.first_draft_acceptance}
            print(json.dumps(row), flush=True)
            return
        verdict = "FAIL" if result.findings else "ok"
        line = f"{result.name:<34} {verdict:<4} {result.num_tokens:>5} tokens {result.num_rows:>7} rows"
        first = f"first draft {result.first_draft_acceptance:.3f}"
        together = f", up to {result.most_at_once} at once" if result.most_at_once else ""
        tqdm.write(f"{line}  acceptance length {result.acceptance_length:.2f}, {first}{together}", file=sys.stdout)
        for finding in result.findings:
            tqdm.write(f"    {finding}", file=sys.stdout)

    @property
    def modes(self) -> list[str]:
        """What requests are called by, numbers left out."""
        names = (re.sub(r"^\d+-|-\d+$", "", request.request_id) for request in self.auditor.requests)
        return list(dict.fromkeys(names))

    def _print_head(self) -> None:
        head = self.auditor.head_report
        if not head.rounds:
            return
        depth = max(self.depths)
        print(
            f"head from scratch: acceptance length {head.length:.2f} at k = {depth}, first draft {head.first:.3f}; "
            f"{sum(head.looked.values())} drafts 1 .. {max(head.looked, default=0)} looked at, "
            f"{sum(head.far.values())} farther from its best than rounding"
        )

    def end(self) -> int:
        """Prints the summary; the exit status."""
        passed = self.num_findings == 0
        compared = self.auditor.compared
        if self.as_json:
            summary = {
                "verdict": "pass" if passed else "fail",
                "k": self.depths,
                "batches": self.batches,
                "drafts": sorted(self.kinds),
                "requests": len(self.auditor.requests),
                "modes": self.modes,
                "runs": self.num_runs,
                "tokens": self.num_tokens,
                "rows": self.num_rows,
                "by_book": self.auditor.num_by_book,
                "sound_acceptance_length": self.auditor.head_report.length,
                "sound_first_draft_acceptance": self.auditor.head_report.first,
                "drafts_looked_at": self.auditor.head_report.looked,
                "drafts_far": self.auditor.head_report.far,
                "silent": self.auditor.rules.silent,
                "hits": self.hits.counts() if self.hits is not None else None,
                "digest": compared.digest(),
                "digests": compared.digests(),
            }
            print(json.dumps(summary), flush=True)
            return 0 if passed else 1
        self._print_head()
        print(f"compared: {self.num_runs} runs over k = {_span(self.depths)} and {_span(self.batches)} at once,")
        print(f"    {'; '.join(sorted(self.kinds))};")
        print(f"    {len(self.auditor.requests)} requests: {', '.join(self.modes)};")
        print(f"    {self.num_tokens} tokens, {self.num_rows} rows of tensors;")
        print(f"    {self.auditor.num_by_book} tokens of k = 0 by the book")
        for line in self.hits.described() if self.hits is not None else ():
            print(f"    {line}")
        if self.hits is None:
            print("not compared: hits: the model takes no prompt as long as the first boundary")
        for rule in self.auditor.rules.silent:
            print(f"not compared: {rule}: this checkpoint's text could not be made to meet it")
        print(f"digest: {compared.digest()}")
        span = f"k = {_span(self.depths)}, {_span(self.batches)} at once"
        counts = f"{self.num_tokens} tokens, {self.num_rows} rows"
        same = f"the tokens and bits of k = 0 in all that was compared: {span}, {counts}"
        if self.hits is not None:
            same += f"; hits are as cold runs: {self.hits.num_prompts} prompts, {self.hits.num_found} tokens found"
        print(
            f"PASS: {same}"
            if passed
            else f"FAIL: {self.num_findings} findings: output depends on speculation or the prefix cache"
        )
        return 0 if passed else 1


def _span(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]} .. {numbers[-1]}" if whole else ", ".join(map(str, numbers))
