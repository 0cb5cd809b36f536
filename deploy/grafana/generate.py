"""Writes what is generated from panels.py, rules.py and the table of metrics, or says what is stale.

python -m pilotfish.deploy.grafana.generate [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pilotfish.deploy.grafana import dashboard
from pilotfish.deploy.prometheus import rules
from pilotfish.metrics.definitions import DEFINITIONS, PREFIX

DEPLOY = Path(__file__).resolve().parents[1]
METRICS_PAGE = DEPLOY.parent / "docs" / "server.md"
BEGIN = "<!-- generated from metrics/definitions.py by python -m pilotfish.deploy.grafana.generate -->\n"
END = "<!-- end -->"


def files() -> dict[Path, str]:
    return {
        METRICS_PAGE: metrics_page(METRICS_PAGE.read_text(encoding="utf-8")),
        DEPLOY / "grafana" / "dashboards" / "pilotfish.json": dashboard.text(),
        DEPLOY / "prometheus" / "pilotfish.rules.yml": rules.rules_text(),
    }


def metrics_page(page: str) -> str:
    """The page with the table of metrics as it is now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    rows = ["", "| name | kind | |", "|---|---|---|"]
    for entry in DEFINITIONS:
        labels = f"{{{','.join(entry.labels)}}}" if entry.labels else ""
        rows.append(f"| `{entry.name.removeprefix(PREFIX)}{labels}` | {entry.kind} | {entry.help} |")
    return before + BEGIN + "\n".join(rows) + "\n\n" + END + rest.partition(END)[2]


def stale() -> list[Path]:
    """Generated files that are not what the source gives now."""
    return [path for path, text in files().items() if not path.exists() or path.read_text() != text]


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        for path in stale():
            print(f"stale: {path}")
        return 1 if stale() else 0
    for path, text in files().items():
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
