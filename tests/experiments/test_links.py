"""The links experiment's page, recomputed from its metrics files, from what links counted and from MPI's output."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import support

RATES = (10, 1000)
AT_10 = ("bsp-4", "local-sgd-4", "mpi-ring")
WORKERS = 4
MODEL_BYTES = 4 * (4 * (64 * 64 + 64) + 64 * 10 + 10)
PS = {
    "bsp, 1 server": "bsp-1",
    "asp, 1 server": "asp-1",
    "bsp, 4 servers": "bsp-4",
    "bsp, 4 servers on the workers' hosts": "bsp-4-colocated",
    "local_sgd:8, 4 servers": "local-sgd-4",
}
MPI = {"MPI, its own choice": "mpi-own", "MPI, ring": "mpi-ring", "MPI, a sum for each tensor": "mpi-overlapped"}


class LinksTest(support.ExperimentCase):
    NAME = "links"

    def steps(self, name: str, rank: int) -> list[dict]:
        """With `unix`, when each ended."""
        lines = (self.runs / name / f"worker{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        start = next(event for event in events if event["event"] == "start")
        zero = start["unix_time"] - start["t"]
        return [{**event, "unix": zero + event["t"]} for event in events if event["event"] == "step"]

    def mpi_lines(self, name: str) -> list[tuple[float, float]] | None:
        """Loss and end of each step; None where MPI is not."""
        path = self.runs / name / "mpirun.out"
        if not path.exists():
            return None
        return [tuple(map(float, line.split())) for line in path.read_text().splitlines()]

    def batch_ms(self, system: str, rate: int) -> float | None:
        """None where it was not measured."""
        if system in MPI:
            lines = self.mpi_lines(f"{MPI[system]}-{rate}")
            if lines is None:
                return None
            ends = [end for _, end in lines][2:]
            return 1e3 * statistics.median(b - a for a, b in pairwise(ends))
        if rate == 10 and PS[system] not in AT_10:
            return None
        periods = []
        for rank in range(WORKERS):
            ends: dict[int, float] = {}
            for step in self.steps(f"{PS[system]}-{rate}", rank):
                ends[step["step"]] = max(ends.get(step["step"], 0.0), step["unix"])
            in_order = [ends[step] for step in sorted(ends)][2:]
            periods += [b - a for a, b in pairwise(in_order)]
        return 1e3 * statistics.median(periods) / (8 if system.startswith("local_sgd") else 1)

    def test_the_times_of_a_batch_are_those_of_the_metrics(self) -> None:
        rows = support.table_rows(
            self.page, "Milliseconds of a batch, medians; in brackets, in times that the model takes over a link"
        )
        assert [row["system"] for row in rows] == [*PS, *MPI]
        for row in rows:
            for rate in RATES:
                expected, cell = self.batch_ms(row["system"], rate), row[f"{rate:,} Mbit/s"]
                if expected is None:
                    assert cell in ("MPI: not installed", "MPI: not built", "not measured")
                    if row["system"] in PS:  # MPI's cells say what it is, where it is not there.
                        assert cell == "not measured"
                        assert rate == 10
                        assert PS[row["system"]] not in AT_10
                    continue
                ms, models = re.fullmatch(r"([\d,.]+) \(([\d.]+)\)", cell).groups()
                assert abs(float(ms.replace(",", "")) - expected) <= max(0.051, 0.006 * expected), row
                in_models = expected / (MODEL_BYTES * 8 / (rate * 1e3))
                assert abs(float(models) - in_models) <= 0.006 + 0.006 * in_models, row

    def test_the_exchanges_behind_a_median_are_counted(self) -> None:
        caption = (
            "The exchanges of all workers that were timed (MPI: of rank 0): how many; shortest to longest, ms of a "
        )
        rows = {row["system"]: row for row in support.table_rows(self.page, f"{caption}batch")}
        for title, name in PS.items():
            count = 40 // (8 if name == "local-sgd-4" else 1)
            said = re.fullmatch(r"(\d+): ([\d,.]+) to ([\d,.]+)", rows[title]["1,000 Mbit/s"]).groups()
            low, high = (float(cell.replace(",", "")) for cell in said[1:])
            assert int(said[0]) == WORKERS * (count - 3)
            assert low - 0.051 <= self.batch_ms(title, 1000) <= high + 0.51

    def test_links_carried_what_theory_says_and_headers(self) -> None:
        share = (4096 + 640 + 10) / (
            MODEL_BYTES / 4
        )  # The fullest of four servers has a large layer, and what is left.
        theory = {"bsp-1": 4, "asp-1": 4, "bsp-4": 4 * share, "bsp-4-colocated": 0.75 + 3 * share, "mpi-ring": 1.5}
        rows = support.table_rows(self.page, "Models over the fullest link, one way, for a batch of each worker")
        for row in rows:
            name = {**PS, **MPI}[row["system"]]
            if row["counted"] in ("MPI: not installed", "MPI: not built"):
                continue
            folder = self.runs / f"{name}-1000"
            if name in PS.values():
                carried = json.loads((folder / "carried.json").read_text())
                batches = len(self.steps(f"{name}-1000", 0))
            else:
                carried = json.loads((folder / "mpi.json").read_text())["carried"]
                batches = len(self.mpi_lines(f"{name}-1000"))
            assert len(carried) == 8
            assert batches == 40
            fullest = max(max(link["sent"], link["received"]) for link in carried)
            models = fullest / batches / MODEL_BYTES
            assert abs(float(row["counted"]) - models) <= 0.0051
            if name in theory:
                # Less than the weights and gradients alone cannot be. Small messages have more headers.
                assert theory[name] <= models <= 1.3 * theory[name], row
                assert abs(float(row["theory"]) - theory[name]) <= 0.02, row

    def test_bsp_has_the_same_weights_wherever_servers_are(self) -> None:
        hashes = set()
        for name in ("bsp-1", "bsp-4", "bsp-4-colocated"):
            for out in (self.runs / f"{name}-1000").glob("worker*.out"):
                hashes |= set(re.findall(r"weights hash: (\w+)", out.read_text()))
        assert len(hashes) == 1
        assert "are equal, bit for bit" in self.page
        assert f"| {hashes.pop()[:8]} |" in self.page

    def test_mpi_trains_on_the_same_samples_from_the_same_weights(self) -> None:
        losses: dict[int, list[float]] = defaultdict(list)
        for rank in range(WORKERS):
            for step in self.steps("bsp-1-1000", rank):
                losses[step["step"]].append(step["loss"])
        ours = [statistics.fmean(losses[step]) for step in sorted(losses)]
        for name in MPI.values():
            for rate in RATES:
                lines = self.mpi_lines(f"{name}-{rate}")
                if lines is None:
                    continue
                # The first is before any sum. From then on the order of sums matters.
                assert abs(lines[0][0] - ours[0]) <= 1e-6 * ours[0]
                for (loss, _), own in zip(lines[:4], ours, strict=False):
                    assert abs(loss - own) <= 1e-4 * own, (name, rate)

    def test_every_worker_made_its_batches(self) -> None:
        for name in PS.values():
            for rate in RATES if name in AT_10 else (1000,):
                for rank in range(WORKERS):
                    steps = self.steps(f"{name}-{rate}", rank)
                    assert all(step["samples"] == 64 for step in steps)
                    expected = 40 if rate == 1000 else 32 if name == "local-sgd-4" else 4
                    assert len(steps) == expected, (name, rate, rank)

    def test_accuracies_are_those_of_the_last_evaluations(self) -> None:
        for row in support.table_rows(self.page, "What exchanging less strictly and less often gains and costs"):
            events = []
            for path in (self.runs / f"{PS[row['system']]}-1000").glob("worker*.jsonl"):
                events += [json.loads(line) for line in path.read_text().splitlines()]
            last = max((event for event in events if event["event"] == "eval"), key=lambda event: event["step"])
            assert row["test accuracy"] == f"{100 * last['accuracy']:.1f} %"
