"""What happens in one chaos run: all of it is drawn from the seed, and can be written down and read again."""

import dataclasses
import json
import random

from job import LOCAL_STEPS, MODE_FLAGS

MODES = list(MODE_FLAGS)
SHARDS, WORKERS = 2, 4
STEPS = 400  # Of each worker, of 4 ms or more.
# Of the finished job, where a step is a version; elsewhere it depends on who was lost.
VERSIONS = dict.fromkeys(["bsp", "backup"], STEPS) | {"local_sgd": STEPS // LOCAL_STEPS}
LASTS_S = 1.5  # Events begin within this time.
EVENTS = (2, 7)
# Workers reach the chief over a link each, and the other server over one that they share; the last is the servers' own.
LINKS = [f"worker-{rank}" for rank in range(WORKERS)] + ["shard-1", "follow"]


@dataclasses.dataclass
class Event:
    at_s: float  # After the job began to run.
    what: str
    target: str  # "server-0", "worker-2", or a link.
    for_s: float = 0.0  # Until it is undone, or the program is started again.
    amount: float = 0.0  # Of a delay, in seconds; of a late reset, in messages.
    how: str = ""  # A worker's replacement: "same" flags, "newcomer" with the server's address alone, or "nobody".


@dataclasses.dataclass
class Plan:
    seed: int
    mode: str
    on_loss: str
    shared_memory: list[bool]  # Of each worker: its data may go through shared memory.
    events: list[Event]

    def text(self):
        return json.dumps(dataclasses.asdict(self), indent=1)

    def with_events(self, events):
        return dataclasses.replace(self, events=events)


def read(text):
    fields = json.loads(text)
    fields["events"] = [Event(**event) for event in fields["events"]]
    return Plan(**fields)


def make(seed, mode=None):
    chance = random.Random(f"chaos {seed}")
    drawn = MODES[seed % len(MODES)]
    on_loss = chance.choice(["wait", "continue"])
    shared = [chance.random() < 0.5 for _ in range(WORKERS)]
    times = sorted(chance.uniform(0, LASTS_S) for _ in range(chance.randint(*EVENTS)))
    events = [_event(chance, at_s, on_loss) for at_s in times]
    return Plan(seed, mode or drawn, on_loss, shared, _few_lost_at_once(events))


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
    }
    what = chance.choices(list(kinds), weights=list(kinds.values()))[0]
    event = Event(round(at_s, 3), what, "", round(chance.uniform(0, 1.5), 3))
    if what.endswith(" server"):
        event.target = f"server-{chance.randrange(SHARDS)}"
    elif what.endswith(" worker"):
        event.target = f"worker-{chance.randrange(WORKERS)}"
        event.how = chance.choice(["same", "newcomer"] + (["nobody"] if on_loss == "continue" else []))
    else:
        event.target = chance.choice(LINKS)
    if what == "delay":
        event.amount = round(chance.uniform(0.001, 0.1), 4)
    if what == "reset later":
        event.amount = chance.randint(1, 40)
    return event


def _few_lost_at_once(events):
    """A job ends that has no worker left. So one of them, the last, is left alone."""
    spared = f"worker-{WORKERS - 1}"
    for event in events:
        if event.target == spared and event.what != "reset":
            event.target = "worker-0"
    return events
