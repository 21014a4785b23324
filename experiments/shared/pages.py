"""Reports and pages: tables, sections, and the templates that make HTML and Markdown of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import jinja2

from experiments import REPOSITORY
from experiments.shared.charts import DARK, LIGHT, Figure

NONE = "—"


@dataclass
class Table:
    """Its first column names the row. Cells are text."""

    caption: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Section:
    """A heading with what is under it, in this order."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    bullets: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(template: str, **values: Any) -> str:
    """What the file in templates/ makes of the values; a name that is missing is an error."""
    text = _environment.get_template(template).render(values)
    return _flow(text) if template.endswith(".md.j2") else text


def table_markdown(table: Table) -> str:
    return _environment.get_template("tables.md.j2").module.table(table)


def escape_markdown(text: str) -> str:
    """Text with what Markdown would take for its own."""
    return re.sub(r"([\\*_`<>])", r"\\\1", text)


def _cell(text: str, escaped: bool = False) -> str:
    """Text for a cell of a Markdown table."""
    return (escape_markdown(text) if escaped else text).replace("|", "\\|").replace("\n", " ")


def _flow(text: str) -> str:
    """Markdown whose paragraphs and items of lists are a line each, as everything here writes it."""
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]
    for place, block in enumerate(blocks):
        blocks[place] = re.sub(r"\n +", " ", block) if block[0] in "|-" else " ".join(block.split())
    return "\n\n".join(blocks) + "\n"


def number(value: float | None, digits: int = 0) -> str:
    """Without a grouping of thousands, so that it can be copied."""
    return NONE if value is None else f"{value:.{digits}f}"


def plural(count: int, word: str) -> str:
    """As in "1 run", "2 runs"."""
    return f"{count} {word}{'s' * (count != 1)}"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(REPOSITORY / "experiments/templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_environment.filters |= {"markdown": escape_markdown, "cell": _cell, "fmt": format}
_environment.globals |= {"light": LIGHT, "dark": DARK, "plural": plural}
