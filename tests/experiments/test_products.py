"""The products experiment: the figures of its page, recomputed from what ps_bench printed, with a GPU and without."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import os
import stat
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

import support
from support import table_rows

TIMES = "Microseconds of a product on the CPU, one thread"
CROSSOVERS = "The second matrix from which on it is faster, by the first one's rows"
PUBLISHED = (120, 30, 20)

# Answers as ps_bench would on a machine with a GPU whose times are these: to begin, then so many flops, and copies.
FAKE_BENCH = """#!/usr/bin/env python3
import json, sys

flags = dict(flag[2:].split("=") for flag in sys.argv[1:] if "=" in flag)
rows, shapes = flags["grid"].split(":")
found = []
for device in flags["device"].split(","):
    for m in map(int, rows.split(",")):
        for k, n in (map(int, shape.split("x")) for shape in shapes.split(",")):
            if device == "cpu":
                seconds = copied = 2 * m * k * n / 5e10 / int(flags.get("threads", 1))
            else:
                seconds = 3e-6 + 2 * m * k * n / 1e13
                copied = 2e-5 + seconds + 4 * (m * k + k * n + m * n) / 1e10
            found.append({"device": device, "m": m, "k": k, "n": n, "compute_s": seconds, "with_copies_s": copied})
print(json.dumps({"rows": found}))
"""


def rows_of(out: Path, device: str) -> dict[tuple[int, int, int], dict]:
    """What ps_bench printed, by size."""
    rows = [row for row in json.loads(out.read_text())["rows"] if row["device"] == device]
    return {(row["m"], row["k"], row["n"]): row for row in rows}


def first_faster(times: dict, others: dict, m: int) -> str:
    """From which second matrix on the others are faster, up to the largest; 5 % more do not count as slower."""
    shapes = sorted((k, n) for rows, k, n in times if rows == m)
    slower = [number for number, (k, n) in enumerate(shapes) if others[m, k, n] > 1.05 * times[m, k, n]]
    first = slower[-1] + 1 if slower else 0
    while first < len(shapes) and others[(m, *shapes[first])] >= times[(m, *shapes[first])]:
        first += 1
    if first == len(shapes):
        return "none of these"
    return "all of these" if first == 0 else f"{shapes[first][0]} × {shapes[first][1]}"


class ProductsTest(support.ExperimentCase):
    """With the real ps_bench: on the CPU, and on a GPU where there is one."""

    NAME = "products"

    def setUp(self) -> None:
        self.cpu = rows_of(self.runs / "one-thread-r1.out", "cpu")

    def test_the_published_size_and_its_neighbours_are_measured(self) -> None:
        m, k, n = PUBLISHED
        for size in (PUBLISHED, (2 * m, k, n), (m, 2 * k, 2 * n), (m // 2, k, n), (m, k // 2, n // 2)):
            self.assertIn(size, self.cpu)
            self.assertGreater(self.cpu[size]["compute_s"], 0)

    def test_the_table_has_the_printed_times(self) -> None:
        cells = 0
        for row in table_rows(self.page, TIMES):
            for column, cell in row.items():
                if column == "m":
                    continue
                k, n = map(int, column.split(" × "))
                printed = 1e6 * self.cpu[int(row["m"]), k, n]["compute_s"]
                self.assertLessEqual(abs(float(cell.replace(",", "")) - printed), 0.006 * printed + 0.006)
                cells += 1
        self.assertEqual(cells, len(self.cpu))

    def test_without_a_gpu_its_columns_say_so(self) -> None:
        if "not measured: " not in self.page.lower():
            self.skipTest("there is a GPU")
        for row in table_rows(self.page, CROSSOVERS):
            self.assertEqual(row["GPU, without copies"], "not measured")
            self.assertEqual(row["GPU, with copies"], "not measured")
        self.assertEqual(self.page.count("| not measured | not comparable | No GPU: "), 2)

    def test_where_more_threads_are_faster(self) -> None:
        together = self.runs / "all-threads-r1.out"
        if not together.exists():
            self.skipTest("one core")
        alone = {size: row["compute_s"] for size, row in self.cpu.items()}
        more = {size: row["compute_s"] for size, row in rows_of(together, "cpu").items()}
        for row in table_rows(self.page, CROSSOVERS):
            self.assertEqual(row["more threads"], first_faster(alone, more, int(row["m"])))
        faster = sum(more[size] < alone[size] for size in alone)
        self.assertIn(f"{faster} of {len(alone)} products are faster", self.page)


class GpuTest(support.ExperimentCase):
    """With a ps_bench that answers as on a machine with a GPU."""

    NAME = "products"

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="experiments-test-bin-")
        cls.addClassCleanup(folder.cleanup)
        bench = Path(folder.name) / "ps_bench"
        bench.write_text(FAKE_BENCH)
        bench.chmod(bench.stat().st_mode | stat.S_IXUSR)
        for program in ("ps_server", "ps_worker"):
            os.symlink(support.BIN.resolve() / program, Path(folder.name) / program)
        cls.FLAGS = (f"--bin={folder.name}",)
        super().setUpClass()
        cls.cpu = rows_of(cls.runs / "one-thread-r1.out", "cpu")
        cls.gpu = rows_of(cls.runs / "one-thread-r1.out", "cuda")

    def test_where_the_gpu_is_faster(self) -> None:
        self.assertNotIn("not measured", self.page)
        cpu = {size: row["compute_s"] for size, row in self.cpu.items()}
        columns = {"GPU, without copies": "compute_s", "GPU, with copies": "with_copies_s"}
        found = set()
        for row in table_rows(self.page, CROSSOVERS):
            for column, field in columns.items():
                gpu = {size: each[field] for size, each in self.gpu.items()}
                self.assertEqual(row[column], first_faster(cpu, gpu, int(row["m"])), (row, column))
                found.add(row[column])
        self.assertGreater(len(found), 2)  # The times are such that the sizes matter.

    def test_a_claim_is_decided_by_the_crossover_that_it_shows(self) -> None:
        cpu = {size: row["compute_s"] for size, row in self.cpu.items()}
        for copies, field in (("without copies", "compute_s"), ("with the copies", "with_copies_s")):
            first = first_faster(cpu, {size: each[field] for size, each in self.gpu.items()}, PUBLISHED[0])
            line = next(line for line in self.page.splitlines() if line.startswith("| product") and copies in line)
            ours, verdict = line.split(" | ")[2:4]
            if first == "all of these":
                self.assertEqual(verdict, "not comparable")
            elif first == "none of these":
                self.assertEqual((ours.split(" up to ")[0], verdict), ("with 120 rows none", "contradicts"))
            else:
                self.assertIn(f"by {first} on", ours)
                near = 0.5 <= int(first.split()[0]) / PUBLISHED[1] <= 2
                self.assertEqual(verdict, "agrees" if near else "contradicts")

    @unittest.skipUnless(find_spec("matplotlib"), "python3-matplotlib is not installed")
    def test_the_maps_of_the_ratio_are_there(self) -> None:
        for name in ("speed-gpu", "ratio-gpu-alone", "ratio-gpu-copies"):
            self.assertIn(f"(products-{name}.svg)", self.page)


if __name__ == "__main__":
    unittest.main()
