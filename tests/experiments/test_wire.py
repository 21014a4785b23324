"""The wire experiment: its page's figures, recomputed from the metrics of its runs."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import unittest

import support
from support import table_rows

FOLDERS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bfloat16, error feedback": "bfloat16-error-feedback",
    "top-k 1 %": "top-k-1",
    "top-k 1 %, bfloat16": "top-k-1-bfloat16",
}


class WireTest(support.ExperimentCase):
    """All forms are in the page with what their metrics say."""

    NAME = "wire"

    def accuracy(self, form: str, mode: str) -> float:
        for file in self.runs.glob(f"{mode}-{FOLDERS[form]}-s1/worker*.jsonl"):
            events = [json.loads(line) for line in file.read_text().splitlines()]
            found = [event for event in events if event["event"] == "eval" and event["split"] == "test"]
            if found:
                return 100 * found[-1]["accuracy"]
        raise AssertionError(f"no test accuracy of {form} in {mode}")

    def test_accuracies_and_differences_are_those_of_the_metrics(self) -> None:
        rows = table_rows(self.page, "Test accuracy, %")
        self.assertEqual([row["sent as"] for row in rows], list(FOLDERS))
        for row in rows:
            for mode in ("bsp", "asp"):
                accuracy = self.accuracy(row["sent as"], mode)
                self.assertAlmostEqual(float(row[mode]), accuracy, delta=0.006)
                if row["sent as"] != "float32":
                    apart = float(row[f"{mode}, points from float32"].replace("−", "-"))
                    self.assertAlmostEqual(apart, accuracy - self.accuracy("float32", mode), delta=0.006)

    def test_each_form_was_sent_as_it_says(self) -> None:
        for form, folder in FOLDERS.items():
            start = json.loads((self.runs / f"bsp-{folder}-s1/server0.jsonl").read_text().splitlines()[0])
            flags = start["flags"]
            self.assertEqual(flags["wire_dtype"], "bfloat16" if "bfloat16" in form else "float32")
            self.assertEqual(flags["compress"], "topk:0.01" if "top-k" in form else "none")
            self.assertEqual(str(flags["error_feedback"]).lower(), str("error feedback" in form).lower())


if __name__ == "__main__":
    unittest.main()
