"""What goes wrong around the runs is said in a line: wrong settings, a damaged plan, a full disk, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.compare import folder
from experiments.shared.machine import why_no_reports, write_json
from support import COMPARE, LIMIT_S, PlayedCase, compare, start_compare


class TroubleTest(PlayedCase):
    def test_what_the_programs_refuse_is_a_wrong_flag(self) -> None:
        status, _, err = compare(*self.flags("--modes=bsp"), fake="probe=flags")
        assert status == 2, err
        assert err.splitlines()[1:] == ["compare: --activation=relu: expected another (--help lists the flags)"], err
        assert compare(*self.flags("--modes=bsp"))[0] == 0  # The folder is none of a comparison yet.

    def test_batches_of_more_than_all_samples(self) -> None:
        flags = self.flags("--modes=bsp", "--dataset=csv:played", "--batch_size=321")
        status, _, err = compare(*flags)
        assert status == 2, err
        assert "batches of 2 workers are more than the 640 training samples" in err

    def test_a_step_time_below_the_compute(self) -> None:
        _, _, err = compare(*self.flags("--modes=bsp", "--step_time=0.1ms"))
        assert "warning: --step_time is shorter than that" in err

    def test_ctrl_c_in_the_probe(self) -> None:
        process = start_compare(*self.flags("--modes=bsp"), fake="probe=stop")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.wait_for(lambda: (self.output / "probe/worker1.jsonl").exists())
        process.send_signal(2)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, err
        assert err.endswith("compare: stopped before the first run; the same command goes on\n"), err

    def test_a_damaged_plan(self) -> None:
        assert compare(*self.flags("--modes=bsp"))[0] == 0
        path = self.output / "plan.json"
        plan = json.loads(path.read_text())
        settings = {name: value for name, value in plan["settings"].items() if name != "momentum"}
        damages = {text: json.loads(text) for text in ("{}", "[1]")}
        damages |= {name: {key: plan[key] for key in plan if key != name} for name in folder.GOES_ON}
        damages |= {"step_time_s": plan | {"step_time_s": None}, "probe.samples": plan | {"probe": {}}}
        damages |= {"probe.compute_s": plan | {"probe": 7}, "momentum": plan | {"settings": settings}}
        for name, damaged in damages.items():
            with self.subTest(name):
                path.write_text(json.dumps(damaged))
                with (
                    self.assertRaisesRegex(folder.Refused, "damaged. To start anew") as caught,  # noqa: PT027
                    folder.OutputFolder(self.output) as output,
                ):
                    folder.check_same(output.read_plan() or {}, plan, self.output)
                assert str(caught.exception).startswith(f"{path} ")
        path.write_text('{"settings":')
        for call in (self.flags("--modes=bsp"), ["report", str(self.output)]):
            status, _, err = compare(*call)
            assert (status, err.count("\n")) == (1, 1), err
            assert f"{path} cannot be read" in err

    def test_help_of_the_report(self) -> None:
        status, out, err = compare("report", "--help")
        assert (status, err) == (0, "")
        assert out.startswith("usage: deploy/compare.sh")

    def test_a_terminal_of_ascii(self) -> None:
        for arguments, status in ((["--help"], 0), (["--modes=\xdf"], 2)):
            done = subprocess.run(
                [sys.executable, "-B", str(COMPARE), *arguments],
                env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == status, done.stderr
            assert "Traceback" not in done.stderr

    def test_ctrl_c_during_imports(self) -> None:
        """As if it came while main.py is read."""
        script = (
            "import runpy, signal, sys\n"
            "class Import:\n"
            "    def find_spec(self, name, *_):\n"
            "        name == 'experiments.compare.main' and signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Import())\n"
            f"runpy.run_path({str(COMPARE / '__main__.py')!r}, run_name='__main__')\n"
        )
        done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (130, "compare: stopped before anything was begun\n")

    def test_an_old_python(self) -> None:
        script = f"import sys; sys.version_info = (3, 9, 2); exec(open({str(COMPARE / '__main__.py')!r}).read())"
        done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "compare: needs Python 3.10 or newer, this is 3.9\n")

    def test_a_full_disk(self) -> None:
        self.output.mkdir()
        full = OSError(errno.ENOSPC, "No space left on device")
        with (
            self.assertRaisesRegex(folder.Refused, f"{self.output}: no space is left") as caught,  # noqa: PT027
            folder.space_on(self.output),
            mock.patch.object(Path, "replace", side_effect=full),
        ):
            write_json(self.output / "plan.json", {})
        assert "runs that have ended are kept" in str(caught.exception)
        assert list(self.output.iterdir()) == []  # What was half written would make it a folder of something else.
        with folder.OutputFolder(self.output) as output:
            output.check_space()
            with mock.patch.object(folder.shutil, "disk_usage", return_value=mock.Mock(free=0)):
                self.assertRaises(OSError, output.check_space)  # noqa: PT027


class WordsTest(unittest.TestCase):
    def test_matplotlib_that_is_broken(self) -> None:
        class Import:
            def find_spec(self, name: str, *_: object) -> None:
                if name.startswith("matplotlib"):
                    raise RuntimeError("numpy was\nbuilt by another")

        loaded = {name: module for name, module in sys.modules.items() if not name.startswith("matplotlib")}
        with mock.patch.dict(sys.modules, loaded, clear=True), mock.patch.object(sys, "meta_path", [Import()]):
            said = why_no_reports()
        assert "since matplotlib cannot be imported (RuntimeError: numpy was built by another): deploy" in said


if __name__ == "__main__":
    unittest.main()
