"""Pictures of the page for docs/: a real server on the demo model, a real browser. `make screenshots`.

python -m tests.support.screenshots --seconds 90 --out docs/pictures
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(Path(__file__).parent))

from browser import CHROMIUM, chromium  # noqa: E402  (the path above makes them importable)
from serving import serving_in_thread  # noqa: E402

PROMPT = "Write a function that reads a JSON file."
DESK = {"viewport": {"width": 1280, "height": 1020}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5, "has_touch": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of traffic before plots are pictured")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium: apt install chromium")
    engine = {"num_speculative_tokens": 3, "max_model_len": 4096, "cost_table": True}
    core = "pilotfish.engine.start:make_core"
    served = {"served_names": ("demo",), "core": core, "engine": engine}
    with serving_in_thread(ROOT / "demo" / "model", **served) as server, chromium() as browser:
        _write(browser, server.url, args.out / "page-write.png", DESK)
        _write(browser, server.url, args.out / "page-phone.png", {**PHONE, "color_scheme": "dark"})
        _watch(browser, server.url, args.out / "page-watch.png", args.seconds)
    return 0


def _open(browser: Any, url: str, context: dict[str, Any]) -> Any:
    page = browser.new_context(**context).new_page()
    page.goto(url)
    page.locator("#state[data-state=ready]").wait_for()
    return page


def _write(browser: Any, url: str, out: Path, context: dict[str, Any]) -> None:
    """At the end of an answer, a draft pointed at."""
    page = _open(browser, url + "/", context)
    page.locator("details").evaluate("element => { element.open = true; }")
    for name, value in {"temperature": "0", "max_tokens": "150"}.items():
        page.fill(f"#ask [name={name}]", value)
    page.locator("details").evaluate("element => { element.open = false; }")
    page.fill("#prompt", PROMPT)
    page.click("#go")
    page.locator("#go:enabled").wait_for(timeout=120_000)
    page.locator(".pane").last.locator(".t.d8").nth(-3).evaluate("element => element.click()")
    # what was asked stands where it was typed
    page.click("#new-chat")
    page.locator("#prompt").blur()
    if context is not DESK:
        page.locator(".pane").last.evaluate("element => element.scrollIntoView()")
    page.screenshot(path=out)
    page.context.close()


def _watch(browser: Any, url: str, out: Path, seconds: float) -> None:
    """Four clients with pauses, then the plots."""
    until = time.monotonic() + seconds
    clients = [threading.Thread(target=_client, args=(url, number, until)) for number in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    page = _open(browser, url + "/#watch", DESK)
    page.locator(".plot canvas").nth(6).wait_for()
    page.screenshot(path=out)
    page.context.close()


def _client(url: str, number: int, until: float) -> None:
    asks = [PROMPT, "Tell a short story about a fish.", "What is a hash map?", "Write a test for a stack."]
    turn = number
    while time.monotonic() < until:
        body = {"messages": [{"role": "user", "content": asks[turn % 4]}], "max_tokens": 60 + 30 * number}
        request = urllib.request.Request(
            url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
        turn += 1
        time.sleep(number)


if __name__ == "__main__":
    sys.exit(main())
