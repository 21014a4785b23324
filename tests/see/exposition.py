"""Reads what /metrics answers (Prometheus's text format), and what deploy/observability asks of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "deploy/observability"
DASHBOARD = OBSERVABILITY / "grafana/dashboards/ps.json"
DOCUMENTED_IN = ROOT / "docs/metrics.md"

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)",?')
_PARTS = {"histogram": ("_bucket", "_sum", "_count")}  # What the samples' names add to the family's.
# Not names of metrics, but of programs and of the scrape job.
_OTHER_WORDS = {"ps_server", "ps_worker", "ps_ctl"}


@dataclass
class Family:
    """A metric with all of its series: samples by name and sorted labels."""

    kind: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    @property
    def labels(self) -> set[str]:
        """The names of the labels, but for a histogram's bounds."""
        return {name for _, labels in self.samples for name, _ in labels} - {"le"}


def parse(text: str) -> dict[str, Family]:
    """The families by name. AssertionError for what is not in the format, or belongs to no family that was told."""
    families: dict[str, Family] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name not in families, f"{name} comes twice"
            families[name] = Family(kind)
        elif line and not line.startswith("#"):
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            name = found["name"]
            family = families.get(name) or families.get(re.sub("_(bucket|sum|count)$", "", name))
            assert family is not None, f"{name} has no type"
            family.samples[name, _labels(found["labels"] or "")] = float(found["value"])
    return families


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    found = list(_LABEL.finditer(text))
    assert "".join(label[0] for label in found) == text, text
    return tuple(sorted((label["name"], label["value"]) for label in found))


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    """One sample. KeyError if there is none."""
    family = families.get(name) or families[re.sub("_(bucket|sum|count)$", "", name)]
    return family.samples[name, tuple(sorted(labels.items()))]


# ---- What is documented, and what is asked


@dataclass(frozen=True)
class Documented:
    """A row of the table of docs/metrics.md."""

    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Documented]:
    """All metrics of the table by their whole names."""
    found: dict[str, Documented] = {}
    for line in DOCUMENTED_IN.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(ps_\w+)`", cells[0])
        if line.startswith("|") and names and len(cells) == 4:
            kind = cells[1].split(",")[0]
            labels = frozenset(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cells[2])))
            for name in names:
                assert name not in found, f"{name} has two rows"
                found[name] = Documented(kind, labels)
    return found


def families_in(query: str) -> set[str]:
    """The families that a query reads, a histogram by its own name."""
    # What is between quotes is a label's value.
    names = set(re.findall(r"\bps_\w+", re.sub(r'"[^"]*"', "", query))) - _OTHER_WORDS
    return {family_of(name) for name in names}


def family_of(name: str) -> str:
    """Of a sample's name."""
    known = documented()
    for part in _PARTS["histogram"]:
        short = name.removesuffix(part)
        if short != name and known.get(short, Documented("", frozenset())).kind == "histogram":
            return short
    return name


def selectors_in(query: str) -> set[str]:
    """The metrics of a query with their matchers: ps_loss{split="train"}."""
    return {found[0] for found in re.finditer(r"\bps_\w+(\{[^}]*\})?", query)}


def panels(dashboard: Any) -> Iterator[Any]:
    """Those that show something, of all rows."""
    for panel in dashboard["panels"]:
        yield from panel.get("panels", ())
        if panel["type"] != "row":
            yield panel


def dashboard_queries(variables: dict[str, str]) -> dict[str, str]:
    """The dashboard's queries with its variables replaced, by panel and letter."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for panel in panels(dashboard):
        for target in panel["targets"]:
            name = f"{panel['title']} ({target['refId']})"
            assert name not in found, f"two panels have the title of {name}"
            found[name] = _replaced(target["expr"], variables.items())
    return found


def _replaced(query: str, variables: Iterable[tuple[str, str]]) -> str:
    for name, text in variables:
        query = query.replace(f"${name}", text)
    assert "$" not in query, f"a variable that nobody replaces: {query}"
    return query
