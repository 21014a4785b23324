"""What happens in one chaos run: all of it is drawn from the seed, and can be written down and read again."""

import dataclasses
import json
import math
import random

from job import HALF, LOCAL_STEPS, MODE_FLAGS, SAMPLES, TAKES_LOCAL_STEPS, flags_of_mode

MODES = list(MODE_FLAGS)
SHARDS, WORKERS = 2, 4
PROGRAMS = [f"server-{shard}" for shard in range(SHARDS)] + [f"worker-{rank}" for rank in range(WORKERS)]
STEPS = 400  # Of each worker, of 4 ms or more.
# One in so many jobs is one in which workers come and go, whose end is so many passes over the data. Two more workers
# come, of whom one has no place at first.
ELASTIC, EPOCHS = 3, 3
NEWCOMERS = [f"worker-{number}" for number in (WORKERS, WORKERS + 1)]
ELASTIC_FLAGS = ["--budget=job", "--stale_runs=return", "--min_workers=1", f"--max_workers={WORKERS + 1}"]
JOB_SAMPLES = EPOCHS * SAMPLES
# The version of a finished job, where a step is a version; elsewhere it depends on who was lost.
VERSIONS = dict.fromkeys(["bsp", "backup"], STEPS) | dict.fromkeys(["local_sgd", "diloco"], STEPS // LOCAL_STEPS)
LASTS_S = 1.5  # Events begin within this time.
EVENTS = (2, 7)
# Workers reach the chief over a link each, and the other server over one that they share. "follow" is the servers' own.
LINKS_TO = {"server-0": [*(f"worker-{rank}" for rank in range(WORKERS)), "follow"], "server-1": ["shard-1"]}
LINKS = [*LINKS_TO["server-0"][:WORKERS], "shard-1", "follow"]
JUMP_S = (0.5, 6 * 3600)  # Of a wall clock.
# Backwards it is less. The timers of Debian 12's gRPC wait, through Abseil, until a time of the wall clock, and stand
# still until it has come: a program whose clock goes back by an hour opens no lost connection again for that hour.
BACK_S = (0.3, 1.0)
# How a job sends pushes and weights, and how likely that is.
FORMS = {
    "float32": [],
    "bfloat16": HALF,
    "float16, kept": ["--wire_dtype=float16", "--weights_wire_dtype=float16", "--error_feedback"],
    "top-k": ["--compress=topk:0.1"],
    "top-k, bfloat16": ["--compress=topk:0.05", *HALF],
    "four bits": ["--wire_dtype=e3m0", "--weights_wire_dtype=bfloat16"],
    "four bits, kept": ["--wire_dtype=e3m0", "--error_feedback", "--error_feedback_decay=0.95"],
}
FORM_WEIGHTS = [4, 2, 1, 1, 2, 1, 1]
# These pushes carry their whole gradient: nothing is kept for a later one, which a rollback or a loss would change.
WHOLE = ["float32", "bfloat16", "four bits"]
ANY_FORM = 4  # One in so many of bsp's runs has any; the others one whose weights are compared (weights.py).
# The chief is out of everyone's reach for less than a lease. Else all workers are lost at once, and with them the job.
CHIEF_UNREACHABLE_S = 0.3


@dataclasses.dataclass
class Event:
    at_s: float  # After the job began to run.
    what: str
    target: str  # "server-0", "worker-2", a link, or "all" programs.
    for_s: float = 0.0  # Until it is undone, or the program is started again.
    amount: float = 0.0  # Of a delay or a jump, in seconds; of a late reset, in messages.
    # A worker's replacement: "same" flags, "newcomer" with the server's address alone, or "nobody". Of packets that are
    # dropped: those that go "there" or come "back" or "both".
    how: str = ""


@dataclasses.dataclass
class Plan:
    seed: int
    mode: str
    on_loss: str
    shared_memory: list[bool]  # Of each worker: its data may go through shared memory.
    events: list[Event]
    doubled: list[str] = dataclasses.field(default_factory=list)  # Links some of whose calls are made twice (relay.py).
    form: str = "float32"  # Of FORMS.
    elastic: bool = False  # Workers come and go.

    def budget(self):
        """A worker's flag, which says how much the job trains."""
        return f"--epochs={EPOCHS}" if self.elastic else f"--steps={STEPS}"

    def server_flags(self):
        """Of the job's mode, and of how it sends pushes and weights."""
        flags = [*flags_of_mode(self.mode), *MODE_FLAGS[self.mode], *FORMS[self.form]]
        flags += ELASTIC_FLAGS if self.elastic else []
        # Where only some elements of gradients are sent, workers apply momentum.
        if not self.form.startswith("top-k") or self.mode in TAKES_LOCAL_STEPS:
            return [*flags, "--optimizer=momentum"]
        delta = ["--weights_delta"] if self.form == "top-k, bfloat16" else []
        return [*flags, "--optimizer=sgd", "--momentum_correction=0.9", *delta]

    def text(self):
        return json.dumps(dataclasses.asdict(self), indent=1)

    def with_events(self, events):
        return dataclasses.replace(self, events=events)

    def undisturbed(self):
        return dataclasses.replace(self, events=[], doubled=[])


def read(text):
    fields = json.loads(text)
    fields["events"] = [Event(**event) for event in fields["events"]]
    return Plan(**fields)


def make(seed, mode=None):
    chance = random.Random(f"chaos {seed}")
    drawn = MODES[seed % len(MODES)]
    elastic = (seed + seed // len(MODES)) % ELASTIC == 0
    on_loss = chance.choice(["wait", "continue"])
    on_loss = "continue" if elastic else on_loss
    shared = [chance.random() < 0.5 for _ in range(WORKERS)]
    times = sorted(chance.uniform(0, LASTS_S) for _ in range(chance.randint(*EVENTS)))
    events = [_event(chance, at_s, on_loss) for at_s in times]
    doubled = [name for name in LINKS if name != "follow" and chance.random() < 0.3] if chance.random() < 0.5 else []
    mode = mode or drawn
    form = _form(chance, seed, mode, on_loss)
    if elastic:
        events = sorted(events + _newcomers(chance), key=lambda event: event.at_s)
    return Plan(seed, mode, on_loss, shared, _few_lost_at_once(events), doubled, form, elastic)


def _form(chance, seed, mode, on_loss):
    if mode == "bsp" and seed // len(MODES) % ANY_FORM > 0:
        return chance.choice(WHOLE) if on_loss == "wait" else "float32"
    return chance.choices(list(FORMS), weights=FORM_WEIGHTS)[0]


def _newcomers(chance):
    """Those who come to a job in which workers come and go, and what befalls some of them."""
    events = []
    for name in NEWCOMERS:
        how = chance.choice(["same", "newcomer"])
        events.append(Event(round(chance.uniform(0, LASTS_S), 3), "join worker", name, how=how))
        what = chance.choice(["", "kill worker", "end worker", "stop worker"])
        if what:
            at_s, for_s = events[-1].at_s + chance.uniform(0, 1), chance.uniform(0, 1.5)
            events.append(Event(round(at_s, 3), what, name, round(for_s, 3), how=chance.choice([how, "nobody"])))
    return events


def _event(chance, at_s, on_loss):
    kinds = {
        "kill server": 3,
        "kill worker": 4,
        "stop server": 2,
        "stop worker": 3,
        "end worker": 1,
        "partition": 3,
        "reset": 3,
        "reset later": 3,
        "delay": 2,
        "drop": 4,
        "clock": 4,
    }
    what = chance.choices(list(kinds), weights=list(kinds.values()))[0]
    event = Event(round(at_s, 3), what, "", round(chance.uniform(0, 1.5), 3))
    if what.endswith(" server"):
        event.target = f"server-{chance.randrange(SHARDS)}"
    elif what.endswith(" worker"):
        event.target = f"worker-{chance.randrange(WORKERS)}"
        event.how = chance.choice(["same", "newcomer"] + (["nobody"] if on_loss == "continue" else []))
    elif what == "clock":
        event.target = chance.choice(["all", *PROGRAMS])
        forwards = math.exp(chance.uniform(*map(math.log, JUMP_S)))
        event.amount = round(chance.choice([forwards, -chance.uniform(*BACK_S)]), 1)
    else:
        event.target = chance.choice(LINKS)
    if what == "delay":
        event.amount = round(chance.uniform(0.001, 0.1), 4)
    if what == "reset later":
        event.amount = chance.randint(1, 40)
    if what == "drop":
        event.target = chance.choice([*LINKS, *LINKS_TO])
        event.how = chance.choice(["there", "back", "both"])
        if event.target == "server-0":
            event.for_s = min(event.for_s, CHIEF_UNREACHABLE_S)
    return event


def _few_lost_at_once(events):
    """A job ends that has no worker left, unless workers come and go. So one of the first, the last, is left alone."""
    spared = f"worker-{WORKERS - 1}"
    for event in events:
        if event.target == spared and event.what not in ("reset", "clock"):
            event.target = "worker-0"
    return events
