"""Every figure in results.csv and report.md is recomputed from the metrics files by another program (recompute.py)."""

# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import re
import unittest
from pathlib import Path
from typing import Any

from report_case import ReportCase  # isort: skip

import make_runs
import recompute
import recompute_words

CONDITIONS = {"even": "Even workers", "straggler": "A constant straggler", "transient": "Transient delays"}


class Numbers(ReportCase):
    """One comparison with all modes and conditions, a diverged and a killed run among them."""

    def setUp(self) -> None:
        """Makes it."""
        super().setUp()
        make_runs.make_comparison(self.output, batches=160, staleness=(0, 2, 8))
        self.change(self.output / "runs/even-asp-s2", status="diverged", reason="loss is nan at step 31")
        killed = self.output / "runs/straggler-ssp_2-s3"
        self.change(killed, status="timed out", reason="60 s")
        make_runs.cut_off(killed / "server0.jsonl", 0.7)
        make_runs.cut_off(killed / "worker1.jsonl", 0.5)
        self.change(self.output / "runs/transient-easgd_8-s1", cpu_s=9.5)
        self.shift_last_result(self.output / "runs/reference_PyTorch-s2")
        self.write()
        self.facts = {path.name: recompute.run_facts(path) for path in (self.output / "runs").iterdir()}

    def shift_last_result(self, folder: Path) -> None:
        """Another loss and accuracy, so that the curve is not quite the one that it should be."""
        path = folder / "worker0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        last = [line for line in lines if line["event"] == "eval"][-1]
        last |= {"loss": last["loss"] + 0.015, "accuracy": last["accuracy"] - 0.004}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def group(self, condition: str, mode: str) -> list[dict[str, Any]]:
        """The runs of a row."""
        wanted = ("comparison", condition, mode)
        found = [each for each in self.facts.values() if (each["kind"], each["condition"], each["mode"]) == wanted]
        return sorted(found, key=lambda each: each["seed"])

    def test_csv(self) -> None:
        """One row a run, with every column but the prediction."""
        rows = self.csv()
        self.assertEqual(set(rows), set(self.facts))
        for name, facts in self.facts.items():
            wanted = recompute.csv_row(facts)
            self.assertEqual(set(rows[name]) - set(wanted), {"predicted_samples_per_s"})
            for column, value in wanted.items():
                with self.subTest(run=name, column=column):
                    self.check_cell(rows[name][column], value)

    def check_cell(self, cell: str, value: object) -> None:
        """Numbers to nine digits, nothing as nothing."""
        if isinstance(value, float):
            self.assertAlmostEqual(float(cell), value, delta=1e-9 * max(1.0, abs(value)))
        else:
            self.assertEqual(cell, "" if value is None else str(value))

    def test_tables(self) -> None:
        """The three tables of each condition."""
        tables = self.tables()
        for condition, title in CONDITIONS.items():
            groups = [self.group(condition, mode) for mode in make_runs.MODES]
            with self.subTest(condition=condition):
                wanted = [recompute.outcome_row(group, groups[0]) for group in groups]
                self.assertEqual(tables[title, "Gains and losses"], wanted)
                caption = "Time and samples to an accuracy, means over the runs that reached it"
                rows = tables[title, caption]
                self.assertEqual(rows, [recompute.target_row(group) for group in groups])
                self.assertIn("3 of 3", {row[6] for row in rows}, "no run reaches 85 %")
                inside = [[*row[:4], None, *row[5:]] for row in tables[title, "Inside"]]
                self.assertEqual(inside, [recompute.inside_row(group) for group in groups])

    def test_staleness_table(self) -> None:
        """Accuracy by enforced staleness, and its difference from 0."""
        groups = [[self.facts[f"staleness_{value}-s{seed}"] for seed in (1, 2, 3)] for value in (0, 2, 8)]
        first = recompute.by_seed(groups[0], "accuracy", 100)
        rows = self.tables()["What staleness costs", ""]
        for row, group, value in zip(rows, groups, (0, 2, 8), strict=True):
            own = recompute.by_seed(group, "accuracy", 100)
            spread = recompute.statistics.stdev(own.values()) * recompute.T_975[2] / 3**0.5
            wanted = [str(value), "3 of 3", recompute.spread_text(list(own.values()), 2), f"± {spread:.2f}"]
            wanted += [recompute.points(own, None if group is groups[0] else first), "0.05", "0.9"]
            self.assertEqual(row, wanted)

    def references(self) -> dict[str, list[dict[str, Any]]]:
        """By the curves' names, in the order of the runs' names, and bsp."""
        found = {}
        for name in ("1xB", "NxB", "PyTorch"):
            found[name] = [self.facts[f"reference_{name}-s{seed}"] for seed in (1, 2, 3)]
        return found | {"bsp, 4 workers": self.group("even", "bsp")}

    def test_references(self) -> None:
        """The table, and how far bsp, one worker and PyTorch are apart."""
        curves = self.references()
        rows = self.tables()["Reference curves", ""]
        self.assertEqual(sorted(rows), sorted(recompute_words.reference_rows(curves)))
        text = self.markdown()
        for name, other, words in (
            ("NxB", "bsp, 4 workers", "NxB and bsp with 4 workers"),
            ("PyTorch", "bsp, 4 workers", "PyTorch and bsp with 4 workers"),
            ("PyTorch", "NxB", "PyTorch and NxB"),
        ):
            points, loss, marks = recompute_words.apart(curves[name], curves[other])
            self.assertIn(f"{words}: at most {points:.2f} points of accuracy and {loss:.2g} of loss apart, "
                          f"at {marks} marks of 3 seeds", text)  # fmt: skip
        self.assertIn("PyTorch and NxB: at most 0.40 points of accuracy and 0.015 of loss apart", text)

    def test_choices(self) -> None:
        """What to choose when: each mode in the list where its intervals put it, with its figures."""
        text = self.markdown()
        front = text.split("## What to choose when\n")[1].split("\n## ")[0]
        said = [line.removeprefix("- ") for line in front.splitlines() if line.startswith("- ")]
        groups = {condition: [self.group(condition, mode) for mode in make_runs.MODES] for condition in CONDITIONS}
        self.assertEqual(said, [recompute_words.choice(condition, found) for condition, found in groups.items()])

    def test_sentences(self) -> None:
        """Every sentence's figures are those of the tables, and none is made where the interval does not allow it."""
        text = self.markdown()
        for condition, title in CONDITIONS.items():
            bsp = self.group(condition, "bsp")
            section = text.split(f"## {title}\n")[1].split("\n## ")[0]
            for mode in make_runs.MODES[1:]:
                group = self.group(condition, mode)
                sentence = re.search(rf"^- {re.escape(mode)}: (.*)$", section, re.MULTILINE)[1]
                with self.subTest(condition=condition, mode=mode):
                    self.check_speed(sentence, group, bsp)
                    self.check_accuracy(sentence, group, bsp)
                    self.assertIn(recompute_words.time_sentence(group, bsp), sentence)
                    self.assertIn(recompute_words.wait_sentence(group, bsp), sentence)

    def check_speed(self, sentence: str, group: list[dict[str, Any]], bsp: list[dict[str, Any]]) -> None:
        """The ratio with its interval, or that nothing is shown."""
        if any(run["cpu"] > 0.7 for run in group):
            self.assertIn("no statement about speed", sentence)
            return
        cell = recompute.times(recompute.by_seed(group, "rate"), recompute.by_seed(bsp, "rate"))
        mean, low, high = (float(each) for each in re.findall(r"[\d.]+", cell))
        spread = f"{low:.2f} to {high:.2f} times"
        if f"{mean:.2f} times bsp's samples/s (95 % interval {spread})" in sentence:
            self.assertFalse(low < 1 < high, sentence)
        else:
            self.assertIn(f"the runs do not show another throughput than bsp's ({spread})", sentence)
            self.assertTrue(low <= 1 <= high, sentence)

    def check_accuracy(self, sentence: str, group: list[dict[str, Any]], bsp: list[dict[str, Any]]) -> None:
        """The difference with its interval, or that nothing is shown."""
        lost = sum(run["status"] != "done" for run in group)
        if lost:
            self.assertIn(f"no statement about accuracy, since {lost} of 3 runs", sentence)
            return
        own, other = (recompute.by_seed(each, "accuracy", 100) for each in (group, bsp))
        mean, half = recompute.paired(own, other)
        if abs(mean) > half:
            side = "below" if mean < 0 else "above"
            self.assertIn(f"accuracy {abs(mean):.2f} ± {half:.2f} points {side} bsp's", sentence)
        else:
            self.assertIn(f"do not show another accuracy than bsp's ({mean:+.2f} ± {half:.2f} points)", sentence)

    def test_lost_runs_are_rows(self) -> None:
        """With what happened to them."""
        rows = self.tables()["What to choose when", "2 runs did not end as they should; no mean contains them"]
        self.assertEqual({row[0] for row in rows}, {"even-asp-s2", "straggler-ssp_2-s3"})
        self.assertIn("loss is nan at step 31", {row[5] for row in rows})


class Prediction(ReportCase):
    """The simulated jobs do nothing but what the mode's rule makes them, so the predictions must come true."""

    def test_predicted_is_measured(self) -> None:
        """Within what a run's end makes a difference."""
        make_runs.make_comparison(self.output, seeds=(1,), staleness=())
        self.write()
        for name, row in self.csv().items():
            with self.subTest(run=name):
                ratio = float(row["predicted_samples_per_s"]) / float(row["samples_per_s"])
                self.assertAlmostEqual(ratio, 1, delta=0.08)

    def test_a_late_worker_is_missed_in_the_next_steps_too(self) -> None:
        """Two workers, one of them spare. The first batch of worker 0 lasts 5 s, all others 1 s: steps end at 1, 2, 3,
        4 and, with either worker, 5 s. With worker 1 as slow once, in its third batch, at 1, 2, 6, 7 and 8 s.
        """
        from experiments.compare.prediction import predicted_samples_per_s
        from experiments.compare.runs import StepTimes

        fast, late = [1.0] * 5, [5.0, *[1.0] * 4]
        for second, total_s in ((fast, 5), ([1.0, 1.0, 5.0, 1.0, 1.0], 8)):
            times = StepTimes([late, second], [[0.0] * 5] * 2, samples=10)
            self.assertAlmostEqual(predicted_samples_per_s("backup:1", times), 50 / total_s)


class Truth(ReportCase):
    """What was put into the simulated jobs comes out of the report."""

    def test_waiting_and_speed(self) -> None:
        """With one of four workers four times slower, three wait for 3/4 of their time in bsp; asp makes 13/4 of it."""
        make_runs.make_comparison(self.output, ("bsp", "asp", "backup:1"), ("straggler",), staleness=())
        self.write()
        rows = self.csv()
        bsp, asp = rows["straggler-bsp-s1"], rows["straggler-asp-s1"]
        self.assertAlmostEqual(float(bsp["wait_share"]), 0.75 * 0.75, delta=0.02)
        self.assertEqual(float(asp["wait_share"]), 0)
        self.assertAlmostEqual(float(asp["samples_per_s"]) / float(bsp["samples_per_s"]), 3.25, delta=0.25)
        self.assertEqual(int(bsp["dropped_samples"]), 0)
        self.assertGreater(int(rows["straggler-backup_1-s1"]["dropped_samples"]), 0)
        self.assertEqual(int(bsp["clock_gap_max"]), 0)

    def test_enforced_staleness(self) -> None:
        """Is what the logs say it was."""
        make_runs.make_comparison(self.output, (), (), staleness=(0, 4))
        self.write()
        self.assertEqual(self.csv()["staleness_4-s1"]["staleness_max"], "4")
        self.assertEqual(self.csv()["staleness_0-s1"]["staleness_max"], "0")

    def test_ssp_bounds_the_clock_gap(self) -> None:
        """By its number, and reaches it."""
        make_runs.make_run(self.output, "ssp:2", "straggler", 1)
        self.write()
        self.assertEqual(self.csv()["straggler-ssp_2-s1"]["clock_gap_max"], "2")

    def test_clocks_are_placed(self) -> None:
        """Workers' processes started at other times than the chief; batches still end where the chief has them."""
        from experiments.compare.runs import load_run

        folder = make_runs.make_run(self.output, "bsp", "even", 1)
        run = load_run(Path(folder))
        line = run.time_line
        ends = line["end_s"][line["step"] == line["step"].iloc[0]].tolist()
        self.assertEqual(len(ends), 4)
        self.assertAlmostEqual(max(ends), min(ends), places=6)


if __name__ == "__main__":
    unittest.main()
