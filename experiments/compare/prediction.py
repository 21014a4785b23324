"""The throughput that measured step times predict for a mode, when nothing but the mode's rule makes workers wait."""

from __future__ import annotations

import heapq

import numpy as np

from experiments.compare.modes import ALL_WAIT, NOBODY_WAITS, TAKES_LOCAL_STEPS, family
from experiments.compare.runs import Run, StepTimes

_SIMULATED_STEPS_PER_WORKER = 400  # So long ssp's clocks run.


def rounds_s(times: StepTimes, worker: int, count: int, steps: int) -> np.ndarray:
    """`count` rounds of `steps` batches, each with one exchange at its end; indices begin again as a batch's do."""
    compute_s, exchange_s = (np.resize(each[worker], (count, steps)) for each in (times.compute_s, times.exchange_s))
    return compute_s.sum(axis=1) + exchange_s[:, -1]


def batch_s(times: StepTimes, worker: int, index: int) -> float:
    """A batch that is exchanged; indices beyond the measured ones begin again."""
    index %= len(times.compute_s[worker])
    return times.compute_s[worker][index] + times.exchange_s[worker][index]


def predicted_samples_per_s(mode: str, times: StepTimes) -> float | None:
    """By the mode's rule alone: bsp has the slowest of N, asp all workers' rates, and so on."""
    name, argument = family(mode), mode.partition(":")[2]
    workers, batches = range(len(times.compute_s)), list(map(len, times.compute_s))
    steps = int(argument or 8) if name in TAKES_LOCAL_STEPS else 1
    if name in ALL_WAIT:
        count = max(min(batches) // steps, 1)
        slowest_s = np.max([rounds_s(times, worker, count, steps) for worker in workers], axis=0)
        return len(workers) * steps * times.samples / float(slowest_s.mean())
    if name in NOBODY_WAITS:
        each = (rounds_s(times, worker, max(batches[worker] // steps, 1), steps) for worker in workers)
        return steps * times.samples * sum(1 / float(own_s.mean()) for own_s in each)
    if name == "backup":
        return _backup_samples_per_s(times, int(argument or 1), min(batches))
    return _ssp_samples_per_s(times, int(argument or 3)) if name == "ssp" else None


def _backup_samples_per_s(times: StepTimes, spare: int, rounds: int) -> float | None:
    """Runs the steps: each takes the first N - b pushes. Who is late finishes its batch of the old step all the same,
    and begins with the new one only then: the next steps may be short of it.
    """
    count, used = len(times.compute_s), len(times.compute_s) - spare
    if used < 1:
        return None
    begun = [0] * count  # Batches of each worker.
    running: list[tuple[float, int, int]] = []  # (end, worker, the step that it is for).

    def begin(worker: int, now_s: float, step: int) -> None:
        heapq.heappush(running, (now_s + batch_s(times, worker, begun[worker]), worker, step))
        begun[worker] += 1

    for worker in range(count):
        begin(worker, 0.0, 0)
    now_s = 0.0
    for step in range(rounds):
        waiting: list[int] = []
        while len(waiting) < used:
            now_s, worker, begun_for = heapq.heappop(running)
            if begun_for == step:
                waiting.append(worker)
            else:
                begin(worker, now_s, step)
        for worker in waiting:
            begin(worker, now_s, step + 1)
    return used * times.samples * rounds / now_s


def _ssp_samples_per_s(times: StepTimes, bound: int) -> float:
    """Runs the clocks: a worker begins step c when the slowest has c - bound steps behind it."""
    clocks = [0] * len(times.compute_s)
    running = [(batch_s(times, worker, 0), worker) for worker in range(len(times.compute_s))]
    heapq.heapify(running)
    waiting: set[int] = set()
    now_s = 0.0
    while min(clocks) < _SIMULATED_STEPS_PER_WORKER:
        now_s, worker = heapq.heappop(running)
        clocks[worker] += 1
        waiting.add(worker)
        slowest = min(clocks)
        for each in [each for each in waiting if clocks[each] - slowest <= bound]:
            waiting.remove(each)
            heapq.heappush(running, (now_s + batch_s(times, each, clocks[each]), each))
    return sum(clocks) * times.samples / now_s


def predict(run: Run, runs: list[Run]) -> float | None:
    """For a run's mode, from the step times of bsp under its condition and seed where it ran, else from its own."""
    same = (run.kind, run.condition, run.seed)
    beside = (each for each in runs if each.done and family(each.mode) == "bsp")
    source = next((each for each in beside if (each.kind, each.condition, each.seed) == same), run)
    times = source.step_times or run.step_times
    return predicted_samples_per_s(run.mode, times) if times else None
