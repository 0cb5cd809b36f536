"""The system's Chromium for tests and pictures, and what its pages did that they should not."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from serving import PATIENCE

CHROMIUM = shutil.which("chromium")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool, contextlib.closing(tool.chromium.launch(executable_path=CHROMIUM)) as browser:
        yield browser


class Watched:
    """A page, and its faults: console errors, exceptions, and requests to anywhere but `url`."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.faults: list[str] = []
        self.page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._note(True, f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._note(not request.url.startswith(url + "/"), request.url))

    def _note(self, wrong: bool, text: str) -> None:
        if wrong:
            self.faults.append(text)

    def close(self) -> None:
        self.page.context.close()
