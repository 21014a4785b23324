"""Makes folders of comparisons with known truth, in the exact format of the programs, without running them.

A worker's batches last what the condition says; the modes' rules decide who waits. Everything follows from the seed.

    python3 tests/compare/make_runs.py OUTPUT
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_S = 0.004
PUSH_S = 0.0002
PULL_S = 0.0001
COMPUTE_S = 0.001
BATCH = 32
PARAMETERS = 12_730
CHIEF_ZERO_UNIX_S = 1_795_000_000.0
FIRST_PUSH_S = 0.5  # After the chief's start.
MODES = ("bsp", "ssp:2", "asp", "backup:1", "local_sgd:8", "easgd:8")


@dataclass
class Worker:
    """A simulated worker."""

    rank: int
    random: random.Random
    factor: float = 1
    step: int = 0
    version: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    dropped_pushes: int = 0


class Simulation:
    """One job: events in the order of time, each a push that arrives at the chief."""

    def __init__(self, mode: str, condition: str, seed: int, workers: int, batches: int, staleness: int | None = None):
        self.name, _, argument = mode.partition(":")
        self.argument = int(argument) if argument else 0
        self.local = self.argument if self.name in ("local_sgd", "easgd") else 1
        self.condition, self.seed, self.staleness = condition, seed, staleness
        self.workers = [
            Worker(
                rank, random.Random(f"{seed}/{rank}/{condition}"), 4 if condition == "straggler" and rank == 1 else 1
            )
            for rank in range(workers)
        ]
        self.left = batches
        self.growth = batches * BATCH / 5  # Samples by which what is missing in accuracy becomes an e-th.
        self.handed_out = 0
        self.version = 0
        self.held: list[tuple[float, Worker]] = []  # Pushes that wait for a version, or for slower workers.
        self.applies: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.queue: list[tuple[float, int, Worker]] = []
        self.eval_every = max(1, batches // 12)
        self.next_eval = self.eval_every
        self.noise = random.Random(f"accuracy/{mode}/{condition}/{seed}")
        self.seed_noise = random.Random(f"seed/{seed}").gauss(0, 0.004)

    def run(self) -> None:
        """Until all batches are used."""
        for worker in self.workers:
            self._begin(worker, 0.0)
        while self.queue:
            now_s, _, worker = heapq.heappop(self.queue)
            self._arrive(now_s, worker)
        self._release_all()
        self._evaluate(final=True)

    def _begin(self, worker: Worker, now_s: float) -> None:
        """The worker takes its batches of the next exchange, or nothing if none is left."""
        taken = min(self.local, self.left)
        if taken == 0:
            return
        self.left -= taken
        for place in range(taken):
            line = self._line(worker)
            now_s += line["forward_s"] + line["backward_s"] + line["idle_s"]
            line["t"] = now_s
            line["batch"] = self.handed_out
            self.handed_out += 1
            if place == taken - 1:
                line["push_s"] = PUSH_S
                now_s += PUSH_S
            worker.lines.append(line)
        heapq.heappush(self.queue, (now_s, worker.rank, worker))

    def _line(self, worker: Worker) -> dict[str, Any]:
        worker.samples += BATCH
        forward_s = COMPUTE_S / 3 * worker.random.uniform(0.9, 1.1) + (0.1 if not worker.lines else 0)
        backward_s = 2 * COMPUTE_S / 3 * worker.random.uniform(0.9, 1.1)
        factor = worker.factor
        if self.condition == "transient" and worker.random.random() < 0.05:
            factor = 10
        idle_s = max(0.0, STEP_S * factor - forward_s - backward_s)
        line = {"event": "step", "t": 0.0, "rank": worker.rank, "step": worker.step, "batch": 0}
        line |= {"version": worker.version, "loss": 2.3 / (1 + 0.01 * len(worker.lines)), "samples": BATCH}
        line |= {"forward_s": forward_s, "backward_s": backward_s, "push_s": 0.0, "wait_s": 0.0, "pull_s": 0.0}
        line["idle_s"] = idle_s
        if self.local == 1:
            del line["batch"]
            line["batch"] = 0
        return line

    def _arrive(self, now_s: float, worker: Worker) -> None:
        if self.name in ("bsp", "local_sgd", "backup"):
            self._arrive_at_barrier(now_s, worker)
            return
        self._apply(now_s, [worker])
        worker.step += 1
        self.held.append((now_s, worker))
        slowest = min(each.step for each in self.workers)
        for held_s, each in list(self.held):
            if self.name != "ssp" or each.step - slowest <= self.argument or self.left == 0:
                self.held.remove((held_s, each))
                self._go_on(each, held_s, now_s)

    def _arrive_at_barrier(self, now_s: float, worker: Worker) -> None:
        if self.name == "backup" and worker.version < self.version:
            worker.lines[-1]["answer"] = "STALE"
            worker.dropped_pushes += 1
            worker.step = self.version
            self._go_on(worker, now_s, now_s)
            return
        self.held.append((now_s, worker))
        wanted = len(self.workers) - (self.argument if self.name == "backup" else 0)
        if len(self.held) >= min(wanted, len(self.held) + len(self.queue)):
            self._release(now_s)

    def _release(self, now_s: float) -> None:
        held, self.held = self.held, []
        self._apply(now_s, sorted((worker for _, worker in held), key=lambda worker: worker.rank))
        for pushed_s, worker in held:
            worker.step = self.version
            self._go_on(worker, pushed_s, now_s)

    def _release_all(self) -> None:
        if self.held and self.name in ("bsp", "local_sgd", "backup"):
            self._release(max(held_s for held_s, _ in self.held))

    def _go_on(self, worker: Worker, pushed_s: float, now_s: float) -> None:
        line = worker.lines[-1]
        line["wait_s"] = now_s - pushed_s
        line["pull_s"] = PULL_S
        line["t"] = now_s + PULL_S
        worker.version = self.version
        self._begin(worker, now_s + PULL_S)

    def _apply(self, now_s: float, workers: list[Worker]) -> None:
        self.version += 1
        stale = [self.version - 1 - worker.version for worker in workers]
        if self.staleness is not None:
            stale = [min(self.staleness, self.version - 1)]
        samples = [sum(line["samples"] for line in worker.lines if line["step"] == worker.step) for worker in workers]
        self.applies.append(
            {"event": "apply", "t": now_s + FIRST_PUSH_S, "shard": 0, "version": self.version}
            | {"contributions": len(workers), "ranks": [worker.rank for worker in workers], "staleness": stale}
            | {"samples": samples, "position": 0, "apply_s": 0.0001, "learning_rate": 0.05}
        )
        self._evaluate(final=False)

    def _evaluate(self, final: bool) -> None:
        """Accuracy grows with the samples applied and suffers from staleness."""
        applied = sum(sum(apply["samples"]) for apply in self.applies)
        if not final and applied < self.next_eval * BATCH:
            return
        if self.evals and self.evals[-1]["version"] == self.version:
            return
        self.next_eval += self.eval_every
        stale = [value for apply in self.applies for value in apply["staleness"]]
        cost = 0.004 * sum(stale) / max(1, len(stale)) * (2 if self.staleness is not None else 1)
        accuracy = (
            0.885 - 0.785 * math.exp(-applied / self.growth) - cost + self.seed_noise + self.noise.gauss(0, 0.001)
        )
        self.evals.append(
            {"event": "eval", "t": self.applies[-1]["t"] + 0.02, "rank": 0, "step": self.workers[0].step}
            | {"version": self.version, "copied_t": self.applies[-1]["t"], "split": "test"}
            | {"loss": 0.3 - math.log(max(accuracy, 0.05)), "accuracy": round(accuracy, 4)}
        )


def write_run(folder: Path, simulation: Simulation, settings: dict[str, Any]) -> None:
    """The folder of a run that is done. Each worker's process started at another time than the chief's."""
    folder.mkdir(parents=True)
    chief = [{"event": "start", "t": 0.01, "shard": 0, "unix_time": CHIEF_ZERO_UNIX_S + 0.01, "mode": simulation.name}]
    chief += [*simulation.applies, {"event": "end", "t": 99.0, "shard": 0, "version": simulation.version}]
    _write_lines(folder / "server0.jsonl", chief)
    for worker in simulation.workers:
        began_s = 0.25 + 0.125 * worker.rank  # After the chief's start.
        lines: list[dict[str, Any]] = [
            {"event": "start", "t": 0.2, "rank": worker.rank, "unix_time": CHIEF_ZERO_UNIX_S + began_s + 0.2}
        ]
        events = worker.lines + (simulation.evals if worker.rank == 0 else [])
        for event in sorted(events, key=lambda event: event["t"]):
            shift_s = FIRST_PUSH_S - began_s if event["event"] == "step" else -began_s
            lines.append(event | {"t": event["t"] + shift_s})
        lines.append(
            {"event": "end", "t": 99.0, "rank": worker.rank, "steps": worker.step, "samples": worker.samples}
            | {"dropped_pushes": worker.dropped_pushes, "dropped_samples": worker.dropped_pushes * BATCH}
            | {"samples_per_s": 1.0, "status": "OK"}
        )
        _write_lines(folder / f"worker{worker.rank}.jsonl", lines)
    (folder / "run.json").write_text(json.dumps(settings))


def _write_lines(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def make_run(
    output: Path, mode: str, condition: str, seed: int, *, workers: int = 4, batches: int = 480, **changes: Any
) -> Path:
    """A run of kind comparison in `output`; `changes` replace what run.json would say. Returns its folder."""
    settings = {
        "id": f"{condition}-{mode.replace(':', '_')}-s{seed}",
        **{"kind": "comparison", "mode": mode, "condition": condition, "seed": seed, "workers": workers},
        **{"batch_size": BATCH, "epochs": 2, "learning_rate": 0.05, "momentum": 0.9, "tuned": False, "staleness": None},
        **{"status": "done", "reason": "", "began_unix": CHIEF_ZERO_UNIX_S, "wall_s": 6.0, "cpu_s": 2.4, "cores": 2},
        **{"parameters": PARAMETERS, "flags": {"server": [f"--mode={mode}"], "worker": [f"--seed={seed}"]}},
    } | changes
    simulation = Simulation(mode, condition, seed, workers, batches, settings["staleness"])
    simulation.run()
    folder = output / "runs" / settings["id"]
    write_run(folder, simulation, settings)
    return folder


def cut_off(path: Path, share: float) -> None:
    """Leaves the first part of a file, as a kill in the middle of a line does."""
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])


def write_plan(output: Path) -> None:
    """plan.json, with all runs that are there."""
    output.mkdir(parents=True, exist_ok=True)
    machine = {
        "host": "vm",
        "cpu": "Synthetic CPU <1 & 2>",
        "cores": 2,
        "memory_gib": 24,
        "kernel": "6.1",
        "python": "3.11",
    }
    plan = {
        "command": "deploy/compare.sh --workers=4 --seeds=2",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        **{"dirty": False, "machine": machine, "settings": {"workers": 4}, "step_time_s": STEP_S},
        "runs": [path.parent.name for path in sorted(output.glob("runs/*/run.json"), key=_made)],
    }
    (output / "plan.json").write_text(json.dumps(plan))


def _made(path: Path) -> int:
    return path.stat().st_mtime_ns


def make_comparison(
    output: Path,
    modes: tuple[str, ...] = MODES,
    conditions: tuple[str, ...] = ("even", "straggler", "transient"),
    seeds: tuple[int, ...] = (1, 2, 3),
    staleness: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32),
    **options: Any,
) -> None:
    """A whole comparison."""
    for seed in seeds:
        for condition in conditions:
            for mode in modes:
                make_run(output, mode, condition, seed, **options)
        for value in staleness:
            options_of_one = {"workers": 1, "kind": "staleness", "staleness": value, "id": f"staleness_{value}-s{seed}"}
            make_run(output, "asp", "even", seed, **(options | options_of_one))
        if staleness:
            one = {"workers": 1, "kind": "reference"}
            make_run(output, "bsp", "even", seed, **(options | one | {"id": f"reference_1xB-s{seed}"}))
            wide = one | {"id": f"reference_NxB-s{seed}", "batch_size": 4 * BATCH}
            make_run(output, "bsp", "even", seed, **(options | wide))
            make_run(output, "bsp", "even", seed, **(options | wide | {"id": f"reference_PyTorch-s{seed}"}))
    write_plan(output)


if __name__ == "__main__":
    make_comparison(Path(sys.argv[1]))
