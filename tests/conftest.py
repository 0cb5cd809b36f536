"""Keeps the checkout's top-level folders off sys.path: they are imported as `pilotfish.*` only."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# Tiny models on shared cores: two threads that wait for each other cost far more than they bring.
torch.set_num_threads(1)
