"""What the tests of the experiments share: running one in its quick form, and reading its page."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("PS_BIN", REPOSITORY / "build/bin"))
LIMIT_S = 280  # A machine may be busy.

sys.path.insert(0, str(REPOSITORY))

from experiments.shared.machine import why_no_reports  # noqa: E402

if why_no_reports():
    raise unittest.SkipTest(why_no_reports())


class ExperimentCase(unittest.TestCase):
    """Runs the experiment NAME once for all of a class's tests, in a folder that goes with them."""

    NAME = ""
    FLAGS: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="experiments-test-")
        cls.addClassCleanup(cls._folder.cleanup)
        cls.output = Path(cls._folder.name)
        cls.ended = run(cls.NAME, cls.output, *cls.FLAGS)
        if "SKIPPED:" in cls.ended.stderr:
            print(cls.ended.stderr)
            raise unittest.SkipTest(cls.ended.stderr.strip())
        if cls.ended.returncode != 0:
            raise AssertionError(f"status {cls.ended.returncode}:\n{cls.ended.stderr}")
        cls.runs = cls.output / "quick" / cls.NAME
        cls.pages = cls.output / "quick/pages"
        cls.page = (cls.pages / f"{cls.NAME}.md").read_text(encoding="utf-8")

    def test_the_page_has_every_plot_that_it_shows_and_no_number_that_is_none(self) -> None:
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", self.page):
            self.assertIn("<svg", (self.pages / name).read_text(encoding="utf-8"))
        self.assertNotRegex(self.page, r"(?i:\bnan\b|\binf\b)|\bNone\b")
        self.assertIn(f"deploy/experiments.sh {self.NAME} --quick", self.page)


def run(name: str, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The experiment in its quick form."""
    experiments = str(REPOSITORY / "experiments")
    command = [sys.executable, "-B", experiments, name, "--quick", f"--bin={BIN}", f"--output={output}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def table_rows(page: str, caption: str) -> list[dict[str, str]]:
    """The rows of the page's table under this caption, by column."""
    after = page.partition(f"**{caption}**")[2].strip().splitlines()
    lines = []
    for line in after:
        if not line.startswith("|"):
            break
        lines.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]] if lines else []
