"""The browser: started once a file, without network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
"""Of Debian: scripts/system_packages.sh installs it."""
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
HEIGHT = {1280: 800, 390: 844}

Open = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium, closed after each file: playwright keeps an event loop running in this thread meanwhile."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def open_page(browser: Browser) -> Open:
    """Opens a file as `open_page(path, width=390, scheme="dark")`; fails for a script error, or a want of network."""

    @contextlib.contextmanager
    def opened(path: Path, *, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Iterator[Page]:
        said: list[str] = []
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHT[width]}, color_scheme=scheme, offline=True
        )
        try:
            page = context.new_page()
            page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda r: said.append(r.url) if r.url.startswith(("http", "ws")) else None)
            page.route("http*://**", lambda route: route.abort())
            page.goto(path.as_uri())
            yield page
            assert said == []
        finally:
            context.close()

    return opened
