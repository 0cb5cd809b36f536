"""Writes what is generated from panels.py and rules.py, or says what is stale.

python -m pilotfish.deploy.grafana.generate [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pilotfish.deploy.grafana import dashboard
from pilotfish.deploy.prometheus import rules

DEPLOY = Path(__file__).resolve().parents[1]


def files() -> dict[Path, str]:
    return {
        DEPLOY / "grafana" / "dashboards" / "pilotfish.json": dashboard.text(),
        DEPLOY / "prometheus" / "pilotfish.rules.yml": rules.rules_text(),
    }


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
