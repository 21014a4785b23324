"""The processes experiment: its page's figures, recomputed from the metrics of its runs."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import os
import re
import unittest

import support
from support import table_rows

WORK = 8_000  # Batches of 1,000 samples.
PUBLISHED = {1: 1403, 2: 1748, 4: 3003, 8: 4801}
CORES = len(os.sched_getaffinity(0))
GRID = "Seconds, and times as long as the fastest"


class ProcessesTest(support.ExperimentCase):
    """All setups are in the page with what their metrics say."""

    NAME = "processes"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.seconds = {folder.name.removesuffix("-first"): cls.seconds_of(folder) for folder in cls.runs.iterdir()}

    @staticmethod
    def seconds_of(folder) -> float:
        """For the whole work: the clock from the first step's end to the last one's, scaled by batches."""
        ends, batches = [], 0
        for file in folder.glob("worker*.jsonl"):
            events = [json.loads(line) for line in file.read_text().splitlines()]
            start = next(event for event in events if event["event"] == "start")
            own = [start["unix_time"] - start["t"] + event["t"] for event in events if event["event"] == "step"]
            ends += own
            batches += len(own) - 1
        return WORK * (max(ends) - min(ends)) / batches

    def close(self, cell: str, expected: float, message: str) -> None:
        """To two decimals, of which the last may have been rounded either way, after time stamps to microseconds."""
        self.assertAlmostEqual(float(cell), expected, delta=0.006 + 1e-4 * expected, msg=message)

    def test_the_grid_has_all_products(self) -> None:
        rows = table_rows(self.page, GRID)
        self.assertEqual([row["processes"] for row in rows], ["1", "2", "8"])
        plain = {name: seconds for name, seconds in self.seconds.items() if re.fullmatch(r"p\d+-t\d+", name)}
        fastest = min(plain.values())
        cells = 0
        for row in rows:
            for column, cell in row.items():
                if column == "processes":
                    continue
                name = f"p{row['processes']}-t{column.split()[0]}"
                seconds, ratio = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", cell).groups()
                self.close(seconds, plain[name], name)
                self.close(ratio, plain[name] / fastest, name)
                cells += 1
        self.assertEqual(cells, len(plain))

    def test_ratios_stand_beside_the_published_ones(self) -> None:
        kinds = {
            "as many threads each as cores": f"t{CORES}",
            "the same, asleep when they wait": f"t{CORES}-passive",
            "one thread each": "t1",
            "one thread each, TCP": "t1-tcp",
        }
        for row in table_rows(self.page, "Times as long as one process of the same kind"):
            count = int(row["processes"])
            self.close(row["published"], PUBLISHED[count] / PUBLISHED[1], row["processes"])
            for column, name in kinds.items():
                self.close(row[column], self.seconds[f"p{count}-{name}"] / self.seconds[f"p1-{name}"], column)

    def test_verdicts_follow_from_the_times(self) -> None:
        lines = [line for line in self.page.splitlines() if line.startswith("| several processes")]
        self.assertEqual(len(lines), 2)
        for line in lines:
            what, _, _, verdict, _ = (cell.strip() for cell in line.split("|")[1:-1])
            threads = CORES if "as many threads each as cores" in what else 1
            times = [self.seconds[f"p{count}-t{threads}"] for count in (1, 2, 8)]
            self.assertEqual(verdict, "agrees" if times[0] < min(times[1:]) else "contradicts", msg=what)

    def test_every_setup_does_the_same_work_and_has_its_threads(self) -> None:
        for folder in self.runs.iterdir():
            count, threads = (int(text) for text in re.match(r"p(\d+)-t(\d+)", folder.name).groups())
            workers = [file.read_text().splitlines() for file in folder.glob("worker*.jsonl")]
            self.assertEqual(len(workers), count)
            samples = 0
            for lines in workers:
                events = [json.loads(line) for line in lines]
                self.assertEqual(events[0]["flags"]["threads"], str(threads))
                samples += sum(event["samples"] for event in events if event["event"] == "step")
            self.assertEqual(samples, 24_000, msg=folder.name)

    def test_neither_transport_nor_waiting_changes_a_bit_of_the_weights(self) -> None:
        hashes: dict[str, set[str]] = {}
        for folder in self.runs.iterdir():
            said = re.search(r"weights hash: (\w+)", (folder / "worker0.out").read_text())
            hashes.setdefault(re.match(r"p\d+-t\d+", folder.name)[0], set()).add(said[1])
        for name, found in hashes.items():
            self.assertEqual(len(found), 1, msg=name)
        self.assertIn("had the same weights, bit for bit", self.page)

    def test_processor_time_is_what_the_jobs_used(self) -> None:
        rows = {row["processes"]: row for row in table_rows(self.page, "What it costs")}
        self.assertEqual(len(rows), len(self.seconds))
        for name in ("p1-t1", "p8-t1", f"p2-t{CORES}"):
            stored = json.loads((self.runs / f"{name}-first/job.json").read_text())
            handovers = sum(used["handovers"] for used in stored["used"].values()) / 24
            count, threads = re.fullmatch(r"p(\d+)-t(\d+)", name).groups()
            row = rows[f"{count} of {threads} thread{'s' * (threads != '1')}"]
            self.close(row["handovers a batch"], handovers, name)
            self.assertLessEqual(stored["training_cpu_s"], 0.1 + sum(used["cpu_s"] for used in stored["used"].values()))


if __name__ == "__main__":
    unittest.main()
