"""A comparison from start to end: the runs that are not there yet, one after the other, each with a line on stderr."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.compare import tuning
from experiments.compare.commands import why_no_pytorch
from experiments.compare.folder import OutputFolder, check_same
from experiments.compare.plan import Estimate, Rates, RunSpec, make_plan
from experiments.compare.run import RESULTS, last_result, make_run, probe
from experiments.compare.settings import Settings, check_batch
from experiments.shared.job import Interrupted
from experiments.shared.machine import commit, file_hash, machine
from experiments.shared.processes import Stop

# Beyond this share of all cores the processors, not the waiting, may set the pace.
CPU_BOUND_SHARE = 0.70
# A run may take this many times as long as it is expected to, and so many seconds more.
_TIMEOUT_FACTOR = 5
_TIMEOUT_MORE_S = 120.0


class Comparison:
    """Makes the runs. Interrupted if it is to stop: what has ended stays."""

    def __init__(self, settings: Settings, arguments: Sequence[str], output: OutputFolder, stop: Stop) -> None:
        """Refused."""
        self._settings = settings
        self._output = output
        self._stop = stop
        self._results: list[dict[str, Any]] = []
        self._todo: list[RunSpec] = []
        self._number = 0
        self._plan = self._identity(arguments)
        begun = output.read_plan()
        if begun is not None:
            check_same(begun, self._plan, output.path)
            self._plan = begun
            say(f"going on with {output.path}: looking at its runs")
        self._begun = begun is not None
        self._ended = output.ended_runs() if self._begun else {}
        self._there = {_key(run_id) for run_id, kept in self._ended.items() if kept}

    def _identity(self, arguments: Sequence[str]) -> dict[str, Any]:
        head, dirty = commit()
        programs = [self._settings.bin / name for name in ("ps_server", "ps_worker")]
        return {
            "command": f"deploy/compare.sh {shlex.join(arguments)}".strip(),
            "commit": head,
            "dirty": dirty,
            # A comparison is not continued with other programs.
            "programs": {path.name: file_hash(path) for path in programs if path.exists()},
            "machine": machine(),
            "settings": self._settings.as_json(),
        }

    def run(self) -> None:
        """ProbeFailed; UsageError; Interrupted."""
        if not self._begun:
            self._prepare()
        settings = self._settings
        measured = self._plan["probe"] or {}
        self._estimate = Estimate(measured.get("samples"), measured.get("compute_s", 0.0))
        rates = Rates(settings)
        items = tuning.items_of(settings) if settings.tune else []
        found = self._output.read_tuning()
        self._todo = self._trials([item for item in items if item.name not in found]) + self._runs(rates)
        self._number = tuning.TRIALS * sum(item.name in found for item in items)
        self._total = self._number + len(self._todo)
        self._announce()
        self._tune(items, found, rates)
        for spec in self._runs(rates):
            self._make(spec)

    def _runs(self, rates: Rates) -> list[RunSpec]:
        pytorch = self._settings.references and not self._plan["no_pytorch"]
        return make_plan(self._settings, rates, self._plan["step_time_s"], pytorch)

    @property
    def ended(self) -> int:
        """How many reported runs have ended, in this process or before."""
        return len(self._reported)

    @property
    def failures(self) -> int:
        """How many of them failed or timed out."""
        return sum(result["status"] not in RESULTS for result in self._reported)

    @property
    def left(self) -> int | None:
        """How many runs are not there yet; None before that is known."""
        return len(self._left()) if "runs" in self._plan else None

    def _left(self) -> list[RunSpec]:
        return [spec for spec in self._todo if _key(spec.id) not in self._there]

    @property
    def _reported(self) -> list[dict[str, Any]]:
        return [result for result in self._results if result["kind"] != "tuning"]

    # ---- Before the first run

    def _prepare(self) -> None:
        """Measures, and writes plan.json: from here on the folder is this comparison's."""
        settings = self._settings
        step_time_s, measured = 0.0, None
        if not settings.command:
            say("measuring how long a batch takes")
            measured = probe(settings, self._output.path / "probe", self._stop)
            check_batch(settings, measured.samples)
            if not settings.real:
                step_time_s = settings.step_time_s or measured.step_time_s(self._plan["machine"]["cores"])
        self._plan |= {
            "step_time_s": step_time_s,
            "probe": None if measured is None else measured.as_json(),
            # Found once: a comparison that goes on is of the same runs.
            "no_pytorch": why_no_pytorch(settings) if settings.references else "",
        }
        self._plan["runs"] = [spec.id for spec in self._runs(Rates(settings))]
        if self._plan["no_pytorch"]:
            say(f"PyTorch's curve is left out: {self._plan['no_pytorch']}")
        self._output.write_plan(self._plan)

    def _announce(self) -> None:
        left = self._left()
        if self._begun:
            say(f"{self._total - len(left)} of {self._total} runs are there")
        bad = {_key(run_id) for run_id, kept in self._ended.items() if not kept}
        if again := [spec for spec in left if _key(spec.id) in bad]:
            say(f"{runs(len(again))} that failed, timed out or lost metrics: made again")
        if self._plan["step_time_s"] > 0:
            compute_ms = self._plan["probe"]["compute_s"] * 1000
            say(
                f"a batch takes {compute_ms:.2f} ms to compute with all workers, and is made to last "
                f"{self._plan['step_time_s'] * 1000:g} ms"
            )
            if self._plan["step_time_s"] < self._plan["probe"]["compute_s"]:
                say("warning: --step_time is shorter than that, so that workers are never idle and share the cores")
        about = f", about {_duration(self._estimate.left_s(left))}" if self._estimate.known else ""
        say(f"{runs(len(left))} to make{about}; Ctrl-C stops, and the same command goes on")

    # ---- Runs

    def _make(self, spec: RunSpec) -> dict[str, Any]:
        """The run's run.json; made now if it is not there yet."""
        self._number += 1
        self._todo = self._todo[1:]
        result = self._output.read_run(spec.id) if self._ended.get(spec.id) else None
        if result is None:
            if self._stop.requested:
                self._todo.insert(0, spec)
                raise Interrupted
            for other in self._ended:
                if other != spec.id and _key(other) == _key(spec.id):  # A trial with what is another rate now.
                    self._output.remove_run(other)
            folder = self._output.run_folder(spec.id)
            limit_s = self._settings.run_timeout_s or _TIMEOUT_MORE_S + _TIMEOUT_FACTOR * self._limit_base_s(spec)
            try:
                result, _ = make_run(spec, self._settings, folder, self._stop, limit_s)
            except Interrupted:
                self._todo.insert(0, spec)
                raise
            self._estimate.learn(spec, result["total_wall_s"])
            self._there.add(_key(spec.id))
            left = self._left()
            tail = f"; {_duration(self._estimate.left_s(left))} left" if left else ""
            say(_run_line(self._number, self._total, result, folder, tail))
            if result["status"] not in RESULTS:
                self._output.check_space()
        self._results.append(result)
        return result

    def _limit_base_s(self, spec: RunSpec) -> float:
        """Nothing is known of a script: it gets ten minutes and more."""
        return self._estimate.of(spec) if self._plan["probe"] else 600.0

    # ---- Tuning

    def _trials(self, items: list[tuning.Item]) -> list[RunSpec]:
        """As many as there will be; their rates are known only one after the other."""
        return [
            tuning.trial_spec(item, self._settings, number + 1, (item.center, 0.0), self._plan["step_time_s"])
            for item in items
            for number in range(tuning.TRIALS)
        ]

    def _tune(self, items: list[tuning.Item], found: dict[str, Any], rates: Rates) -> None:
        """Each item's result goes to tuning.json once it is there. `found` are those of before."""
        for item in items:
            if item.name not in found:
                found[item.name] = tuning.tune(item, self._settings, self._plan["step_time_s"], self._trial)
                self._output.write_tuning(found)
                say(tuning.line_of(item, found[item.name]))
            rates.set(item.name, tuning.rate_of(found[item.name]))

    def _trial(self, spec: RunSpec) -> tuning.Trial:
        result = self._make(spec)
        measured = last_result(self._output.run_folder(spec.id), "validation")
        return tuning.Trial(
            id=spec.id,
            learning_rate=spec.rate.learning_rate,
            momentum=spec.rate.momentum,
            status=result["status"],
            loss=measured.loss,
            accuracy=measured.accuracy,
        )


def _key(run_id: str) -> str:
    """A trial is known by its item and number: its rates are known only when those before it are."""
    return re.sub(r"^(tune-.*)-lr.*-(t\d+)$", r"\1-\2", run_id)


# ---- What the user sees


def print_anywhere() -> None:
    """A terminal that knows only ASCII gets question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


def runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _duration(seconds: float) -> str:
    """For people: "8 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def _cpu_share(result: dict[str, Any]) -> float:
    available_s = result["wall_s"] * result["cores"]
    return result["cpu_s"] / available_s if available_s > 0 else 0.0


def _run_line(number: int, total: int, result: dict[str, Any], folder: Path, left: str) -> str:
    parts = [result["status"], f"{result['total_wall_s']:.1f} s"]
    if result["status"] == "done":
        measured = last_result(folder, "validation" if result["validation_split"] > 0 else "test")
        if measured.accuracy is not None:
            parts.append(f"accuracy {measured.accuracy:.2%}")
        elif measured.loss is not None:
            parts.append(f"loss {measured.loss:.5g}")
        if result["step_time_s"] > 0 and _cpu_share(result) > CPU_BOUND_SHARE:
            parts.append(f"CPU-bound ({_cpu_share(result):.0%} of the cores)")
    else:
        parts.append(result["reason"])
    width = len(str(total))
    return f"{number:{width}} of {total}  {result['id']}: {', '.join(parts)}{left}"
