"""A headless Chromium that opens reports, and what it says of them.

    with opened(page_text) as page:
        page.script("return document.title")

Skipped with a reason where Chromium, its driver or selenium is missing. One browser serves a whole
file of tests: starting it takes most of the time.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WIDTHS = {"phone": 375, "desktop": 1280}
PATIENCE_SECONDS = 200.0
"""A machine under load takes long; a page that is never drawn fails."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A page in the browser."""

    driver: Any

    def script(self, text: str, *arguments: Any) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(text, *arguments)

    def command(self, name: str, **arguments: Any) -> Any:
        """Of the protocol of Chromium's own tools."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.script(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never so: {condition}"
            time.sleep(0.02)

    def key(self, name: str, *, code: int, modifiers: int = 0) -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
            )

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """Press and release there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def resize(self, width: int, height: int = 900) -> None:
        """The window, in pixels of CSS."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def dark(self, wanted: bool) -> None:
        """What the system prefers."""
        value = "dark" if wanted else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        printed = self.command(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=True, paperWidth=8.27
        )
        return base64.b64decode(printed["data"])

    def screenshot(self, path: Path, *, height: int = 12000) -> None:
        """All of the page, top to bottom."""
        width, whole = self.script(
            "return [window.innerWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": min(whole, height), "scale": 1}
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """What the console has: errors and warnings, those of the page's policy among them."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last look, the page's own and data apart."""
        asked = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
        return [url for url in asked if not url.startswith(("file:///", "data:"))]


@contextmanager
def browser(profile: Path) -> Iterator[Opened]:
    """A browser with a profile of its own in `profile`."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    assert selenium
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = Chrome(options=options, service=Service(driver))
    try:
        yield Opened(started)
    finally:
        started.quit()


def show(
    page: Opened, file: Path, *, width: int = WIDTHS["desktop"], dark: bool = False
) -> list[str]:
    """Open a report and wait until it is drawn; what it asked the network for."""
    page.resize(width)
    page.dark(dark)
    page.requests()
    page.complaints()
    page.driver.get(file.as_uri())
    page.wait_for("document.documentElement.dataset.drawn === 'true'")
    return page.requests()
