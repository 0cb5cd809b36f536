"""Prometheus over HTTP, as far as drawing and checking need it; and one of one's own for a moment."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.deploy.ports import free_port

START_SECONDS = 30.0
CONFIG = """global: {{scrape_interval: {interval}, evaluation_interval: {interval}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: pilotfish
    static_configs: [{{targets: ["{target}"]}}]
"""


class PrometheusError(Exception):
    """Prometheus refused a query, or did not start."""


@dataclass(frozen=True)
class Series:
    """Labels, and (time, value) points in order; one point for an instant query. A value may be NaN."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """Queries of one server. Raises PrometheusError with its own words."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def instant(self, expression: str, at: float | None = None) -> list[Series]:
        fields = {"query": expression} | ({} if at is None else {"time": str(at)})
        result = self._get("query", fields)["result"]
        return [Series(item["metric"], (_point(item["value"]),)) for item in result]

    def over(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        fields = {"query": expression, "start": str(start), "end": str(end), "step": str(step)}
        result = self._get("query_range", fields)["result"]
        return [Series(item["metric"], tuple(map(_point, item["values"]))) for item in result]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as Prometheus sees it, with its health and last error."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def _get(self, what: str, fields: dict[str, str]) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise PrometheusError(f"{error.code}: {error.read().decode()[:500]}") from None


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def missing() -> str | None:
    """Why no Prometheus can be started here, or None."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{', '.join(absent)} not found: apt-get install prometheus" if absent else None


@contextlib.contextmanager
def scraping(target: str, rules: Path, interval: str = "1s") -> Iterator[Prometheus]:
    """A Prometheus that scrapes host:port `target`; its data goes with it."""
    with tempfile.TemporaryDirectory(prefix="pilotfish-prometheus-") as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(CONFIG.format(interval=interval, rules=json.dumps(str(rules.resolve())), target=target))
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address={address}", "--log.level=error"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                _wait(f"http://{address}/-/ready", process)
                yield Prometheus(f"http://{address}")
            finally:
                process.terminate()
                process.communicate(timeout=30)


def _wait(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PrometheusError(f"prometheus ended with {process.returncode}: {process.communicate()[1][-500:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.1)
    raise PrometheusError(f"prometheus is not ready after {START_SECONDS:g} s")
