"""The page and its figures: well-formed, complete by itself, and without an error in a browser's console."""

# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

from report_case import ReportCase  # isort: skip

import make_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_TIMEOUT_S = 120


class Page(ReportCase):
    """The page of a comparison with a diverged run."""

    def setUp(self) -> None:
        """Makes the comparison."""
        super().setUp()
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1, 2), (0, 4), batches=120)
        self.change(self.output / "runs/straggler-asp-s2", status="diverged", reason="<loss> & 'weights' are nan")
        self.write(draw=True)

    def test_page_and_figures(self) -> None:
        """Every figure is embedded, has its caption with its origin, and lies beside the page in four files."""
        text = (self.output / "report.html").read_text()
        self.parse_html()
        names = sorted(path.stem for path in self.output.glob("plots/*.svg") if not path.stem.endswith("-dark"))
        self.assertIn("time_line-straggler", names)
        self.assertIn("enforced_staleness", names)
        self.assertEqual(text.count("<figure>"), len(names))
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL)
        for caption in captions:
            for origin in (
                "deploy/compare.sh --workers=4",
                "seeds 1, 2",
                "Synthetic CPU &lt;1 &amp; 2&gt;",
                "0123456789ab",
            ):
                self.assertIn(origin, caption)
        self.assertTrue(any("A cross is a run that did not end" in caption for caption in captions))
        self.assertNotIn("<loss>", text)
        for name in names:
            for suffix in (".svg", "-dark.svg"):
                ElementTree.parse(self.output / "plots" / f"{name}{suffix}")
            for suffix in (".png", "-dark.png"):
                self.assertGreater((self.output / "plots" / f"{name}{suffix}").stat().st_size, 1000)
            self.assertIn(f"](plots/{name}.svg)", self.markdown())
        self.check_colours(text)
        self.check_browser()

    def check_colours(self, text: str) -> None:
        """Figures have variables for colours, so that they follow the reader's scheme."""
        self.assertIn("prefers-color-scheme: dark", text)
        figures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
        self.assertIn("var(--wait)", figures)
        self.assertEqual(set(re.findall(r"(?<!\()#[0-9a-f]{6}\b", figures)), set())

    def check_browser(self) -> None:
        """In both colour schemes."""
        if CHROMIUM is None:
            self.skipTest("chromium is not installed: the page was not opened")
        for scheme in ("0", "1"):  # Dark, light.
            with tempfile.TemporaryDirectory(prefix="compare-chromium-") as profile:
                command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
                command += ["--enable-logging=stderr", f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom"]
                command.append(f"file://{self.output}/report.html")
                done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_TIMEOUT_S, check=True)
            self.assertIn("What to choose when", done.stdout)
            self.assertEqual([line for line in done.stderr.splitlines() if "CONSOLE" in line], [])


if __name__ == "__main__":
    unittest.main()
