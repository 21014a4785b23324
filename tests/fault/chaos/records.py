"""What servers and workers have written of a job: the only thing that the checker looks at."""

import dataclasses
import json


def lines_of(path):
    """The whole lines; the last may be cut off where the program was killed."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


@dataclasses.dataclass
class Served:
    """What one server applied in one generation of the job."""

    generation: int
    applied: list = dataclasses.field(default_factory=list)
    ended: bool = False  # The server wrote that this generation was over; else its last lines may be missing.

    def pushes(self):
        return {
            (rank, step) for apply in self.applied for rank, step in zip(apply["ranks"], apply["steps"], strict=True)
        }


@dataclasses.dataclass
class Pushed:
    """An exchange, as the worker that made it knows it."""

    worker: str
    generation: int
    incarnation: int
    rank: int
    step: int
    version: int
    answers: list  # Of each server.
    samples: int = 1  # 0: an empty contribution, of which servers record nothing.


def served_by(paths):
    """Of one server: what each generation applied, from the files of its processes."""
    served = []
    for path in paths:
        current = None
        for line in lines_of(path):
            if line["event"] == "start":
                current = Served(line["generation"])
                served.append(current)
            elif line["event"] == "apply" and current is not None:
                current.applied.append(line)
            elif line["event"] == "end" and current is not None:
                current.ended = True
            elif line["event"] == "dropped":
                raise AssertionError(f"{path.name}: {line['lines']} lines of the record were dropped")
    return sorted(served, key=lambda part: part.generation)


def pushed_by(path, shards):
    """The exchanges of one worker process."""
    pushed, generation, incarnation, samples = [], 0, 0, {}
    for line in lines_of(path):
        generation = line.get("generation", generation)
        incarnation = line.get("incarnation", incarnation)
        if line["event"] != "step":
            continue
        identity = (generation, incarnation, line["rank"], line["step"])
        samples[identity] = samples.get(identity, 0) + line["samples"]
        # An exchange of several batches has its times, and its answer, in the line of the last one.
        if "batch" in line and line["push_s"] + line["wait_s"] + line["pull_s"] == 0:
            continue
        answer = line.get("answer", "APPLIED")
        answers = answer if isinstance(answer, list) else [answer] * shards
        made = (line["rank"], line["step"], line["version"], answers, samples[identity])
        pushed.append(Pushed(path.stem, generation, incarnation, *made))
    return pushed
