"""A program's wall clock, which can be made to jump; its steady clock stays as it is (wall_clock.cc)."""

import datetime
import re

from job import BIN

LIBRARY = BIN.parent / "lib" / "libps_wall_clock.so"
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) ", re.MULTILINE)  # Of a line of a log.
APART_S = 0.3  # A line that far outside of a run was written under a clock that had been moved.


def can_jump():
    return LIBRARY.exists()


class WallClock:
    """Of one place; whoever takes it later has the same one, as on one machine."""

    def __init__(self, path):
        self._path, self._moved_ns = path, 0
        path.write_bytes(bytes(8))

    def environment(self):
        return {"LD_PRELOAD": str(LIBRARY), "PS_WALL_CLOCK": str(self._path)} if can_jump() else {}

    def moved(self):
        return self._moved_ns / 1e9

    def jump(self, seconds):
        self._moved_ns += int(seconds * 1e9)
        with open(self._path, "r+b") as file:  # In place: the program has mapped it.
            file.write(self._moved_ns.to_bytes(8, "little", signed=True))


def lines_moved(text, began, ended):
    """How many lines of a log name a time that lies outside of the run; both ends in seconds since the epoch."""
    times = [datetime.datetime.fromisoformat(stamp).timestamp() for stamp in STAMP.findall(text)]
    return sum(not began - APART_S < time < ended + APART_S for time in times)
