"""The hidden-layers experiment: its page's figures, recomputed from the metrics of its trainings."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import re
import unittest
from pathlib import Path

import support
from support import table_rows

LEARNT = "What was kept of each training"
TIMES = "Milliseconds of a pass over the training split, and their ratios to the sequential program's"
PASSES, UPDATES = 6, 15  # The quick form has 900 samples, of which an update in mini-batches takes 64.


def events(folder: Path, name: str, rank: int = 0) -> list[dict]:
    """A worker's, in order."""
    lines = (folder / f"worker{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def evaluations(folder: Path, split: str) -> list[dict]:
    return [event for event in events(folder, "eval") if event["split"] == split]


class HiddenLayersTest(support.ExperimentCase):
    """What was learnt, kept and measured is in the page."""

    NAME = "hidden_layers"

    def folder_of(self, row: dict[str, str]) -> Path:
        kind = "full" if row["training"].startswith("full") else "mini"
        large = "-large" if row["training"].endswith(" 0.5") else ""
        return self.runs / f"learn-{kind}-{row['workers']}-s{row['seed']}{large}"

    def test_the_best_by_validation_loss_are_kept_and_tested(self) -> None:
        rows = table_rows(self.page, LEARNT)
        self.assertEqual(len(rows), 7)
        for row in rows:
            folder = self.folder_of(row)
            updates = PASSES * (1 if row["training"].startswith("full") else UPDATES)
            validation, test = evaluations(folder, "validation"), evaluations(folder, "test")
            best = min(validation, key=lambda event: event["loss"])
            self.assertEqual(len(events(folder, "step")), updates)
            self.assertEqual(len(validation), PASSES)
            self.assertEqual(test[-1]["step"], best["step"])
            self.assertEqual(int(row["updates"].replace(",", "")), updates)
            self.assertEqual(row["kept after pass"], f"{best['step'] * PASSES / updates:g} of {PASSES}")
            self.assertEqual(float(row["validation loss"]), round(best["loss"], 4))
            self.assertEqual(float(row["test loss"]), round(test[-1]["loss"], 4))
            self.assertAlmostEqual(float(row["test accuracy"].removesuffix(" %")), 100 * test[-1]["accuracy"], places=2)

    def test_any_number_of_workers_learns_the_same(self) -> None:
        worst = 0.0
        for kind in ("full", "mini"):
            one, two = (evaluations(self.runs / f"learn-{kind}-{number}-s1", "validation") for number in (1, 2))
            self.assertEqual([event["step"] for event in one], [event["step"] for event in two])
            worst = max(worst, *(abs(b["loss"] / a["loss"] - 1) for a, b in zip(one, two, strict=True)))
        self.assertLess(worst, 1e-4)
        self.assertIn(f"at most {worst:.1e} of their value, so parallel training is the sequential one", self.page)

    def test_mini_batches_learn_more_from_as_many_passes(self) -> None:
        full, mini = (evaluations(self.runs / f"learn-{kind}-1-s1", "validation")[-1] for kind in ("full", "mini"))
        self.assertLess(mini["loss"], full["loss"])

    def test_times_are_those_of_the_steps(self) -> None:
        rows = {row["training"]: row for row in table_rows(self.page, TIMES)}
        self.assertEqual(len(rows), 6)
        for kind, name, per_pass in (("full", "full batch", 1), ("mini", "mini-batches", UPDATES)):
            for number in (1, 2):
                found = self.stages(self.runs / f"time-{kind}-{number}-r1", number, per_pass)
                if number == 1:
                    one = {**found, "total": found["forward"] + found["backward"]}
                    self.compare(rows[f"{name}, sequential"], one, one, ("forward", "backward", "total"))
                row = rows[f"{name}, {number} worker{'s' * (number > 1)}"]
                self.compare(row, found, one, ("forward", "backward", "exchange", "total"))

    def stages(self, folder: Path, workers: int, per_pass: int) -> dict[str, float]:
        """Milliseconds of a pass."""
        parts: dict[str, float] = {"forward": 0, "backward": 0, "total": 0}
        count = 0
        for rank in range(workers):
            steps = events(folder, "step", rank)
            count += len(steps) - 1
            parts["total"] += 1000 * (steps[-1]["t"] - steps[0]["t"])
            for part in ("forward", "backward"):
                parts[part] += 1000 * sum(step[f"{part}_s"] for step in steps[1:])
        found = {part: value * per_pass / count for part, value in parts.items()}
        return {**found, "exchange": max(0.0, found["total"] - found["forward"] - found["backward"])}

    def compare(self, row: dict[str, str], found: dict[str, float], one: dict[str, float], shown: tuple) -> None:
        for stage in shown:
            self.assertAlmostEqual(float(row[stage]), found[stage], delta=0.051)
            if f"{stage}, ratio" in row:
                self.assertAlmostEqual(float(row[f"{stage}, ratio"]), found[stage] / one[stage], delta=0.0051)

    def test_a_claim_is_decided_by_its_criterion(self) -> None:
        one, two = (self.stages(self.runs / f"time-full-{number}-r1", number, 1) for number in (1, 2))
        one["total"] = one["forward"] + one["backward"]
        claims = [line.split(" | ") for line in self.page.splitlines() if "| nearly 50 % |" in line]
        for stage, claim in zip(("forward", "backward", "total"), claims, strict=True):
            saved = 1 - two[stage] / one[stage]
            self.assertEqual(claim[3], "agrees" if 0.40 <= saved <= 0.55 else "contradicts")
            said = re.match(r"(\d+) % (less|more)", claim[2])
            self.assertIsNotNone(said)
            other = 0.40 <= 1 / (1 - saved) - 1 <= 0.55
            self.assertIn("it would agree too" if other else "it would not agree", claim[4])
            self.assertAlmostEqual(float(said[1]) * (1 if said[2] == "less" else -1), 100 * saved, delta=0.51)


if __name__ == "__main__":
    unittest.main()
