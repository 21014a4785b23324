"""When, in how long and from which sources what a page rests on was made: jobs, and programs run by themselves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from machine import commit


@dataclass(frozen=True)
class Made:
    """One job, or program."""

    date: str  # As in 2026-01-31.
    sources: str  # The commit; empty if it was not stored.
    seconds: float | None  # None if that was not stored.
    kept: bool = False  # An earlier run has made it.


def made_now(seconds: float) -> Made:
    """What has just ended, after so long."""
    return Made(_date(time.time()), sources(), round(seconds, 3))


def kept(stored: Mapping[str, Any], file: Path, seconds: float | None = None) -> Made:
    """What as_stored() has left among `stored`, the file's content. Without that, the file's time and `seconds`."""
    with contextlib.suppress(KeyError, TypeError):
        made = stored["made"]
        return Made(made["date"], made["commit"], made["seconds"], kept=True)
    return Made(_date(file.stat().st_mtime), "", seconds, kept=True)


def as_stored(made: Made) -> dict[str, Any]:
    """To be written beside what was made."""
    return {"made": {"date": made.date, "commit": made.sources, "seconds": made.seconds}}


def read_mark(mark: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of a program's mark, if what it marks is of this identity."""
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
        return found if all(found[key] == value for key, value in identity.items()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def together(all_made: Collection[Made]) -> str:
    """How long they took, and which are of an earlier run. Empty of none."""
    if not all_made:
        return ""
    seconds = sum(made.seconds or 0 for made in all_made)
    untold = sum(made.seconds is None for made in all_made)
    said = f"Its {len(all_made)} job{'s' * (len(all_made) > 1)} took {seconds / 60:.1f} minutes together"
    said += f" (without {untold} whose time is not known)." if untold else "."
    earlier = [made for made in all_made if made.kept]
    if not earlier:
        return said
    dates = sorted({made.date for made in earlier})
    commits = sorted({made.sources for made in earlier if made.sources})
    were = f"{len(earlier)} of {len(all_made)} jobs {'were' if len(earlier) > 1 else 'was'} kept from {dates[0]}"
    were += f" to {dates[-1]}" if len(dates) > 1 else ""
    were += f" (sources {', '.join(commits)})" if commits else ""
    return f"{said} {were}."


@cache
def sources() -> str:
    """The commit that this runs from, shortened."""
    head, changed = commit()
    return head[:12] + (" with changes" if changed else "")


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(unix_s))
