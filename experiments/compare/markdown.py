"""report.md."""

from __future__ import annotations

import re

from content import Section
from tables import Table


def markdown(title: str, lead: str, sections: list[Section], provenance: str) -> str:
    """The whole file. Figures are links to the SVG files beside it."""
    parts = [f"# {title}", lead]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [_text(paragraph) for paragraph in section.paragraphs]
        if section.bullets:
            parts.append("\n".join(f"- {_text(bullet)}" for bullet in section.bullets))
        for caption, table in section.tables:
            parts += [f"**{_text(caption)}**"] * bool(caption) + [_table(table)]
        for figure in section.figures:
            parts.append(f"![{figure.title}](plots/{figure.name}.svg)")
            parts.append(f"*{_text(figure.caption)}* {_text(provenance)}")
        parts += [_text(note) for note in section.notes]
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    """With what Markdown would take for its own."""
    return re.sub(r"([\\*_`<>])", r"\\\1", text)


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|").replace("\n", " ")


def _table(table: Table) -> str:
    lines = ["| " + " | ".join(map(_cell, table.columns)) + " |"]
    lines.append("|:--" + "|--:" * (len(table.columns) - 1) + "|")
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
    return "\n".join(lines)
