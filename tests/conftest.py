"""Keeps the checkout's top-level folders off sys.path: they are imported as `pilotfish.*` only."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
