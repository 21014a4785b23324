"""A made-up job, second by second, in the shape of the page's API: plausible, seeded, and bent by whoever tests."""

from __future__ import annotations

import math
import random
import time
from typing import Any

Json = dict[str, Any]
POINTS_MOST = 2048
STALENESS_BOUNDS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
SECONDS_BOUNDS = [
    round(digit * 10.0**decade, 9) for decade in range(-4, 2) for digit in (1, 2.5, 5) if digit * 10.0**decade <= 50
]
PHASES = ("forward", "backward", "push", "wait", "pull", "other")


def text_number(value: float) -> float | str:
    """What JSON cannot say as a number is a string."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def loss_range(batches: int, loss: tuple[float, float, float]) -> Json:
    """The least, mean and largest of so many batches."""
    least, mean, largest = (text_number(each) for each in loss)
    return {"batches": batches, "mean": mean, "least": least, "largest": largest}


class FixtureSeries:
    """At most so many points; when full, neighbours merge and keep least, mean and largest."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self.merges = 0

    def add(self, point: list[float]) -> None:
        """Adds one of t, steps, samples, least, mean, largest."""
        self.points.append(point)
        if len(self.points) > POINTS_MOST:
            pairs = zip(self.points[0::2], self.points[1::2], strict=False)
            self.points = [[*b[:3], min(a[3], b[3]), (a[4] + b[4]) / 2, max(a[5], b[5])] for a, b in pairs]
            self.merges += 1

    def since(self, cursor: tuple[int, int] | None) -> Json:
        """All points, or those since the cursor's count, the last one again."""
        news = self.points if cursor is None or cursor[1] != self.merges else self.points[max(0, cursor[0] - 1) :]
        reset = news is self.points
        return {"reset": reset, "points": [[text_number(each) for each in point] for point in news]}


class FixtureJob:
    """Four workers on two servers, of which one worker may be told to be slow or to stop."""

    def __init__(self, workers: int = 4, seed: int = 1, mode: str = "bsp") -> None:
        self.random = random.Random(seed)
        self.mode = mode
        self.job_name = "digits"
        self.names = [f"w{rank}" for rank in range(workers)]
        self.hosts = [f"host-{'abcd'[rank % 4]}" for rank in range(workers)]
        self.phase = "running"
        self.failure = ""
        self.checkpoint_failure = ""
        self.straggler: int | None = None
        self.stopped: int | None = None
        self.stopped_s = 0.0
        self.loss_is_nan = False
        self.runs: dict[str, dict[str, FixtureSeries]] = {}
        self.t = 0.0
        self.step = 0
        self.samples = 0
        self.all_steps = 4690
        self.series: dict[str, FixtureSeries] = {}
        self.events: list[Json] = []
        self.evaluations: dict[str, Json] = {}
        self.seconds = [dict.fromkeys(PHASES, 0.0) for _ in range(workers)]
        self.held_up = [0.0] * workers
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.slowest: list[Json] = []
        self.unix_ms = int(time.time() * 1000)
        for rank, name in enumerate(self.names):
            self.event("joined", f"rank {rank} ({name} on {self.hosts[rank]}) joined")

    def event(self, kind: str, text: str) -> None:
        """Adds one that happened now."""
        self.events.append({"number": len(self.events) + 1, "unix_ms": self.unix_ms, "kind": kind, "text": text})

    def _add(self, name: str, least: float, mean: float, largest: float) -> None:
        series = self.series.setdefault(name, FixtureSeries())
        series.add([self.t, self.step, self.samples, least, mean, largest])

    def loss_now(self) -> tuple[float, float, float]:
        """The least, the mean and the largest of the last second."""
        if self.loss_is_nan:
            return math.nan, math.nan, math.nan
        mean = 0.25 + 2.05 * math.exp(-self.step / 420) + 0.03 * self.random.gauss(0, 1) / (1 + self.step / 400)
        spread = 0.12 + 0.5 * math.exp(-self.step / 500)
        return max(0.02, mean - spread * self.random.uniform(0.5, 1)), mean, mean + spread * self.random.uniform(0.6, 2)

    def tick(self, seconds: float = 1.0) -> None:
        """So much time passes."""
        self.t += seconds
        self.unix_ms += int(seconds * 1000)
        if self.phase != "running":
            return
        if self.stopped is not None:
            self.stopped_s += seconds
            self.held_up[self.stopped] += seconds
            self._add("samples_per_s", 0, 0, 0)
            self._add("steps_per_s", 0, 0, 0)
            return
        rate = 12.3 * self.random.uniform(0.93, 1.05) * (0.45 if self.straggler is not None else 1)
        steps = max(1, round(rate * seconds))
        self.step += steps
        self.samples += steps * 64 * len(self.names)
        for rank, times in enumerate(self.seconds):
            slow = rank == self.straggler
            forward, backward = (0.052, 0.094) if slow else (0.018, 0.031)
            busy = {"forward": forward, "backward": backward, "push": 0.004, "pull": 0.005, "other": 0.003}
            busy["wait"] = max(0.002, seconds / steps - sum(busy.values()))
            for phase, value in busy.items():
                times[phase] += value * steps * self.random.uniform(0.95, 1.05)
            self.held_up[rank] += (0.09 * steps if slow else 0.0015 * steps) * self.random.uniform(0.8, 1.2)
        self.staleness[0 if self.mode == "bsp" else min(3, self.random.randrange(5))] += steps * len(self.names)
        self._add("loss", *self.loss_now())
        self._add("samples_per_s", *[steps * 64 * len(self.names) / seconds * by for by in (0.9, 1, 1.1)])
        self._add("steps_per_s", *[steps / seconds * by for by in (0.9, 1, 1.1)])
        self._add("learning_rate", *[0.1 * 0.5 ** (self.step // 1500)] * 3)
        if int(self.t) % 8 == 0:
            self.evaluate()
        if int(self.t) % 30 == 0:
            self.event("checkpoint", f"checkpoint of version {self.step:,} is on disk")
        if self.random.random() < 0.06:
            rank = self.random.randrange(len(self.names))
            took = self.random.uniform(0.9, 3)
            times = {"forward": 0.02, "backward": 0.03, "push": took - 0.2, "wait": 0.1, "pull": 0.05, "other": 0.0}
            self.slowest.append(
                {"rank": rank, "step": self.step, "seconds": took, "times": times, "unix_ms": self.unix_ms}
            )
            self.slowest = sorted(self.slowest, key=lambda each: -each["seconds"])[:32]
            self.event("slow step", f"step {self.step:,} of rank {rank} took {took:.1f} s: push {took - 0.2:.1f} s")

    def evaluate(self) -> None:
        """The test split is looked at."""
        accuracy = 0.96 - 0.86 * math.exp(-self.step / 380)
        loss = 0.28 + 2 * math.exp(-self.step / 400)
        self._add("loss.test", loss, loss, loss)
        self._add("accuracy.test", accuracy, accuracy, accuracy)
        self.evaluations["test"] = {
            "split": "test",
            "step": self.step,
            "version": self.step,
            "loss": loss,
            "accuracy": accuracy,
            "samples": self.samples,
        }

    def _headline(self) -> str:
        if self.phase != "running":
            return f"{self.phase} at step {self.step:,}" + (f": {self.failure}" if self.failure else "")
        if self.step == 0:
            return f"no step yet, running for {self.t:.0f} s"
        line = f"step {self.step:,} of {self.all_steps:,}"
        if self.stopped is None:
            return f"{line}, 12.3 steps/s, 4 min left"
        return f"{line}; {self.stuck() or self._waits()}"

    def _waits(self) -> str:
        rank = self.stopped or 0
        waits = f"{self.stopped_s:.1f} s"
        return f"waiting {waits} for rank {rank} on {self.hosts[rank]}, last heard from {waits} ago"

    def stuck(self) -> str:
        """Who is missing, after ten seconds."""
        if self.stopped is None or self.stopped_s < 10:
            return ""
        rank = self.stopped
        who = f"rank {rank} ({self.names[rank]} on {self.hosts[rank]}, last heard from {self.stopped_s:.1f} s ago)"
        return f"no version for {self.stopped_s:.1f} s; waiting for {who}"

    def _worker(self, rank: int) -> Json:
        per_worker = self.step * 64
        loss = self.loss_now()
        stopped = rank == self.stopped
        return {
            "rank": rank,
            "name": self.names[rank],
            "host": self.hosts[rank],
            "state": "suspect" if stopped and self.stopped_s > 5 else "live",
            "busy_with": "",
            "step": self.step,
            "last_heard_s": self.stopped_s if stopped else self.random.uniform(0, 0.9),
            "held_up_s": self.held_up[rank],
            "steps_per_s": 0.0 if stopped else 12.3,
            "slow": self.mode in ("asp", "easgd") and rank == self.straggler,
            "steps": self.step,
            "samples": per_worker,
            "loss": loss_range(12, loss) if self.step else None,
            "seconds": dict(self.seconds[rank]) if self.step else None,
            "sent_bytes": self.step * 407080,
            "received_bytes": self.step * 407080,
            "link": "tcp" if rank else "shared_memory",
            "device": "cpu",
            "dropped_reports": 0,
        }

    def _shard(self, shard: int) -> Json:
        def spread(middle: int) -> Json:
            counts = [0] * (len(SECONDS_BOUNDS) + 1)
            for away, share in ((-1, 0.2), (0, 0.6), (1, 0.15), (2, 0.05)):
                counts[middle + away] = round(self.step * 4 * share)
            return {"counts": counts, "sum": self.step * 0.01}

        return {
            "shard": shard,
            "address": f"10.0.0.{7 + shard}:5001",
            "version": self.step,
            "learning_rate": 0.1,
            "updates": self.step,
            "answers": {"applied": self.step * 4, "duplicate": 2, "stale": 0, "fenced": 0},
            "applied_samples": self.samples,
            "dropped_samples": 0,
            "inflight_bytes": self.random.randrange(0, 900_000),
            "inflight_limit_bytes": 1 << 30,
            "parked_calls": 3,
            "parked_calls_limit": 1024,
            "version_buffers": 2,
            "version_buffers_limit": 4,
            "weight_bytes": 203540,
            "links": [{"link": "tcp", "received_bytes": self.step * 610000, "sent_bytes": self.step * 610000}],
            "push_seconds": spread(4),
            "apply_seconds": spread(2),
            "push_wait_seconds": spread(7),
            "pull_wait_seconds": spread(6),
            "checkpoint_seconds": spread(5),
            "refused_calls": {"RESOURCE_EXHAUSTED": 2} if shard else {},
            "checkpoint_age_s": self.t % 30,
            "checkpoint_failures": 0,
            "clock_gap_steps": 0,
            "waiting_for": "",
        }

    def job(self) -> Json:
        """As of /api/v1/job."""
        gathering = self.phase == "gathering"
        loss = self.loss_now()
        waits = [self.stopped] if self.stopped is not None else []
        return {
            "job": self.job_name,
            "version": "0.1.0",
            "generation": 7,
            "phase": self.phase,
            "failure": self.failure,
            "mode": self.mode,
            "optimizer": "sgd",
            "num_workers": len(self.names),
            "min_workers": 0,
            "max_workers": 0,
            "standbys": 0,
            "num_shards": 2,
            "parameters": 101770,
            "headline": "gathering: ranks 0 to 3 are missing" if gathering else self._headline(),
            "waiting_for": "ranks 0 to 3 are missing" if gathering else "",
            "stuck": self.stuck(),
            "progress": {
                "step": self.step,
                "all_steps": 0 if gathering else self.all_steps,
                "samples": self.samples,
                "steps_per_s": 12.3 if self.step else 0,
                "samples_per_s": 12.3 * 64 * len(self.names) if self.step else 0,
                "left_s": max(0, (self.all_steps - self.step) / 12.3) if self.step else 0,
                "median_step_s": 0.081 if self.step else 0,
                "since_version_s": self.stopped_s or 0.1,
                "running_s": 0 if gathering else self.t,
                "loss": loss_range(49, loss) if self.step else None,
                "evaluations": list(self.evaluations.values()),
                "waits_for": waits,
                "waits_s": self.stopped_s,
            },
            "hyperparameters": {"learning_rate": 0.1, "momentum": 0.9},
            "workers": []
            if self.phase in ("gathering", "finished")
            else [self._worker(rank) for rank in range(len(self.names))],
            "shards": [self._shard(shard) for shard in range(2)],
            "staleness": {"bounds": STALENESS_BOUNDS, "counts": self.staleness},
            "seconds_bounds": SECONDS_BOUNDS,
            "checkpoints": {
                "path": "ckpt/version-900",
                "version": self.step // 30 * 30,
                "age_s": self.t % 30,
                "failure": self.checkpoint_failure,
                "writing_s": 0,
                "writing": "",
            },
            "slowest": self.slowest,
            "counts": {"rollbacks": 0, "worker_losses": 0, "checkpoint_failures": 0, "dropped_reports": 0},
            "runs": sorted(self.runs),
            "unix_ms": self.unix_ms,
        }
