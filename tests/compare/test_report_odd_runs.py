"""Reports from runs that are not as they should be: cut off, alone, without evaluations, diverged, killed, or none."""

# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

from report_case import ReportCase  # isort: skip

import make_runs

COMPARE = Path(__file__).parents[2] / "experiments/compare"


class OddRuns(ReportCase):
    """Each makes a report that says what it lacks."""

    def test_cut_off_file(self) -> None:
        """A line that a kill cut off is passed over, in each file."""
        folder = make_runs.make_run(self.output, "bsp", "even", 1)
        for path in folder.glob("*.jsonl"):
            make_runs.cut_off(path, 0.6)
        self.write()
        row = self.csv()["even-bsp-s1"]
        self.assertEqual(row["status"], "failed")
        self.assertLess(int(row["samples_applied"]), 480 * make_runs.BATCH)
        self.assertGreater(float(row["samples_per_s"]), 0)
        self.parse_html()

    def test_metrics_that_are_not_whole_change_no_mean(self) -> None:
        """One worker's file is cut off, at the end of a line or within one; one lacks a line; one is gone."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), (1, 2, 3, 4, 5), ())
        worker = self.output / "runs" / "even-asp-s2" / "worker0.jsonl"
        make_runs.cut_off(worker, 0.9)
        worker = self.output / "runs" / "even-asp-s3" / "worker0.jsonl"
        worker.write_text("".join(worker.read_text().splitlines(keepends=True)[:-5]))
        server = self.output / "runs" / "even-asp-s4" / "server0.jsonl"
        lines = server.read_text().splitlines(keepends=True)
        server.write_text("".join(lines[:200] + lines[201:]))
        (self.output / "runs" / "even-asp-s5" / "worker3.jsonl").unlink()
        self.write()
        reasons = {name: row["reason"] for name, row in self.csv().items() if row["status"] == "failed"}
        self.assertEqual(set(reasons), {f"even-asp-s{seed}" for seed in (2, 3, 4, 5)})
        self.assertRegex(reasons["even-asp-s2"], r"line \d+ of worker0.jsonl is broken")
        self.assertIn("worker0.jsonl has no end", reasons["even-asp-s3"])
        self.assertIn("server0.jsonl lacks a version", reasons["even-asp-s4"])
        self.assertIn("worker3.jsonl is missing or empty", reasons["even-asp-s5"])
        self.assertIn("| asp | 1 of 5, 4 failed |", self.markdown())

    def test_missing_and_empty_files(self) -> None:
        """No worker's file, an empty server's file."""
        folder = make_runs.make_run(self.output, "bsp", "even", 1)
        for path in folder.glob("worker*.jsonl"):
            path.unlink()
        (folder / "server0.jsonl").write_text("")
        self.write()
        self.assertEqual(self.csv()["even-bsp-s1"]["samples_per_s"], "")

    def test_one_mode_one_seed(self) -> None:
        """Says that nothing can be compared."""
        make_runs.make_run(self.output, "asp", "even", 1)
        self.write()
        self.assertIn("nothing can be said, since bsp and another mode are needed", self.markdown())
        self.parse_html()

    def test_one_seed(self) -> None:
        """Figures, but no statement."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1,), (0, 8))
        self.write()
        text = self.markdown()
        self.assertIn("one seed, no interval", text)
        self.assertIn("with one seed, which allows no statement", text)
        self.assertIn("There is one seed: no interval", text)
        self.assertNotIn("choose asp", text)

    def test_two_seeds_with_noise_allow_no_statement(self) -> None:
        """With one degree of freedom, t is 12.7."""
        make_runs.make_comparison(self.output, ("bsp", "local_sgd:8"), ("even",), (1, 2), ())
        self.write()
        self.assertIn("the runs do not show another accuracy than bsp's", self.markdown())

    def test_faster_but_later(self) -> None:
        """A mode that takes more samples a second, but reaches 80 % later, is not recommended."""
        make_runs.make_comparison(self.output, ("bsp", "local_sgd:8"), ("even",), (1, 2, 3), ())
        for path in self.output.glob("runs/even-local_sgd_8-*/worker0.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            evals = [line for line in lines if line["event"] == "eval"]
            for line in evals:
                line["accuracy"] = 0.84 if line is evals[-1] else 0.5
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.write()
        text = self.markdown()
        self.assertIn("these took more samples a second than bsp, but reached an accuracy later: local_sgd:8", text)
        self.assertNotIn("choose local_sgd:8", text)

    def test_no_evaluations(self) -> None:
        """Accuracy is missing, throughput is there."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1, 2), ())
        for path in self.output.glob("runs/*/worker*.jsonl"):
            path.write_text("".join(line for line in path.read_text().splitlines(True) if '"eval"' not in line))
        self.write()
        self.assertIn("no statement about accuracy, since nothing was evaluated on a test split", self.markdown())
        rows = self.tables()["A constant straggler", "Gains and losses"]
        self.assertEqual([row[2] for row in rows], ["—", "—"])
        self.assertEqual(rows[1][5].split()[0], "3.07")

    def test_diverged_run(self) -> None:
        """Is counted, listed, and forbids a statement on accuracy; the mean is of the others."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), staleness=())
        folder = self.output / "runs/even-asp-s2"
        self.change(folder, status="diverged", reason="dense1/weights is not finite")
        text = (folder / "worker0.jsonl").read_text()
        lines = text.splitlines()
        lines[40:] = [
            '{"event":"eval","t":1,"rank":0,"step":30,"version":30,"split":"test","loss":null,"accuracy":0.1}'
        ]
        (folder / "worker0.jsonl").write_text("\n".join(lines))
        self.write()
        row = self.tables()["Even workers", "Gains and losses"][1]
        self.assertEqual(row[1], "2 of 3, 1 diverged")
        self.assertIn("no statement about accuracy, since 1 of 3 runs of asp did not end", self.markdown())
        self.assertIn("dense1/weights is not finite", self.markdown())

    def test_killed_run_without_metrics(self) -> None:
        """A run of which nothing is left but run.json."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), staleness=())
        folder = self.output / "runs/even-bsp-s3"
        self.change(folder, status="failed", reason="server 0 was killed (SIGKILL)")
        for path in folder.glob("*.jsonl"):
            path.unlink()
        self.write()
        self.assertIn("2 of 3, 1 failed", self.markdown())
        self.parse_html()

    def test_broken_run_json(self) -> None:
        """Counts as a failed run."""
        make_runs.make_run(self.output, "bsp", "even", 1)
        (self.output / "runs/even-bsp-s1/run.json").write_text('{"id":')
        self.write()
        self.assertEqual(self.csv()["even-bsp-s1"]["status"], "failed")

    def test_trials(self) -> None:
        """Those of an enforced staleness are not asp's, although it is their mode; an edge is named."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), (1,), ())
        make_runs.make_run(self.output, "asp", "even", 1001, id="tune-asp-t1", kind="tuning", batches=40)
        one = {"workers": 1, "staleness": 4, "kind": "tuning", "batches": 40}
        make_runs.make_run(self.output, "asp", "even", 1001, id="tune-staleness_4-t1", **one)
        (self.output / "tuning.json").write_text('{"asp": {"at_edge": true}, "bsp": {"at_edge": false}}')
        self.write()
        trials = {row[0]: row[4] for row in self.tables()["Learning rates", ""]}
        self.assertEqual(trials, {"bsp": "0", "asp": "1"})
        self.assertIn("The best rate of asp is at the edge", self.markdown())

    def test_rates_of_a_script(self) -> None:
        """With --command they are not known, which is said."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), (1,), (), learning_rate=None, momentum=None)
        self.write()
        rows = self.tables()["Learning rates", ""]
        self.assertEqual(rows[0], ["bsp", "the script's", "the script's", "the script", "0"])
        self.assertNotIn("not tuned", self.markdown())

    def test_cpu_bound(self) -> None:
        """Marks the row, and no statement about speed is made."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), staleness=())
        for path in (self.output / "runs").iterdir():
            self.change(path, cpu_s=11.0)
        self.write()
        text = self.markdown()
        self.assertIn("CPU-bound, not comparable", text)
        self.assertIn("nothing can be said about speed, since the processors were busy", text)

    def test_run_that_is_not_over(self) -> None:
        """Is not in the report, which says how many are missing."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), staleness=())
        (self.output / "runs/even-asp-s3/run.json").unlink()
        self.write()
        self.assertNotIn("even-asp-s3", self.csv())
        self.assertIn("1 of 6 planned runs is still to be made", self.markdown())

    def test_a_folder_that_is_in_no_plan_is_no_run(self) -> None:
        """A copy of a run counts as nothing."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("even",), (1,), ())
        shutil.copytree(self.output / "runs/even-asp-s1", self.output / "runs/even-asp-s2")
        self.write()
        self.assertNotIn("even-asp-s2", self.csv())
        self.assertIn("| asp | 1 of 1 |", self.markdown())

    def test_ctrl_c_during_the_report_is_one_line(self) -> None:
        """And the exit status that shells give it."""
        make_runs.make_run(self.output, "bsp", "even", 1, batches=40)
        make_runs.write_plan(self.output)
        script = (
            "import runpy, signal, sys\n"
            "from experiments.compare import report\n"
            "report.write_reports = lambda _: signal.raise_signal(signal.SIGINT)\n"
            f"sys.argv = ['compare', 'report', {str(self.output)!r}]\n"
            f"runpy.run_path({str(COMPARE / '__main__.py')!r}, run_name='__main__')\n"
        )
        environment = os.environ | {"PYTHONPATH": str(COMPARE.parents[1])}
        command = [sys.executable, "-B", "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.stderr, "compare: stopped; what is done is kept, and the same command goes on\n")
        self.assertEqual(done.returncode, 130)

    def test_alone(self) -> None:
        """`report OUTPUT`; without runs it fails, with a line that says why."""
        make_runs.write_plan(self.output)
        command = [sys.executable, "-B", str(COMPARE), "report", str(self.output)]
        failed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(failed.returncode, 1)
        self.assertIn("there are no runs that have ended", failed.stderr)
        make_runs.make_run(self.output, "bsp", "even", 1, batches=40)
        make_runs.write_plan(self.output)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, f"compare: the report: {self.output}/report.html\n"))
        self.assertTrue((self.output / "report.html").exists())

    def test_without_its_packages(self) -> None:
        """A line says how to get them, before anything is run, and nothing is written."""
        make_runs.make_run(self.output, "bsp", "even", 1)
        make_runs.write_plan(self.output)
        hidden = self.output / "hidden"
        (hidden / "jinja2").mkdir(parents=True)
        (hidden / "jinja2/__init__.py").write_text("raise ModuleNotFoundError(name='jinja2')")
        command = [sys.executable, "-B", str(COMPARE), "report", str(self.output)]
        environment = os.environ | {"PYTHONPATH": str(hidden)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        said = (
            "a report cannot be written, since jinja2 is missing: deploy/install-deps.sh --plots installs what it needs"
        )
        self.assertEqual((done.returncode, done.stderr), (1, f"compare: {said}\n"))
        self.assertFalse((self.output / "report.md").exists())


class Verdicts(ReportCase):
    """What the Compose demo prints."""

    def test_yes(self) -> None:
        """Faster, about as accurate, the hash as expected."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1,), (), workers=3)
        self.change(self.output / "runs/straggler-bsp-s1", weights_hash="abc")
        self.plan_settings(expected_weights_hash="abc", killed_weights_hash="abc")
        verdicts = self.write()
        self.assertEqual([verdict.good for verdict in verdicts], [True] * 5)
        self.assertRegex(str(verdicts[1]), r"^async 2\.\d\d times the throughput of sync, at least 1\.5 wanted: yes$")
        self.assertIn("± ", str(verdicts[2]))

    def test_only_of_the_demo(self) -> None:
        """Other comparisons have asked for no threshold."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1,), ())
        self.assertEqual(self.write(), [])

    def test_no(self) -> None:
        """Another hash, a run that failed."""
        make_runs.make_comparison(self.output, ("bsp", "asp"), ("straggler",), (1,), (), workers=3)
        self.change(self.output / "runs/straggler-bsp-s1", weights_hash="abd")
        self.change(self.output / "runs/straggler-asp-s1", status="failed")
        self.plan_settings(expected_weights_hash="abc", killed_weights_hash="none")
        verdicts = self.write()
        self.assertEqual([verdict.good for verdict in verdicts], [False] * 5)
        self.assertIn("hash after the kills equals the undisturbed hash: no", self.markdown())
        self.assertIn("weights hash of sync as expected: no", self.markdown())

    def plan_settings(self, **settings: object) -> None:
        """Puts them into plan.json."""
        path = self.output / "plan.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": settings}))


if __name__ == "__main__":
    unittest.main()
