"""The gate that loads the model itself: `pilotfish audit` at every k up to the served one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

from pilotfish.deploy.gate.gate import CannotRun, Found

PASSED_ON = ("--dtype", "--kv-cache-dtype", "--device", "--draft-head", "--revision")
"""Flags of serve that audit has too."""
MAX_BATCH = 4


def full(model: str, server_flags: Sequence[str], k: int, max_num_seqs: int) -> Found:
    """Every k from 1, every batch up to 4: tokens and logit bits of k = 0, and hits beside cold runs. It takes minutes;
    a bar tells how many."""
    depth, batch = max(1, k), min(MAX_BATCH, max_num_seqs)
    command = [sys.executable, "-m", "pilotfish.server.cli", "audit", model, "--json"]
    command += ["--max-depth", str(depth), "--max-batch", str(batch)]
    for flag, value in pairwise(server_flags):
        command += [flag, value] if flag in PASSED_ON else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise CannotRun(f"pilotfish audit ended with status {done.returncode}; its own words stand above")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    runs = [line for line in lines if "findings" in line]
    digest = next((line["digest"] for line in lines if "digest" in line), "none")
    findings = [f for run in runs for f in run["findings"]]
    wanted = f"k = 1 .. {depth}, 1 .. {batch} at once: the tokens and bits of k = 0, of hits those of cold runs"
    num_rows = sum(run["num_rows"] for run in runs)
    came = f"{len(runs)} runs, {num_rows} rows compared, {len(findings)} differ, digest {digest}"
    if findings:
        first = findings[0]
        came += f"; first {first['run']}: request {first['request']}, position {first['position']}, {first['tensor']}"
    return Found(done.returncode == 0 and bool(runs) and not findings, wanted, came)
