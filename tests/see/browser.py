"""A browser without a window, for tests of the page."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

selenium = pytest.importorskip("selenium", reason="selenium is not installed: deploy/install-deps.sh --see")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WAIT_S = 20.0
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed: deploy/install-deps.sh --see"
)


class Browser:
    """A browser's window, and what tests ask of it."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1600) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in (
            "--headless=new",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={folder}",
        ):
            options.add_argument(flag)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium's does not work for root.
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER or ""))
        self.driver.set_page_load_timeout(WAIT_S)
        self.driver.set_script_timeout(3 * WAIT_S)  # axe-core looks at each cell of a table.
        self.resize(width, height)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """The page's own width and height, also below what a window can have."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """The visitor prefers "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Opens a page, and forgets what the console said before."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """What an expression is as soon as it is something."""
        wait = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05)
        return wait.until(lambda driver: driver.execute_script(f"return {script}", *arguments), message=script)

    def text(self, css: str) -> str:
        """What can be read in an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", css))

    def console(self) -> list[str]:
        """Warnings and errors since the page was opened, or this was asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, name: str) -> None:
        """Of the whole page, if PS_SCREENSHOTS says where to."""
        folder = os.environ.get("PS_SCREENSHOTS")
        if not folder:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        size = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": size[0], "height": min(size[1], 6000), "deviceScaleFactor": 1, "mobile": False},
        )
        # A chart follows its room a frame later.
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        """Ends the browser."""
        self.driver.quit()


def axe_violations(browser: Browser) -> list[str]:
    """What axe-core finds wrong, by rule and by the first element."""
    axe_core_python = pytest.importorskip("axe_core_python", reason="axe_core_python is not installed")
    script = next(Path(axe_core_python.__file__).parent.rglob("axe.min.js")).read_text()
    # Through the debugger, which the page's policy does not hold up.
    browser.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": script})
    result = browser.driver.execute_async_script("axe.run(document).then(arguments[0])")
    return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}" for each in result["violations"]]
