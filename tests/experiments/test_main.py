"""What runs experiments one after another, lists their pages and says when their jobs were made; no program runs."""
# ruff: noqa: I001, PT009 (support makes experiments importable; these tests need no pytest)

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import support  # noqa: F401

from experiments import lab, main
from experiments.lab import ExperimentFailed, JobSpec, Lab, Skipped, run_job
from experiments.page import Claim, Page

NAMES = ("digits", "links", "products")


class MainTest(unittest.TestCase):
    """With experiments of one line in place of the real ones."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="experiments-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.pages = self.folder / "pages"
        for program in ("ps_server", "ps_worker", "ps_bench"):
            (self.folder / program).write_text("")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def main(self, **experiments: Callable[[Lab], Page]) -> int:
        modules = {f"experiments.{name}": types.SimpleNamespace(run=run) for name, run in experiments.items()}
        flags = ["--quick", f"--bin={self.folder}", f"--output={self.folder}", f"--pages={self.pages}"]
        self.said = io.StringIO()
        with mock.patch.dict(sys.modules, modules), contextlib.redirect_stderr(self.said):
            return main.main([*experiments, *flags])

    def index(self) -> dict[str, list[str]]:
        """Cells, by experiment."""
        lines = (self.pages / "README.md").read_text(encoding="utf-8").splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| [")]
        return {row[1].split()[1].strip("`"): row for row in rows}

    def test_the_list_counts_published_figures_apart(self) -> None:
        claims = [Claim("a", "1", "1", verdict, "") for verdict in (True, True, False, None)]
        done = self.main(
            digits=lambda lab: Page("Digits", "Found.", claims=claims, expected=claims[:1]),
            links=lambda lab: Page("Links", "Found.", expected=claims, expected_column="by formula"),
        )
        self.assertEqual(done, 0)
        index = self.index()
        self.assertEqual(index["digits"][3:5], ["2 agree, 1 contradicts, 1 not comparable", "1 agrees"])
        self.assertEqual(index["links"][3:5], ["—", "2 agree, 1 contradicts, 1 not comparable"])
        self.assertIn("| what | by formula | ours |", (self.pages / "links.md").read_text(encoding="utf-8"))

    def test_the_page_of_an_earlier_run_is_listed_as_such_until_the_next_is_done(self) -> None:
        outcomes = {
            "failed": ExperimentFailed("no result"),
            "was skipped": Skipped("no root"),
        }
        for said, error in outcomes.items():
            self.main(digits=page)
            self.assertNotIn("earlier", self.index()["digits"][0])
            self.assertEqual(self.main(digits=raising(error), links=page), int(said == "failed"))
            self.assertIn(f"(**from an earlier run: the last one {said}**)", self.index()["digits"][0])
            self.assertNotIn("earlier", self.index()["links"][0])

    def test_a_mistake_in_one_does_not_stop_the_others(self) -> None:
        self.assertEqual(self.main(digits=raising(ZeroDivisionError("oops")), links=page), 1)
        self.assertIn("ZeroDivisionError: oops", self.said.getvalue())
        self.assertIn("Traceback", self.said.getvalue())
        self.assertEqual(list(self.index()), ["links"])

    def test_who_is_interrupted_while_a_page_is_drawn_says_so(self) -> None:
        def interrupted(*_: object) -> Path:
            os.kill(os.getpid(), signal.SIGINT)
            return self.pages / "digits.md"

        later = mock.Mock()
        with mock.patch.object(main, "write_page", interrupted):
            self.assertEqual(self.main(digits=page, links=later), 130)
        later.assert_not_called()
        self.assertEqual(self.main(digits=lambda lab: interrupted() and page(lab), links=later), 130)
        later.assert_not_called()


class KeptJobsTest(unittest.TestCase):
    """Jobs without programs: what would run them leaves what they leave."""

    MEASURED: ClassVar = {
        "wall_s": 90.0,
        "used": {"server0": {"cpu_s": 1.0, "waits": 7, "handovers": 3}},
        "training_cpu_s": 2.0,
    }

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="experiments-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.ran: list[str] = []
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for program in ("ps_server", "ps_worker"):
            (self.bin / program).write_text("")
        patch = mock.patch.object(lab, "run_once", self.run_one)
        patch.start()
        self.addCleanup(patch.stop)

    def run_one(self, *_: object) -> dict:
        (self.folder / "one").mkdir(exist_ok=True)
        for name in ("worker0", "server0"):
            (self.folder / f"one/{name}.jsonl").write_text("")
        self.ran.append("one")
        return dict(self.MEASURED)

    def make_lab(self, **more: bool) -> Lab:
        return Lab("digits", self.folder, self.bin, **more)

    def provenance(self, lab: Lab) -> str:
        return main.write_page(page(lab), lab, self.folder / "pages", 6.0).read_text(encoding="utf-8")

    def test_a_page_says_when_the_jobs_were_made_that_it_kept(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            first = self.make_lab()
            for _ in range(2):
                run_job(first, JobSpec("one", 1, [], []))
        self.assertEqual(self.ran, ["one"])
        self.assertIn("It took 0.1 minutes. Its 1 job took 1.5 minutes together. Figures", self.provenance(first))
        file = self.folder / "one/job.json"
        stored = json.loads(file.read_text())
        made = stored["made"]
        self.assertEqual(made["seconds"], 90.0)
        stored["made"] = {**made, "date": "2026-01-31", "commit": "0123456789ab"}
        file.write_text(json.dumps(stored))
        again = self.make_lab()
        self.assertEqual(run_job(again, JobSpec("one", 1, [], [])).used["server0"]["handovers"], 3)
        self.assertIn("1 of 1 jobs was kept from 2026-01-31 (sources 0123456789ab).", self.provenance(again))
        self.assertAlmostEqual(json.loads((self.folder / "pages/digits.json").read_text())["took_s"], 96.0)

    def test_a_job_of_an_older_version_is_kept_with_its_files_time(self) -> None:
        spec = JobSpec("one", 1, [], [])
        self.run_one()
        file = self.folder / "one/job.json"
        file.write_text(json.dumps({"identity": lab.identity(self.make_lab(), spec), **self.MEASURED}))
        os.utime(file, (1769860800, 1769860800))  # Noon of 2026-01-31 in UTC.
        again = self.make_lab()
        run_job(again, spec)
        self.assertEqual(self.ran, ["one"])
        said = self.provenance(again)
        self.assertRegex(said, r"Its 1 job took 1.5 minutes together. 1 of 1 jobs was kept from 2026-0(1-31|2-01)\. ")

    def test_fresh_runs_each_once(self) -> None:
        spec = JobSpec("one", 1, [], [])
        with contextlib.redirect_stderr(io.StringIO()):
            run_job(self.make_lab(), spec)
            fresh = self.make_lab(fresh=True)
            run_job(fresh, spec)
            run_job(fresh, spec)
        self.assertEqual(len(self.ran), 2)

    def test_hosts_are_part_of_what_a_job_is_and_nothing_is_without_them(self) -> None:
        slow, fast = ({"mbit_per_s": rate} for rate in (10, 100))
        identities = [lab.identity(self.make_lab(), JobSpec("one", 1, [], [], hosts=on)) for on in (None, slow, fast)]
        self.assertNotIn("hosts", identities[0])
        self.assertNotEqual(identities[1], identities[2])


def page(lab: Lab) -> Page:
    """With nothing on it."""
    return Page("A title", "Found.")


def raising(error: Exception) -> Callable[[Lab], Page]:
    """An experiment that ends so."""

    def run(lab: Lab) -> Page:
        raise error

    return run


if __name__ == "__main__":
    unittest.main()
