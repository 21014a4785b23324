"""What is read from logs and metrics of runs."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.compare.run import last_result, status_of_ended
from experiments.shared.job import JobFailed, failure_reason
from experiments.shared.metrics import applied_unix_s
from experiments.shared.processes import Child, CpuClock, end_all, wait_until


class OutcomeTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory(prefix="compare-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def ended(self, name: str, script: str) -> Child:
        child = Child(name, ["sh", "-c", script], self.folder)
        assert wait_until(lambda: not child.running, 20)
        return child

    def test_reason_is_the_last_line(self) -> None:
        child = self.ended("worker1", "echo '2026-01-02 03:04:05.678 I x: fine' >&2; echo broken >&2; exit 3")
        assert failure_reason(child) == "worker1 ended with status 3: broken"

    def test_what_went_well_is_no_reason(self) -> None:
        child = self.ended("worker1", "echo '2026-01-02 03:04:05.678 I x: rank 1 of 2' >&2; kill -9 $$")
        assert failure_reason(child) == "worker1 was killed by SIGKILL"

    def test_reason_without_a_line(self) -> None:
        assert failure_reason(self.ended("worker1", "kill -9 $$")) == "worker1 was killed by SIGKILL"

    def test_reason_of_the_process_that_psrun_blames(self) -> None:
        log = "[worker 1] Traceback\n[worker 1] ValueError: no data\n[worker 0] lost\n"
        log += "psrun: worker 1 ended with status 1: ending the others\n[server 0] stopped\n"
        child = self.ended("psrun", f"printf '%s' '{log}' >&2; exit 1")
        assert failure_reason(child) == "worker 1 ended with status 1: ValueError: no data"

    def test_not_finite(self) -> None:
        child = self.ended("server0", "echo 'E s: the weights of tensor w are not finite; too high' >&2; exit 1")
        other = self.ended("worker0", "exit 1")
        for children, said in (
            ([child], ("diverged", "E s: the weights of tensor w are not finite; too high")),
            ([other], ("failed", "worker0 ended with status 1")),
        ):
            failure = JobFailed("failed", blamed=children[0])
            assert status_of_ended(children, failure, self.folder, None) == said

    def test_last_result_of_metrics_that_are_cut_off(self) -> None:
        lines = [
            '{"event":"eval","version":5,"split":"test","loss":0.5,"accuracy":0.7}',
            '{"event":"eval","version":9,"split":"test","loss":null,"accuracy":0.8}',
            '{"event":"eval","version":9,"split":"validation","loss":0.4,"accuracy":0.6}',
            '{"event":"eval","version":10,"spl',
        ]
        (self.folder / "worker0.jsonl").write_text("\n".join(lines))
        (self.folder / "worker1.jsonl").write_text(lines[0].replace("0.7", "0.1") + "\n")
        test, validation = last_result(self.folder), last_result(self.folder, "validation")
        assert (test.found, test.loss, test.accuracy) == (True, None, 0.8)
        assert (validation.loss, validation.accuracy) == (0.4, 0.6)
        assert not last_result(self.folder / "nowhere").found
        assert (test.diverged, validation.diverged) == (True, False)

    def test_a_script_that_tells_no_loss_has_not_diverged(self) -> None:
        (self.folder / "worker0.jsonl").write_text('{"event":"eval","version":5,"split":"test","accuracy":0.7}\n')
        assert status_of_ended([], None, self.folder, None) == ("done", "")

    def test_processor_time_between_versions(self) -> None:
        (self.folder / "server0.jsonl").write_text(
            '{"event":"start","t":1.0,"unix_time":101.0}\n{"event":"apply","t":2.0}\n{"event":"apply","t":4.0}\n'
        )
        assert applied_unix_s(self.folder) == [102.0, 104.0]
        child = Child("busy", ["sh", "-c", "while :; do :; done"], self.folder)
        self.addCleanup(end_all, [child], 1)
        clock = CpuClock()
        assert wait_until(lambda: clock.look([child]) or child.cpu_now_s() > 0.5, 60)
        assert 0.3 < clock.between_s(0, 1e12) <= 0.6

    def test_what_a_process_leaves_behind_is_ended(self) -> None:
        child = self.ended("parent", f"sleep 1000 & echo $! > {self.folder}/pid")
        pid = int((self.folder / "pid").read_text())
        assert child.status == 0
        assert wait_until(lambda: not _runs(pid), 20)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    unittest.main()
