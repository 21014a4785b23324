"""The digits experiment's page, recomputed from its metrics files and from NumPy's trace."""

from __future__ import annotations

import json
import os
import re
import statistics
import unittest
from itertools import pairwise
from pathlib import Path

import support

REFERENCE = support.REPOSITORY / "tests/data/reference/dt42_trace.json"


def has_mnist() -> bool:
    folder = Path(os.environ.get("PS_DATA_DIR") or "/usr/share/datasets") / "mnist"
    return folder.is_dir()


class DigitsTest(support.ExperimentCase):
    NAME = "digits"

    def steps(self, job: str, rank: int) -> list[dict]:
        lines = (self.runs / job / f"worker{rank}.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == "step"]

    def costs(self, job: str, workers: int) -> list[float]:
        """Each step's: every sample counts alike."""
        total: dict[int, float] = {}
        for rank in range(workers):
            for step in self.steps(job, rank):
                total[step["step"]] = total.get(step["step"], 0.0) + step["loss"] * step["samples"]
        return [total[step] / 5_000 for step in sorted(total)]

    @unittest.skipUnless(has_mnist(), "MNIST is not here")
    def test_every_cost_is_numpys(self) -> None:
        theirs = json.loads(REFERENCE.read_text())["cost_before_step"]
        rows = support.table_rows(self.page, "Costs and accuracies beside NumPy's")
        assert [row["workers"] for row in rows] == ["1", "4"]
        for row in rows:
            ours = self.costs(f"reference-{row['workers']}", int(row["workers"]))
            assert len(ours) == 60
            worst = max(abs(our - their) / their for our, their in zip(ours, theirs, strict=False))
            assert worst < 0.001
            assert abs(float(row["largest deviation"]) - worst) <= 0.06 * worst
            assert row["last cost"] == f"{ours[-1]:.6f}"
            assert row["NumPy's"] == f"{theirs[59]:.6f}"

    @unittest.skipUnless(has_mnist(), "MNIST is not here")
    def test_the_accuracy_is_numpys_to_a_sample(self) -> None:
        theirs = json.loads(REFERENCE.read_text())["accuracy_before_step"]["60"]
        for workers in (1, 4):
            lines = []
            for path in (self.runs / f"reference-{workers}").glob("worker*.jsonl"):
                lines += path.read_text().splitlines()
            found = [each for each in map(json.loads, lines) if each["event"] == "eval" and each["step"] == 59]
            assert len(found) == 1
            assert abs(found[0]["accuracy"] - theirs) <= 1.01 / 5_000
        row = re.search(r"\| accuracy before iteration 60 .*", self.page)
        assert f"| {100 * theirs:.2f} % |" in row[0]
        assert "| agrees |" in row[0]

    def test_the_parts_of_an_iteration_are_the_metrics(self) -> None:
        rows = support.table_rows(self.page, "Milliseconds of an iteration, medians")
        assert len(rows) == 9
        for row in rows:
            place = {"one host, shared memory": "memory", "one host, TCP": "loopback"}.get(row["where"], "link")
            if row["total"] == "not measured":
                assert place == "link"
                assert "Nothing was measured over links:" in self.page
                continue
            parts: dict[str, list[float]] = {"forward": [], "backward": [], "exchange": [], "total": []}
            for rank in range(int(row["workers"])):
                steps = self.steps(f"{place}-{row['workers']}-r0", rank)
                assert len(steps) == 16
                assert sum(step["samples"] for step in steps) == 16 * 5_000 // int(row["workers"])
                for before, now in pairwise(steps):
                    total = now["t"] - before["t"]
                    parts["forward"].append(now["forward_s"])
                    parts["backward"].append(now["backward_s"])
                    parts["exchange"].append(max(0.0, total - now["forward_s"] - now["backward_s"]))
                    parts["total"].append(total)
            for name, values in parts.items():
                assert abs(float(row[name]) - 1e3 * statistics.median(values)) <= 0.0051, row

    def test_every_place_and_number_of_workers_trains_to_the_same_costs(self) -> None:
        expected = self.costs("memory-1-r0", 1)
        for place in ("memory", "loopback", "link"):
            for workers in (1, 2, 4):
                job = f"{place}-{workers}-r0"
                if place == "link" and not (self.runs / job).is_dir():
                    continue
                for ours, theirs in zip(self.costs(job, workers), expected, strict=True):
                    assert abs(ours - theirs) <= 1e-5 * theirs, job

    def test_the_links_rate_is_of_whole_iterations_without_computing(self) -> None:
        rows = support.table_rows(self.page, "Payload over a link of 1 Gbit/s")
        if not rows:
            assert "Not measured: " in self.page
            return
        exchanges = [
            now["t"] - before["t"] - now["forward_s"] - now["backward_s"]
            for before, now in pairwise(self.steps("filled", 0))
        ]
        moved = 2 * 4 * (2048 * 2038 + 2038 + 2038 * 10 + 10)
        assert abs(float(rows[1]["MB/s"]) - moved / statistics.median(exchanges) / 1e6) <= 0.051

    def test_no_figure_of_a_gpu_is_claimed(self) -> None:
        row = re.search(r"\| an iteration on one machine and on two, GPUs .*", self.page)
        assert "| not measured | not comparable |" in row[0]


class WithoutMnistTest(support.ExperimentCase):
    """Times are of Fashion-MNIST then, and NumPy's training is not repeated."""

    NAME = "digits"
    FLAGS = ("--data_dir=/nonexistent",)

    def test_the_page_says_so_and_has_the_times(self) -> None:
        assert "MNIST is not on this machine. The times are of as many images of Fashion-MNIST" in self.page
        assert "| 0.2065 | not measured | not comparable |" in self.page
        rows = support.table_rows(self.page, "Milliseconds of an iteration, medians")
        assert float(rows[0]["total"]) > 0
        assert not support.table_rows(self.page, "Costs and accuracies beside NumPy's")


if __name__ == "__main__":
    unittest.main()
