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
        self.assertEqual(
            [row["sent as"] for row in rows], [f"{form}{way}" for form in FORMS for way in ("", ", streamed")]
        )
        for row in rows:
            form = row["sent as"].removesuffix(", streamed")
            streamed = form != row["sent as"]
            self.assertEqual(row["H = 1"] == "—", streamed)
            for steps in (8,) if streamed else (1, 8):
                suffix = "-streamed" if streamed else ""
                found = json.loads((self.runs / f"link-{RATE}-{FORMS[form]}-{steps}{suffix}.out").read_text())
                (measured,) = found["rows"]
                share, by_bytes = row[f"H = {steps}"].rstrip(")").split(" (")
                computes_s = steps * COMPUTE_S / (2 if streamed else 1)  # Two fragments, with an overlap of a step.
                self.assertAlmostEqual(float(share), computes_s / measured["p50_s"], delta=0.0006)
                exchange_s = TIMES_BYTES[form] * MODEL_BYTES * 8 / (RATE * 1e6) * 1514 / 1448
                if streamed:
                    exchange_s = max(0, exchange_s / 2 - COMPUTE_S)
                self.assertAlmostEqual(float(by_bytes), computes_s / (computes_s + exchange_s), delta=0.0006)

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
