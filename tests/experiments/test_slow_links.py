"""The slow-links experiment: its page's figures, recomputed from what ps_bench printed and from its runs' metrics."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import unittest

import support
from support import table_rows

FORMS = {"float32": "float32", "bfloat16": "bfloat16", "e3m0, weights in bfloat16": "e3m0-weights-in-bfloat16"}
TIMES_BYTES = {"float32": 1.0, "bfloat16": 0.5, "e3m0, weights in bfloat16": 0.5}  # Of the direction that has more.
SHARES = "The share of the time that workers compute; in brackets, what the bytes allow"
MODEL_BYTES, COMPUTE_S, RATE = 1 << 20, 0.005, 1000


class SlowLinksTest(support.ExperimentCase):
    """All forms are in the page with what was measured of them."""

    NAME = "slow_links"

    def test_shares_are_those_that_ps_bench_printed(self) -> None:
        rows = table_rows(self.page, SHARES)
        self.assertEqual([row["sent as"] for row in rows], list(FORMS))
        for row in rows:
            for steps in (1, 8):
                found = json.loads((self.runs / f"link-{RATE}-{FORMS[row['sent as']]}-{steps}.out").read_text())
                (measured,) = found["rows"]
                share, by_bytes = row[f"H = {steps}"].rstrip(")").split(" (")
                self.assertAlmostEqual(float(share), steps * COMPUTE_S / measured["p50_s"], delta=0.0006)
                exchange_s = TIMES_BYTES[row["sent as"]] * MODEL_BYTES * 8 / (RATE * 1e6) * 1514 / 1448
                self.assertAlmostEqual(
                    float(by_bytes), steps * COMPUTE_S / (steps * COMPUTE_S + exchange_s), delta=0.0006
                )

    def test_accuracies_are_those_of_the_metrics(self) -> None:
        rows = table_rows(self.page, "Test accuracy, %")
        folders = {
            "bsp": "bsp-float32-s1",
            "diloco:8, float32": "diloco-8-float32-s1",
            "diloco:8, e3m0, weights in bfloat16": "diloco-8-e3m0-weights-in-bfloat16-s1",
        }
        self.assertEqual({row["mode, sent as"] for row in rows}, set(folders))
        for row in rows:
            events = []
            for file in (self.runs / folders[row["mode, sent as"]]).glob("worker*.jsonl"):
                events += [json.loads(line) for line in file.read_text().splitlines()]
            tests = [event for event in events if event["event"] == "eval" and event["split"] == "test"]
            last = max(tests, key=lambda event: event["step"])
            self.assertAlmostEqual(float(row["accuracy"]), 100 * last["accuracy"], delta=0.006)


if __name__ == "__main__":
    unittest.main()
