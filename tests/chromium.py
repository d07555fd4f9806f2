"""Runs Debian's Chromium for the tests of the page; `deploy/install.sh test` installs it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 120_000


def need_browser() -> None:
    """Skip the calling module if there is no browser."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs Playwright: pip install playwright", allow_module_level=True)
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs {CHROMIUM}: apt-get install chromium", allow_module_level=True)


@contextmanager
def open_browser() -> Iterator[BrowserContext]:
    """Open a browser with a fresh profile.

    It brings an event loop, so a module closes it before another's tests run. Visits share its first tab,
    since a window costs two CPU seconds and a tab costs one.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=WAIT_MS)
        window = browser.new_context()
        window.set_default_timeout(WAIT_MS)
        window.new_page()
        yield window
        browser.close()


class Visit:
    """The page in the browser's first tab, or in one of its own, `width` by `height` pixels large.

    `asked` lists the addresses that it requested, `errors` the complaints of its scripts and its content
    security policy.
    """

    def __init__(
        self, browser: BrowserContext, url: str, width: int = 1280, height: int = 900, own_tab: bool = False
    ) -> None:
        """Open the page for a user who prefers reduced motion: animations take most of the CPU time."""
        self.url = url
        self._own_tab = own_tab
        self.page: Page = browser.new_page() if own_tab else browser.pages[0]
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(reduced_motion="reduce")
        self.asked: list[str] = []
        self.errors: list[str] = []
        self._listeners: dict[str, Callable[[Any], None]] = {
            "request": lambda request: self.asked.append(request.url),
            "pageerror": lambda error: self.errors.append(str(error)),
            "console": self._hear,
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def _hear(self, message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            self.errors.append(message.text)

    def __enter__(self) -> Visit:
        self.page.goto(self.url)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        shown = "" if kind else re.sub(r"\s+", " ", self.page.inner_text("body"))
        self._leave()
        if kind is None:
            assert not re.search(r"\b(NaN|undefined|Infinity)\b|\[object", shown), shown
            assert not self.errors
            assert all(address.startswith(f"{self.url}/") for address in self.asked), self.asked

    def _leave(self) -> None:
        if self._own_tab:
            self.page.close()
            return
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.evaluate("sessionStorage.clear()")
        self.page.goto("about:blank")

    def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until an element's text contains `text`."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_contain_text(text, timeout=WAIT_MS)

    def has(self, selector: str, number: int) -> None:
        """Wait until this number of elements match."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_count(number, timeout=WAIT_MS)

    def generate(self, prompt: str, max_tokens: int = 64) -> None:
        self.page.evaluate("document.querySelector('#ask details').open = true")
        self.page.fill("#prompt", prompt)
        self.page.fill("[name=max_tokens]", str(max_tokens))
        self.page.click("#go")
