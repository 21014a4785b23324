"""What is printed of a report when it is written: what to choose when, and what each mode gains and loses."""

from __future__ import annotations

import textwrap

from content import Section
from tables import OUTCOME, Table

_WIDTH = 110


def summary(sections: list[Section]) -> str:
    """Of the whole report."""
    lines = []
    for bullet in sections[0].bullets:
        lines += textwrap.wrap(bullet, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    lines += [line for note in sections[0].notes for line in textwrap.wrap(note, _WIDTH)]
    for section in sections:
        for caption, table in section.tables:
            if caption == OUTCOME:
                lines += ["", section.title, *_rows(table)]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    """Columns as wide as their widest cell; the first to the left."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
