"""The slow-worker experiment: its page's figures, recomputed from its runs' metrics."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import unittest

import support
from support import table_rows

BATCH, STEP_S, COULD = 64, 0.004, 3.25
MODES = ["bsp", "backup:1", "asp", "diloco, barrier", "diloco, quorum of 3", "diloco, async"]


class SlowWorkerTest(support.ExperimentCase):
    """All modes are in the page with what was measured of them."""

    NAME = "slow_worker"

    def test_rates_are_those_of_the_metrics(self) -> None:
        rows = {row["whom to wait for"]: row for row in table_rows(self.page, "What is made of what all could do")}
        self.assertEqual(list(rows), MODES)
        for mode, row in rows.items():
            folder = self.runs / f"{mode.replace(':', '-').replace(', ', '-').replace(' ', '-')}-s1"
            used = []
            for rank in range(4):
                events = [json.loads(line) for line in (folder / f"worker{rank}.jsonl").read_text().splitlines()]
                (end,) = [event for event in events if event["event"] == "end"]
                used.append(end["samples"] - end["dropped_samples"])
            chief = [json.loads(line) for line in (folder / "server0.jsonl").read_text().splitlines()]
            applied = [event for event in chief if event["event"] == "apply"]
            begin, length = applied[0]["t"], applied[-1]["t"] - applied[0]["t"]
            middle = [event for event in applied if 0.1 * length < event["t"] - begin <= 0.75 * length]
            rate = sum(sum(event["samples"]) for event in middle[1:]) / (middle[-1]["t"] - middle[0]["t"])
            self.assertAlmostEqual(float(row["samples/s"].replace(",", "")), rate, delta=1)
            self.assertAlmostEqual(float(row["of what all could do"]), rate * STEP_S / BATCH / COULD, delta=0.001)
            self.assertAlmostEqual(
                float(row["the slow worker's part"].rstrip("%")), 100 * used[3] / sum(used), delta=0.1
            )

    def test_whoever_waits_for_the_slow_worker_has_as_much_of_it_as_of_the_others(self) -> None:
        rows = {row["whom to wait for"]: row for row in table_rows(self.page, "What is made of what all could do")}
        for mode in ("bsp", "diloco, barrier"):
            self.assertAlmostEqual(float(rows[mode]["the slow worker's part"].rstrip("%")), 25, delta=3)


if __name__ == "__main__":
    unittest.main()
