"""Links whose calls a relay between proxy and server makes twice (relay.py)."""

import importlib.util
import json
import pathlib
import re
import sys

from job import Program

CHANCE = 0.3  # Of a call to be doubled.
RELAY = pathlib.Path(__file__).with_name("relay.py")


def can_be():
    return importlib.util.find_spec("grpc") is not None


class Relay:
    """One process for all links of a run; it ends with it."""

    def __init__(self, run, seed, targets, chance=CHANCE):
        self._log = run.folder / "relay.jsonl"
        arguments = [str(self._log), str(chance), str(seed), *targets]
        self.program = Program(run.folder, "relay", [sys.executable, "-B", str(RELAY), *arguments])
        printed = self.program.out.read_text
        run.wait_until("the relay", lambda: printed().count("\n") == len(targets) or not self.program.runs())
        if not self.program.runs():
            raise TimeoutError(f"the relay did not start: {self.program.errors()[-500:]}")
        self._addresses = dict(re.findall(r"relay (\S+) (\S+)", printed()))

    def address(self, target):
        return self._addresses[target]

    def doubled(self):
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def end(self):
        """What is wrong with it; empty if nothing is."""
        if not self.program.runs():
            return [f"the relay has ended: {self.program.errors()[-500:]}"]
        self.program.kill()
        return []
