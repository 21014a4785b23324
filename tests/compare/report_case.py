"""What the tests of reports share: a folder that goes away, and a report read back."""

# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import csv
import json
import re
import sys
import tempfile
import unittest
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from experiments.shared.machine import why_no_reports  # noqa: E402

if why_no_reports():
    raise unittest.SkipTest(why_no_reports())
from experiments.compare import report  # noqa: E402

_VOID = {"meta", "link", "br", "img", "hr", "input"}


class WellFormed(HTMLParser):
    """Every tag is closed in order; collects ids, references to them, and other addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.errors: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Opens."""
        if tag not in _VOID:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Opens and closes."""
        self._note(attributes)

    def _note(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            value = value or ""
            self.references.update(re.findall(r"url\(#([^)]+)\)", value))
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href") and value.startswith("#"):
                self.references.add(value[1:])
            elif name in ("href", "src", "xlink:href"):
                self.addresses.append(value)

    def handle_endtag(self, tag: str) -> None:
        """Closes the last one that is open."""
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        """Text."""
        self.text.append(data)


def markdown_tables(text: str) -> dict[tuple[str, str], list[list[str]]]:
    """The rows of each table without its head, by the heading above it and its caption."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    heading = caption = ""
    for line in text.splitlines():
        line = re.sub(r"\\([\\*_`<>|])", r"\1", line)
        if line.startswith("## "):
            heading, caption = line[3:], ""
        elif line.startswith("**"):
            caption = line.strip("*")
        elif line.startswith("|") and not line.startswith("|:--"):
            found.setdefault((heading, caption), []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {place: rows[1:] for place, rows in found.items()}


class ReportCase(unittest.TestCase):
    """`self.output` is an empty folder."""

    def setUp(self) -> None:
        """A folder for a comparison."""
        folder = tempfile.TemporaryDirectory(prefix="compare-report-")
        self.addCleanup(folder.cleanup)
        self.output = Path(folder.name)

    def write(self, draw: bool = False) -> list[object]:
        """Writes the report; without figures, which take long, unless they are what is tested."""
        if draw:
            return report.write_reports(self.output).verdicts
        with mock.patch.object(report, "figures_of", return_value=[]):
            return report.write_reports(self.output).verdicts

    def csv(self) -> dict[str, dict[str, str]]:
        """results.csv by run."""
        with (self.output / "results.csv").open(newline="", encoding="utf-8") as file:
            return {row["id"]: row for row in csv.DictReader(file)}

    def markdown(self) -> str:
        """report.md without its escapes."""
        return re.sub(r"\\([\\*_`<>|])", r"\1", (self.output / "report.md").read_text())

    def tables(self) -> dict[tuple[str, str], list[list[str]]]:
        """Those of report.md."""
        return markdown_tables((self.output / "report.md").read_text())

    def parse_html(self) -> WellFormed:
        """report.html, which must be well-formed and need nothing from elsewhere."""
        parser = WellFormed()
        parser.feed((self.output / "report.html").read_text())
        parser.close()
        self.assertEqual(parser.errors, [])
        self.assertEqual(parser.open, [])
        self.assertEqual(sorted(parser.ids), sorted(set(parser.ids)))
        self.assertLessEqual(parser.references, set(parser.ids))
        self.assertEqual([each for each in parser.addresses if each != "data:,"], [])
        return parser

    def change(self, folder: Path, **changes: object) -> None:
        """Changes what run.json says."""
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
