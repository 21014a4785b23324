"""Draws some steps of a merged trace: `python3 -B tests/see/trace_picture.py trace.json docs/trace.svg FIRST LAST`.

FIRST and LAST are their numbers. Rows, spans and arrows are those of the file, as viewers show them.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, ROW, BAR = 1100, 190, 12, 20, 15
TOP, LETTER = 30, 6.2  # Pixels; a letter's width.
COLOURS = {
    "forward": "#2a6fc4",
    "backward": "#134a8e",
    "idle": "#dfe3ea",
    "await": "#c3cad6",
    "push": "#d97a06",
    "wait": "#c3cad6",
    "pull": "#8a5fbf",
    "arrives": "#d97a06",
    "waits": "#c3cad6",
    "apply": "#1f8a5b",
}
DARK = {"forward", "backward", "push", "pull", "arrives", "apply"}


def read(path: str) -> tuple[list[dict[str, Any]], list[tuple[tuple[int, int], str]]]:
    """Spans and arrows by time, and the rows in order, each with its name."""
    events: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    named = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    rows = []
    for (kind, pid, tid), arguments in sorted(named.items(), key=lambda item: item[0][1:]):
        if kind == "thread_name":
            process = re.sub(r" on .*|^server, |^worker, ", "", named["process_name", pid, 0]["name"])
            rows.append(((pid, tid), f"{process}: {arguments['name']}"))
    return sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"]), rows


def draw(path: str, first: int, last: int) -> str:
    """The picture of these steps, from their first span to the last weights that came of them."""
    events, rows = read(path)
    chosen = [event for event in events if first <= event.get("args", {}).get("step", -1) <= last]
    begin = min(event["ts"] for event in chosen) - 300
    end = max(event["ts"] + event.get("dur", 0) for event in chosen) + 1500
    place = {row: number for number, (row, _) in enumerate(rows)}
    height = TOP + ROW * len(rows) + 8
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def x(time: float) -> float:
        return LEFT + (min(max(time, begin), end) - begin) * scale

    def y(event: dict[str, Any]) -> float:
        return TOP + ROW * place[event["pid"], event["tid"]]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100) if (end - begin) / 1000 / size <= 12)
    for tick in range(0, int((end - begin) / 1000) + 1, step):
        at = x(begin + tick * 1000)
        parts.append(f'<path d="M{at:.1f} 20V{height}" stroke="#e6e9ee"/>')
        if at + 40 < WIDTH:
            parts.append(f'<text x="{at + 2:.1f}" y="14" fill="#667085">{tick} ms</text>')
    for (pid, tid), name in rows:
        at = TOP + ROW * place[pid, tid]
        parts.append(f'<text x="6" y="{at + 12}" fill="#1d2430">{html.escape(name)}</text>')
    for event in events:
        if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            kind = event["name"].split(" ")[0]
            left, width = x(event["ts"]), max(x(event["ts"] + event["dur"]) - x(event["ts"]), 0.8)
            place_of = f'x="{left:.1f}" y="{y(event)}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect {place_of} fill="{COLOURS[kind]}" rx="1"/>')
            if len(event["name"]) * LETTER < width:
                colour = "#ffffff" if kind in DARK else "#1d2430"
                parts.append(f'<text x="{left + 3:.1f}" y="{y(event) + 11.5}" fill="{colour}">{event["name"]}</text>')
    came_from: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "stf":
            if event["ph"] != "s" and (before := came_from.get(event["id"])) and begin < before["ts"] < end:
                points = f"M{x(before['ts']):.1f} {y(before) + BAR / 2}L{x(event['ts']):.1f} {y(event) + BAR / 2}"
                parts.append(f'<path d="{points}" stroke="#b42318" stroke-width="0.8" opacity="0.7"/>')
            came_from[event["id"]] = event
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(sys.argv[1], int(sys.argv[3]), int(sys.argv[4])), encoding="utf-8")
