"""Carries out one plan with real programs, and says what is wrong with what comes of it."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import subprocess
import tempfile
import time

import clock
import doubles
import packets
import plan as plans
import weights
from causes import Causes
from judge import judge
from places import Server, Worker
from proxy import Link, Proxies

LIMIT_S = 60  # For the job to end after the last event. All limits of the programs' flags are shorter.


class Run:
    def __init__(self, plan, folder):
        self.plan, self.folder = plan, pathlib.Path(folder)
        self.links, self.found, self.served = {}, [], []
        self.servers = [Server(self, shard) for shard in range(plans.SHARDS)]
        newcomers = len(plans.NEWCOMERS) if plan.elastic else 0
        self.workers = [Worker(self, number) for number in range(plans.WORKERS + newcomers)]
        self.places = {place.name: place for place in self.servers + self.workers}
        self.causes, self.relay, self.drops = None, None, packets.Drops() if packets.are_own() else None
        self.began = time.time()

    def wait_until(self, what, true, limit_s=30):
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {limit_s} s for {what}")
            time.sleep(0.01)

    def carry_out(self):
        with Proxies() as proxies, self.drops or contextlib.nullcontext():
            try:
                self.links = {name: Link(proxies) for name in plans.LINKS}
                self.causes = Causes(self.places, self.links, self.drops)
                self._start()
                self._let_things_happen()
            except TimeoutError as late:
                self.found.append(str(late))
            finally:
                self._stop()
        judge(self)
        return self.found

    def _start(self):
        self.servers[0].start()
        self.servers[0].await_address()
        self.links["follow"].lead_to(self.servers[0].address)
        self.servers[1].start()
        self.servers[1].await_address()
        self._lead_workers()
        for worker in self.workers[: plans.WORKERS]:
            worker.start()
        running = "the job is running"
        self.wait_until("the job to run", lambda: running in self.servers[0].program.errors())

    def _lead_workers(self):
        """Workers' links lead to the servers, or to a relay in front of them."""
        doubled = self.plan.doubled if doubles.can_be() else []
        if doubled:
            self.relay = doubles.Relay(self, self.plan.seed, [server.address for server in self.servers])
        for server in self.servers:
            for name in set(plans.LINKS_TO[server.name]) - {"follow"}:
                led = self.relay.address(server.address) if name in doubled else server.address
                self.links[name].lead_to(led)

    def _let_things_happen(self):
        began = time.monotonic()
        events = list(self.plan.events)
        last = began
        while not self._is_over():
            now = time.monotonic()
            while events and events[0].at_s <= now - began:
                self.causes.cause(events.pop(0), now)
                last = now
            if self.causes.undo_until(now):
                last = now
            self._replace(now)
            if not events and not self.causes.pending() and now - last > LIMIT_S:
                waiting = [line for line in self.servers[0].program.errors().splitlines() if "waiting" in line]
                raise TimeoutError(f"the job had not ended {LIMIT_S} s after the last event; {waiting[-1:]}")
            time.sleep(0.01)

    def _is_over(self):
        ended = all(not server.runs() and server.start_at is None for server in self.servers)
        return ended and all(not worker.runs() for worker in self.workers)

    def _replace(self, now):
        for place in self.places.values():
            if place.start_at is not None and place.start_at <= now:
                place.start()
        for worker in self.workers:
            if worker.starts == 0 or worker.runs() or worker.start_at is not None or worker.how == "nobody":
                continue
            if worker.left_early():
                worker.start_at = now

    def _stop(self):
        for place in self.places.values():
            if place.runs():
                place.program.process.send_signal(signal.SIGCONT)
                place.program.kill()
        if self.relay is not None:
            self.found += self.relay.end()

    def counted(self):
        """That the events of some kinds have come about, by what can be counted of them."""
        logs = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.err"))
        return {
            "packets dropped": self.drops.packets if self.drops is not None else 0,
            "calls doubled": len(self.relay.doubled()) if self.relay is not None else 0,
            "lines under a moved clock": clock.lines_moved(logs, self.began, time.time()),
        }

    def said(self):
        """All logs and records, by file name."""
        files = [path for path in sorted(self.folder.iterdir()) if path.suffix in (".err", ".out", ".jsonl")]
        return {path.name: path.read_text(errors="replace") for path in files}


@dataclasses.dataclass
class Outcome:
    """What is wrong with a run, and what it came to."""

    found: list
    model: bytes | None = None
    hashes: set = dataclasses.field(default_factory=set)
    happened: int = 0  # Of the plan's events: the others came after the end, or could not be played.
    counted: dict = dataclasses.field(default_factory=dict)
    compared: str = ""  # What the weights were compared with.
    said: dict = dataclasses.field(default_factory=dict)  # All logs and records, by file name.


def run(plan, undisturbed=None):
    """`undisturbed`: the outcome of the same job without events, where it must come to the same weights."""
    with tempfile.TemporaryDirectory(prefix="ps-chaos-") as folder:
        one = Run(plan, folder)
        outcome = Outcome([])
        try:
            outcome.found = one.carry_out()
            outcome.model, outcome.hashes = weights.model(one.folder), weights.hashes(one.folder)
            if not outcome.found:
                weights.compare(one, outcome, undisturbed)
        except (OSError, subprocess.SubprocessError, AssertionError) as problem:
            outcome.found.append(f"{type(problem).__name__}: {problem}")
        happened = one.causes.happened if one.causes is not None else []
        outcome.happened = sum(event["happened"] for event in happened)
        outcome.counted = one.counted()
        outcome.said = one.said() | {"happened": json.dumps(happened, indent=1)}
        return outcome
