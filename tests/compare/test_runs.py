"""Comparisons with programs that only play: what is kept, continued, refused, and what a failed run leaves."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import unittest
from pathlib import Path

from support import LIMIT_S, REPOSITORY, PlayedCase, compare, processes_with, start_compare, why_no_reports


class RunsTest(PlayedCase):
    def test_all_end_well(self) -> None:
        status, out, err = compare(*self.flags("--modes=bsp,asp", "--servers=1"))
        assert status == 0, err
        assert out.startswith("- When workers are alike: nothing can be said, since intervals need two seeds")
        assert "\nEven workers\nmode    runs  accuracy %" in out
        assert "1 of 2  even-bsp-s1: done" in err
        assert "2 of 2  even-asp-s1: done" in err
        assert "accuracy 80.00%" in err
        assert "warning" not in err
        run = self.run_json("even-asp-s1")
        assert (run["status"], run["reason"], run["kind"]) == ("done", "", "comparison")
        assert (run["mode"], run["workers"], run["parameters"]) == ("asp", 2, 101770)
        assert run["wall_s"] < run["total_wall_s"]
        plan = json.loads((self.output / "plan.json").read_text())
        assert plan["runs"] == ["even-bsp-s1", "even-asp-s1"]
        assert plan["step_time_s"] == 0.001

    def test_outcomes(self) -> None:
        cases = {
            "bsp": ("diverge", "diverged", "weights of tensor w0 are not finite"),
            "ssp_2": ("crash", "failed", "worker1 was killed by SIGSEGV"),
            "asp": ("data", "failed", "worker1 ended with status 1: E fake: --dataset: there is no such file"),
            "ssp_3": ("port", "failed", "server0 ended with status 1: E fake: --listen=127.0.0.1:0: address in use"),
            "local_sgd_8": ("nan", "diverged", "not finite"),
            "easgd_8": ("guess", "did not learn", "about that of guessing"),
        }
        fake = ",".join(f"even-{mode}-s1={behaviour}" for mode, (behaviour, _, _) in cases.items())
        modes = "--modes=bsp,ssp:2,asp,ssp:3,local_sgd:8,easgd:8"
        status, _, err = compare(*self.flags(modes), fake=fake)
        assert status == 1, err
        for mode, (_, expected, reason) in cases.items():
            with self.subTest(mode):
                run = self.run_json(f"even-{mode}-s1")
                assert run["status"] == expected, run["reason"]
                assert reason in run["reason"]
                assert "\n" not in run["reason"]
        assert "3 runs failed or timed out: the report" in err

        began = {mode: self.run_json(f"even-{mode}-s1")["began_unix"] for mode in cases}
        status, _, err = compare(*self.flags(modes))  # What is a result is kept; what failed is made again.
        assert status == 0, err
        assert "3 of 6 runs are there" in err
        assert "3 runs that failed, timed out or lost metrics: made again" in err
        for mode, (_, before, _) in cases.items():
            run = self.run_json(f"even-{mode}-s1")
            assert run["status"] == ("done" if before == "failed" else before)
            assert (run["began_unix"] == began[mode]) == (before != "failed")

    def test_metrics_that_are_lost_during_a_run_and_after_it(self) -> None:
        flags = self.flags("--modes=bsp,asp")
        status, _, err = compare(*flags, fake="even-bsp-s1=lose")
        assert status == 1, err
        assert "even-bsp-s1: failed" in err
        assert "line 12 of server0.jsonl is broken" in self.run_json("even-bsp-s1")["reason"]
        assert "the same command makes it again" in err
        (self.output / "runs/even-asp-s1/worker1.jsonl").unlink()
        status, _, err = compare(*flags)
        assert status == 0, err
        assert "0 of 2 runs are there" in err
        assert {self.run_json(f"even-{mode}-s1")["status"] for mode in ("bsp", "asp")} == {"done"}
        assert (self.output / "runs/even-asp-s1/worker1.jsonl").exists()

    def test_timeout_ends_what_ignores_sigterm(self) -> None:
        # Long enough for a busy machine to start both workers, which say something first.
        status, _, err = compare(*self.flags("--modes=bsp,asp", "--run_timeout=6s"), fake="even-bsp-s1=hang")
        assert status == 1, err
        run = self.run_json("even-bsp-s1")
        assert run["status"] == "timed out"
        assert "even-bsp-s1: timed out" in err
        assert run["reason"].startswith("ran longer than 6 s; not ended: server0, worker0, worker1; ")
        assert "its last line: E fake: waiting for godot" in run["reason"]
        assert run["reason"].endswith("killed 10 s after SIGTERM: worker0, worker1")
        assert run["total_wall_s"] < 16  # Without the 10 s.
        assert self.run_json("even-asp-s1")["status"] == "done"

    def test_timeout_names_who_is_stopped(self) -> None:
        status, _, err = compare(*self.flags("--modes=bsp", "--run_timeout=6s"), fake="even-bsp-s1=stop")
        assert status == 1, err
        reason = self.run_json("even-bsp-s1")["reason"]
        assert reason.endswith("worker1 is stopped, its last line: E fake: about to be held"), reason

    def test_programs_that_cannot_start(self) -> None:
        (self.bin / "ps_worker").write_text("#!/no/such/interpreter\n")
        status, _, err = compare(*self.flags("--modes=bsp"))
        assert status == 1, err
        assert "a first short run failed" in err
        assert err.count("\n") == 2, err

    def test_goes_on_where_it_stopped(self) -> None:
        flags = self.flags("--modes=bsp,asp,ssp:1")
        process = start_compare(*flags, fake="even-asp-s1=hang")
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        # Until both ignore SIGTERM: else the program may have come to its report when the second signal does.
        logs = [self.output / f"runs/even-asp-s1/worker{rank}.log" for rank in (0, 1)]
        self.wait_for(lambda: all(log.exists() and "godot" in log.read_text() for log in logs))
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)  # It has no patience with programs that ignore SIGTERM.
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, err
        assert "stopped with 2 runs to make" in err
        assert (self.output / "report.md").exists()
        assert not (self.output / "runs/even-asp-s1/run.json").exists()
        assert processes_with(str(self.folder)) == []

        began = self.run_json("even-bsp-s1")["began_unix"]
        status, _, err = compare(*flags)
        assert status == 0, err
        assert "1 of 3 runs are there" in err
        assert "even-bsp-s1" not in err
        assert self.run_json("even-bsp-s1")["began_unix"] == began

        status, _, err = compare(*flags)  # All is there: only the report is made.
        assert status == 0, err
        assert "0 runs to make" in err

    def test_killed_by_sigkill_leaves_no_processes(self) -> None:
        process = start_compare(*self.flags("--modes=asp"), fake="s1=slow")
        self.wait_for(lambda: (self.output / "probe/worker0.jsonl").exists())
        process.kill()
        process.communicate()
        self.wait_for(lambda: processes_with(str(self.folder)) == [])

    def test_refuses_another_comparison(self) -> None:
        assert compare(*self.flags("--modes=bsp"))[0] == 0
        status, _, err = compare(*self.flags("--modes=bsp", "--seeds=2", "--momentum=0.5"))
        assert (status, err.count("\n")) == (1, 1), err
        assert "--seeds was 1, is 2" in err
        assert "--momentum was 0.9, is 0.5" in err
        assert f"rm -r {self.output}" in err

        (self.bin / "ps_server").write_text((self.bin / "ps_server").read_text() + "\n")
        status, _, err = compare(*self.flags("--modes=bsp"))
        assert status == 1
        assert "the programs are not those" in err

        plan_path = self.output / "plan.json"
        plan = json.loads(plan_path.read_text())
        plan_path.write_text(json.dumps({**plan, "commit": "f" * 40}))
        status, _, err = compare(*self.flags("--modes=bsp"))
        assert status == 1
        assert "the commit was ffffffffffff" in err

    def test_refuses_a_folder_of_something_else(self) -> None:
        self.output.mkdir()
        (self.output / "thesis.tex").write_text("x")
        status, _, err = compare(*self.flags("--modes=bsp"))
        assert (status, err.count("\n")) == (1, 1), err
        assert "thesis.tex" in err
        assert [path.name for path in self.output.iterdir()] == ["thesis.tex"]

    def test_one_process_a_folder(self) -> None:
        process = start_compare(*self.flags("--modes=asp"), fake="even-asp-s1=hang")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.wait_for(lambda: (self.output / "runs/even-asp-s1/worker1.jsonl").exists())
        status, _, err = compare(*self.flags("--modes=asp"))
        assert status == 1
        assert f"is being written to by process {process.pid}" in err
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.wait(timeout=LIMIT_S) == 143

    def test_tuning_is_kept(self) -> None:
        flags = self.flags("--modes=asp", "--tune")
        status, _, err = compare(*flags)
        assert status == 0, err
        assert "14 of 15" in err
        assert "15 runs to make" in err
        found = json.loads((self.output / "tuning.json").read_text())
        assert len(found["asp"]["trials"]) == 14
        run = self.run_json("even-asp-s1")
        assert run["tuned"]
        assert run["learning_rate"] == found["asp"]["learning_rate"]
        assert "--validation_split=0.1" in self.run_json(found["asp"]["trials"][0]["id"])["flags"]["worker"]
        status, _, err = compare(*flags)
        assert status == 0, err
        assert "15 of 15 runs are there" in err
        assert "0 runs to make" in err

    def test_tuning_that_was_stopped_goes_on(self) -> None:
        flags = self.flags("--modes=asp", "--tune")
        process = start_compare(*flags, fake="t4=crash,t6=hang")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.wait_for(lambda: any(self.output.glob("runs/tune-asp-*-t6/worker1.jsonl")))
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(timeout=LIMIT_S) == 130
        stale = self.output / "runs/tune-asp-lr9-m0-t4"  # As if what came before t4 had led to another rate.
        next(self.output.glob("runs/tune-asp-*-t4")).rename(stale)
        status, _, err = compare(*flags)
        assert status == 0, err
        assert "4 of 15 runs are there" in err
        assert "1 run that failed" in err
        assert "11 runs to make" in err
        assert " 4 of 15  tune-asp" in err
        assert not stale.exists()
        assert len(list(self.output.glob("runs/*-t4"))) == 1


BIN = Path(os.environ.get("PS_BIN") or os.environ.get("PSGRAD_BIN") or REPOSITORY / "build/bin")


@unittest.skipIf(why_no_reports(), why_no_reports())
@unittest.skipUnless((BIN / "ps_worker").exists() and (BIN / "ps_server").exists(), f"no programs in {BIN}")
class RealRunTest(unittest.TestCase):
    def test_a_short_comparison(self) -> None:
        with tempfile.TemporaryDirectory(prefix="compare-test-") as folder:
            output = Path(folder) / "output"
            dataset = "synthetic:samples=4096,features=20,classes=4,test=512"
            status, _, err = compare(
                "--modes=bsp,asp", "--workers=2", "--conditions=straggler", "--seeds=1", "--staleness=3", "--epochs=2",
                "--step_time=4ms", f"--dataset={dataset}", "--model=mlp:20,16,4", f"--bin={BIN}", f"--output={output}",
            )  # fmt: skip
            assert status == 0, err
            runs = {path.parent.name: json.loads(path.read_text()) for path in output.glob("runs/*/run.json")}
            assert {run["status"] for run in runs.values()} == {"done"}, runs
            assert len(runs) == 5
            # 64 batches: 32 rounds of the straggler's 16 ms, or its every fifth.
            assert runs["straggler-bsp-s1"]["wall_s"] > 0.45
            assert runs["straggler-asp-s1"]["wall_s"] < runs["straggler-bsp-s1"]["wall_s"]
            assert processes_with(folder) == []


if __name__ == "__main__":
    unittest.main()
