"""The runs of a comparison: how many, in which order, with which flags."""

from __future__ import annotations

import math
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.compare import commands, tuning
from experiments.compare.modes import Mode
from experiments.compare.plan import Estimate, Rates, RunSpec, make_plan, slowdown
from experiments.compare.settings import Settings, parse
from experiments.shared.job import Job, Part
from experiments.shared.processes import Stop


def plan_of(*flags: str) -> tuple[Settings, list[RunSpec]]:
    settings = parse(flags)
    return settings, make_plan(settings, Rates(settings), 0.008)


class PlanTest(unittest.TestCase):
    def test_counts_and_order(self) -> None:
        _, runs = plan_of()
        ids = [run.id for run in runs]
        assert len(ids) == 2 * (6 * 3 + 2 + 7)
        assert len(set(ids)) == len(ids)
        assert ids[:3] == ["even-bsp-s1", "even-ssp_2-s1", "even-asp-s1"]
        assert ids[6] == "straggler-bsp-s1"
        assert ids[18:22] == ["reference_1xB-s1", "reference_NxB-s1", "staleness_0-s1", "staleness_1-s1"]
        assert ids[27] == "even-bsp-s2"
        assert ids == [run.id for run in plan_of()[1]]

    def test_fewer(self) -> None:
        _, runs = plan_of("--modes=asp", "--conditions=transient", "--seeds=1", "--staleness=", "--no-references")
        assert [run.id for run in runs] == ["transient-asp-s1"]

    def test_references(self) -> None:
        _, runs = plan_of("--workers=3", "--batch_size=10", "--learning_rate=0.3")
        one, many = (next(run for run in runs if run.id == f"reference_{name}-s1") for name in ("1xB", "NxB"))
        assert (one.workers, one.batch_size, one.mode) == (1, 10, Mode("asp"))
        assert math.isclose(one.rate.learning_rate, 0.1)
        assert (many.workers, many.batch_size, many.mode) == (1, 30, Mode("bsp"))
        assert (many.rate.learning_rate, many.step_time_s) == (0.3, 0.024)

    def test_experiment_flags(self) -> None:
        _, runs = plan_of()
        flags = {run.id: run.experiment_flags for run in runs}
        assert flags["even-asp-s1"] == ["--experiment_step_time=8ms"]
        assert flags["straggler-asp-s1"] == ["--experiment_step_time=8ms", "--experiment_straggler=3:4"]
        assert flags["transient-asp-s2"] == ["--experiment_step_time=8ms", "--experiment_delays=0.05:10"]
        assert flags["staleness_8-s1"] == ["--experiment_staleness=8"]
        settings = parse(["--real"])
        real = make_plan(settings, Rates(settings), 0)
        assert real[0].experiment_flags == []

    def test_command_lines(self) -> None:
        settings, runs = plan_of("--servers=2", "--momentum=0")
        run = next(run for run in runs if run.id == "even-ssp_2-s2")
        server = commands.server_flags(run, settings)
        for flag in ("--mode=ssp", "--staleness=2", "--optimizer=sgd", "--budget=job"):
            assert flag in server
        worker = commands.worker_flags(run, settings)
        for flag in ("--seed=2", "--batch_size=64", "--eval_every=0.25", "--experiment_step_time=8ms"):
            assert flag in worker

    def test_who_is_who_is_said_to_each_process(self) -> None:
        started: dict[str, list[str]] = {}

        def start(job: Job, name: str, command: list[str], environment: object = None) -> Any:
            started[name] = command

        with mock.patch.object(Job, "_child", start), mock.patch.object(Job, "_address", return_value="127.0.0.1:77"):
            Job(Path("/o"), Stop()).start(Path("/b"), [Part(["--x"])] * 2, [Part(["--y"], ["nice"], metrics=False)] * 4)
        flags = ["--num_workers=4", "--num_shards=2", "--shard=1", "--chief=127.0.0.1:77", "--x"]
        assert started["server1"] == ["/b/ps_server", "--metrics_file=/o/server1.jsonl", *flags]
        assert not any(flag.startswith("--chief") for flag in started["server0"])
        assert started["worker3"] == ["nice", "/b/ps_worker", "--server=127.0.0.1:77", "--rank=3", "--y"]

    def test_no_activation_without_a_hidden_layer(self) -> None:
        for model, given in (("mlp:784,10", False), ("mlp:784,32,10", True)):
            settings, runs = plan_of(f"--model={model}")
            assert ("--activation=relu" in commands.worker_flags(runs[0], settings)) == given

    def test_script_command(self) -> None:
        settings, runs = plan_of("--command=/usr/bin/python3 train.py --width=3", "--modes=bsp,asp")
        assert [run.id for run in runs] == ["even-bsp-s1", "even-asp-s1", "even-bsp-s2", "even-asp-s2"]
        command = commands.script_command(runs[1], settings, Path("/o"))
        assert command[:3] == ["/usr/bin/python3", "-m", "psgrad.run"]
        flags = ["--workers=4", "--servers=1", "--metrics_file=/o/server.jsonl", "--mode=asp"]
        assert command[3:] == [*flags, "train.py", "--width=3"]
        environment = commands.script_environment(runs[1], settings, Path("/o"))
        assert environment["PS_METRICS_FILE"] == "/o/worker{rank}.jsonl"


class EstimateTest(unittest.TestCase):
    def test_learns(self) -> None:
        _, runs = plan_of()
        estimate = Estimate(60_000, 0.002)
        before = estimate.left_s(runs)
        estimate.learn(runs[0], 2 * estimate.of(runs[0]))
        assert math.isclose(estimate.left_s(runs), 2 * before)

    def test_who_waits_is_slower(self) -> None:
        _, runs = plan_of()
        by_id = {run.id: slowdown(run) for run in runs}
        assert by_id["straggler-bsp-s1"] == 4
        assert by_id["straggler-asp-s1"] < 1.5
        assert by_id["transient-asp-s1"] < by_id["transient-bsp-s1"]


class TuningTest(unittest.TestCase):
    def search(self, best_effective: float, best_momentum: float) -> tuple[dict[str, Any], list[RunSpec]]:
        settings = parse(["--learning_rate=0.05"])
        item = tuning.items_of(settings)[0]
        specs: list[RunSpec] = []

        def make(spec: RunSpec) -> tuning.Trial:
            specs.append(spec)
            rate = spec.rate
            effective = rate.learning_rate / (1 - rate.momentum)
            distance = abs(effective / best_effective - 1) + abs(rate.momentum - best_momentum)
            status = "diverged" if effective > 100 else "done"
            return tuning.Trial(spec.id, rate.learning_rate, rate.momentum, status, distance, 1 - distance)

        return tuning.tune(item, settings, 0.008, make), specs

    def test_all_have_as_many_trials(self) -> None:
        for effective, momentum in ((0.5, 0.9), (20, 0.5), (0.001, 0.0), (0.6, 0.0)):
            with self.subTest(effective=effective):
                found, specs = self.search(effective, momentum)
                assert len(specs) == tuning.TRIALS
                assert len({(spec.rate.learning_rate, spec.rate.momentum) for spec in specs}) == tuning.TRIALS
                assert len({spec.id for spec in specs}) == tuning.TRIALS
                assert found["tuned"]
                assert found["momentum"] == momentum

    def test_extends_the_grid_at_its_edge(self) -> None:
        found, _ = self.search(20, 0.5)
        assert 13 < found["learning_rate"] / 0.5 < 24
        assert not found["at_edge"]
        assert self.search(0.0001, 0.0)[0]["at_edge"]

    def test_not_tuned_where_nothing_ends_well(self) -> None:
        settings = parse([])
        item = tuning.items_of(settings)[0]
        found = tuning.tune(
            item, settings, 0, lambda spec: tuning.Trial(spec.id, spec.rate.learning_rate, 0.0, "failed", None, None)
        )
        assert (found["tuned"], found["learning_rate"]) == (False, settings.learning_rate)

    def test_seed_and_split(self) -> None:
        _, specs = self.search(0.5, 0.9)
        assert {spec.seed for spec in specs} == {1001}
        assert {spec.validation_split for spec in specs} == {0.1}

    def test_items(self) -> None:
        names = [item.name for item in tuning.items_of(parse(["--modes=asp", "--staleness=4"]))]
        assert names == ["asp", "bsp", "staleness:0", "staleness:4"]
        names = [item.name for item in tuning.items_of(parse(["--modes=asp", "--staleness=", "--no-references"]))]
        assert names == ["asp"]


if __name__ == "__main__":
    unittest.main()
