"""A page that is opened in the browser at a width and in a theme."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Tab:
    """The page, opened at a width and in a theme."""

    def __init__(self, browser: Any, page: Path) -> None:
        self.browser, self.page = browser, page

    def open(self, width: int = 1280, theme: str = "light") -> Tab:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for kind in ("browser", "performance"):
            self.browser.get_log(kind)  # what others left
        self.browser.get(self.page.as_uri())
        self.run("try { localStorage.clear() } catch {}")
        return self.drawn()

    def drawn(self) -> Tab:
        self.until("return document.documentElement.dataset.ready === 'yes'")
        return self

    def run(self, script: str, *values: object) -> Any:
        return self.browser.execute_script(script, *values)

    def until(self, script: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never: {script}"
            time.sleep(0.1)
        return found

    def tick(self, variant: str) -> None:
        self.run(
            "document.querySelector(`.filter input[value=${JSON.stringify(arguments[0])}]`).click()", variant
        )
        self.drawn()
