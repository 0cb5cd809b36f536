"""A card's clock and power while it works, as nvidia-smi reads them: whether rounds ran at the power cap."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from contextlib import suppress
from time import perf_counter

import torch

from pilotfish.engine.errors import OptionError

PERIOD_MS = 20
QUERY = ("--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}")


class Clocks:
    """Samples of one device, while it is entered."""

    def __init__(self, command: list[str]):
        self._command, self._samples = command, list[tuple[float, float, float]]()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @classmethod
    def of(cls, device: torch.device) -> Clocks:
        """Raises OptionError where there is no nvidia-smi, or no such device to ask for."""
        program = shutil.which("nvidia-smi")
        if device.type != "cuda" or program is None:
            raise OptionError("clocks: want a CUDA device and nvidia-smi")
        return cls([program, f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", *QUERY])

    def __enter__(self) -> Clocks:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None and self._reader is not None
        self._process.kill()
        self._reader.join()
        self._process.communicate()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # a card that does not say one of them writes [N/A]
            with suppress(ValueError):
                clock, power = map(float, line.split(","))
                self._samples.append((perf_counter(), clock, power))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Medians over samples from `begin` to `end` of perf_counter; {} without one."""
        found = [sample[1:] for sample in self._samples if begin <= sample[0] <= end]
        if not found:
            return {}
        clocks, powers = zip(*found, strict=True)
        return {"clock_mhz": statistics.median(clocks), "power_w": statistics.median(powers)}
