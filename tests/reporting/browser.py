"""A browser for tests of the page: Debian's chromium, driven by playwright, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: The largest difference in width of a drawn plot from its box, in pixels.
SPARE = """Math.max(0, ...[...document.querySelectorAll(".plot .main-svg")].map((svg) =>
  Math.abs(svg.closest(".plot").clientWidth - svg.getBoundingClientRect().width)))"""
HOW = "see the browser with: apt-get install --no-install-recommends chromium fonts-dejavu-core; pip install playwright"


@contextmanager
def started() -> Iterator[Any]:
    """Start the browser, or skip the tests and name the missing packages."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"playwright is missing; {HOW}")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip(f"chromium is missing; {HOW}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class Visit:
    """A page of the browser, with its requests and errors."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        viewport = {"width": 1280, "height": 900}
        self.context = browser.new_context(offline=True, viewport=viewport, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type != "log" else None,
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)

    def resize(self, width: int, height: int) -> None:
        """Resize the window. Charts follow a moment later."""
        self.page.set_viewport_size({"width": width, "height": height})
        wait = (
            f"for (let k = 0; k < 300 && {SPARE} > 1; k++) await new Promise(requestAnimationFrame)"
        )
        self.page.evaluate(f"async () => {{ {wait} }}")

    def rows(self) -> list[list[str]]:
        """Return the texts of the table rows in the page."""
        script = "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        actual: list[list[str]] = self.page.eval_on_selector_all(
            "#rows tbody tr[data-number]", script
        )
        return actual

    def numbers(self) -> list[int]:
        """Return the numbers of the trajectories of these rows."""
        return [int(row[0].replace(",", "")) for row in self.rows()]

    def opened(self) -> str:
        """Return the heading of the shown episode, after its curves are drawn."""
        self.page.wait_for_selector("#view .plot .main-svg, #view p:not(.hint)")
        return str(self.page.inner_text("#view h3"))

    def curves(self) -> list[dict[str, Any]]:
        """Return the curves of the shown episode from plotly."""
        self.opened()
        script = (
            "plot => plot.data.map(({name, x, y, yaxis}) => ({name, x: [...x], y: [...y], yaxis}))"
        )
        actual: list[dict[str, Any]] = self.page.eval_on_selector("#view .plot", script)
        return actual

    def colors(self, selector: str) -> int:
        """Return the number of different colours of a drawn element."""
        import io

        from PIL import Image

        shot = Image.open(io.BytesIO(self.page.locator(selector).first.screenshot())).convert("RGB")
        return len(shot.getcolors(1 << 24) or ())
