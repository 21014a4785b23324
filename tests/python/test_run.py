"""psrun: what a user sees of it, with small scripts as workers and real servers."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import await_exit_of
from psgrad import run
from psgrad._lines import Lines
from psgrad._supervisor import find_program, server_flags

TIMEOUT_S = 30.0
# So that the scripts need no server.
NO_SERVER = "--server=127.0.0.1:1"
REAL_WORKER = """
    import os, sys
    program = os.environ["PSGRAD_BIN"] + "/ps_worker"
    os.execv(program, [program, "--server=" + os.environ["PS_SERVER"], "--rank=" + os.environ["PS_RANK"],
                       "--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3", "--batch_size=10",
                       *sys.argv[1:]])
"""

TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

needs_programs = pytest.mark.skipif(
    not os.access(os.path.join(os.environ.get("PSGRAD_BIN", "/none"), "ps_worker"), os.X_OK),
    reason="$PSGRAD_BIN does not name a folder with ps_server and ps_worker",
)


class Psrun:
    """A running psrun; its stdout and stderr together are `output`, as far as they were read."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.output = b""

    def await_output(self, pattern: str, times: int = 1) -> list[bytes]:
        """Reads until the pattern was found so often; the first groups of what was found."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := re.findall(pattern.encode(), self.output)) < times:
            assert self._read(deadline), f"{pattern} is not in the output:\n{self.text}"
        return found

    def await_end(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while self._read(deadline):
            pass
        return self.process.wait(TIMEOUT_S)

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    def _read(self, deadline: float) -> bool:
        assert self.process.stdout is not None
        left = deadline - time.monotonic()
        ready, _, _ = select.select([self.process.stdout], [], [], max(left, 0))
        assert ready, f"psrun took more than {TIMEOUT_S} s:\n{self.text}"
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.output += data
        return bool(data)


@contextmanager
def psrun(*arguments: str | Path, stderr: int = subprocess.STDOUT) -> Iterator[Psrun]:
    command = [sys.executable, "-m", "psgrad.run", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, env=environment, bufsize=0
    )
    try:
        yield Psrun(process)
    finally:
        process.kill()  # Its children follow it.
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ran(*arguments: str | Path) -> tuple[int, str]:
    with psrun(*arguments) as job:
        return job.await_end(), job.text


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "train.py")


class Script:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, source: str) -> Path:
        self._path.write_text(
            "import os, signal, sys, time\nrank = int(os.environ['PS_RANK'])\n" + textwrap.dedent(source)
        )
        return self._path


def children_of(pid: int, program: str) -> list[int]:
    """The children that run this program."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if os.readlink(f"/proc/{child}/exe").endswith(program)]


# ---- What workers get


def test_workers_find_their_place_in_the_environment(script: Script) -> None:
    path = script("print(*[os.environ[name] for name in ('PS_RANK', 'PS_LOCAL_RANK', 'PS_NUM_WORKERS', "
                  "'PS_LOCAL_NUM_WORKERS', 'PS_SERVER', 'PS_JOB')], *sys.argv[1:])")  # fmt: skip
    status, output = ran("--workers=2", NO_SERVER, "--job=j", path, "--epochs=3", "x")
    assert status == 0
    assert sorted(output.splitlines()) == [
        "[worker 0] 0 0 2 2 127.0.0.1:1 j --epochs=3 x",
        "[worker 1] 1 1 2 2 127.0.0.1:1 j --epochs=3 x",
    ]


def test_torchruns_names_are_set_only_on_demand(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's Trainer takes them for a process group. Those of a launcher around psrun are not the workers'."""
    path = script(f"print('found:', *[os.environ[name] for name in {TORCHRUN_NAMES} if name in os.environ])")
    for name in TORCHRUN_NAMES:
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")
    assert ran(NO_SERVER, path) == (0, "[worker 0] found:\n")
    for flag in ("--torch_env", "--torch_env=true"):
        assert ran("--workers=1", flag, NO_SERVER, path) == (0, "[worker 0] found: 0 0 1 1\n")


def test_workers_share_the_cores_unless_the_user_says_otherwise(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script("print('threads', os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ran("--workers=2", NO_SERVER, path)[1].count(f"threads {share}\n") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "threads 7\n" in ran(NO_SERVER, path)[1]


def test_a_module_can_be_run_as_a_worker() -> None:
    status, output = ran(NO_SERVER, "-m", "platform", "terse")
    assert status == 0
    assert output.startswith("[worker 0] Linux")


def test_under_torchrun_or_slurm_a_launcher_stands_for_its_workers() -> None:
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "9"}
    assert run.place_in(torchrun) == run.Place(rank=2, world=4, local_rank=1, local_world=2)
    assert run.place_in({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == run.Place(rank=1, world=2)
    assert run.place_in({"RANK": "1"}) == run.Place()
    for wrong, named in (
        ({"RANK": "2", "WORLD_SIZE": "2"}, "^RANK=2 of WORLD_SIZE=2 "),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "^LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1 "),
    ):
        with pytest.raises(run.UsageError, match=named):
            run.place_in(wrong)


def test_slurm_says_how_many_tasks_each_node_has() -> None:
    """As srun does, whatever it was asked for: here for five tasks on three nodes."""
    job = {"SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    places = [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1"), ("4", "2", "0")]
    for rank, node, local_rank in places:
        environment = {**job, "SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local_rank}
        assert run.place_in(environment) == run.Place(int(rank), 5, int(local_rank), 1 if node == "2" else 2)


def test_ranks_go_on_from_launcher_to_launcher(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(f"print(*[os.environ[name] for name in {TORCHRUN_NAMES}])")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    output = ran("--workers=2", "--torch_env", NO_SERVER, path)[1]
    assert sorted(output.splitlines()) == ["[worker 2] 2 0 6 2", "[worker 3] 3 1 6 2"]


# ---- Servers


@needs_programs
def test_it_trains_with_two_workers_and_two_servers(script: Script, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    path = script(REAL_WORKER)
    status, output = ran(
        "--workers=2", "--servers=2", "--optimizer=sgd", "--mode=bsp", f"--metrics_file={metrics}", path, "--epochs=2"
    )
    assert status == 0, output
    assert "[server 1] listening on 127.0.0.1:" in output
    assert "[worker 0] weights hash: " in output
    assert sorted(file.name for file in tmp_path.glob("metrics*")) == ["metrics.0.jsonl", "metrics.1.jsonl"]


@needs_programs
def test_a_flag_that_servers_refuse_is_a_usage_error_in_their_words(script: Script) -> None:
    status, output = ran("--mode=foo", script("print('started')"))
    assert status == 2
    assert "[server 0] ps_server: --mode=foo: expected bsp" in output
    assert "psrun: server 0 ended with status 2" in output
    assert "started" not in output


@needs_programs
def test_a_dead_server_ends_the_job_and_is_named(script: Script) -> None:
    path = script("print('ready')\ntime.sleep(100)")
    with psrun("--workers=2", "--servers=2", "--optimizer=sgd", path) as job:
        job.await_output("ready", times=2)
        os.kill(children_of(job.process.pid, "ps_server")[0], signal.SIGKILL)
        assert job.await_end() == 1
    assert "psrun: server 0 was killed by signal 9 (SIGKILL): ending the others\n" in job.text


@needs_programs
def test_a_worker_is_named_although_the_server_fails_first(script: Script) -> None:
    # It joins, and leaves the job by its death, which the server notices; but its process takes a moment longer to end.
    path = script("""
        import socket, subprocess
        program = os.environ["PSGRAD_BIN"] + "/ps_worker"
        worker = subprocess.Popen([program, "--server=" + os.environ["PS_SERVER"], "--epochs=1000000", "--eval_every=1",
            "--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3"], stderr=subprocess.PIPE)
        while b"test split" not in worker.stderr.readline(): pass
        worker.terminate()
        worker.wait()
        host, port = os.environ["PS_SERVER"].split(":")
        try:
            while True:
                socket.create_connection((host, int(port))).close()
                time.sleep(0.01)
        except OSError:  # The server has ended.
            time.sleep(0.2)
            sys.exit(5)
    """)
    status, output = ran("--optimizer=sgd", path)
    assert status == 5
    assert "psrun: worker 0 ended with status 5" in output


@needs_programs
def test_servers_that_do_not_end_after_the_workers_are_an_error(script: Script, tmp_path: Path) -> None:
    # What trains is not the worker's own process, and outlives it.
    path = script("""
        import subprocess
        command = [os.environ["PSGRAD_BIN"] + "/ps_worker", "--server=" + os.environ["PS_SERVER"], "--epochs=1000000",
                   "--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3"]
        with open(sys.argv[1], "wb") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        while "rank 0 of 1 as" not in open(sys.argv[1]).read():
            time.sleep(0.01)
        print("process", worker.pid)
    """)
    with psrun("--server_timeout=2s", "--optimizer=sgd", path, tmp_path / "log") as job:
        (pid,) = job.await_output("process ([0-9]+)")
        assert job.await_end() == 1
    assert "psrun: server 0 still runs 2 s after the workers have ended (did they all join the job?)" in job.text
    await_exit_of([int(pid)])


@needs_programs
@pytest.mark.parametrize("flags", [[], ["--servers=2"], ["--min_workers=1"]])
def test_scripts_that_end_before_they_join_end_the_job_at_once(script: Script, flags: list[str]) -> None:
    """As for train.py --help."""
    began = time.monotonic()
    status, output = ran("--workers=2", *flags, "--server_timeout=25s", script("print('usage: train')"))
    assert status == 0
    assert time.monotonic() - began < 20
    assert output.count("usage: train") == 2
    assert "psrun: the workers have ended, and none has joined the job: its servers were ended\n" in output
    assert "failed" not in output


@needs_programs
def test_a_wrong_argument_of_the_script_ends_psrun_with_the_scripts_status(script: Script) -> None:
    status, output = ran(script("import argparse\nargparse.ArgumentParser().parse_args()"), "--nonsense")
    assert status == 2
    assert output.endswith("psrun: the first failure: worker 0 ended with status 2\n")


ONE_DOES_NOT_JOIN = """
    if rank == 0:
        sys.exit(0)
    program = os.environ["PSGRAD_BIN"] + "/ps_worker"
    os.execv(program, [program, "--server=" + os.environ["PS_SERVER"],
                       "--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3", "--batch_size=10",
                       "--epochs=1"])
"""


@needs_programs
def test_a_worker_that_ends_well_before_it_joins_is_a_failure_where_others_wait_for_it(script: Script) -> None:
    status, output = ran("--workers=2", "--optimizer=sgd", script(ONE_DOES_NOT_JOIN))
    assert status == 1
    what = "worker 0 ended with status 0 before it joined the job, and others wait for it"
    assert f"psrun: {what}: ending the others\n" in output
    assert output.endswith(f"psrun: the first failure: {what}\n")


@needs_programs
def test_where_workers_come_and_go_another_one_may_take_the_place_of_one_that_never_joined(script: Script) -> None:
    path = script(ONE_DOES_NOT_JOIN)
    with psrun("--workers=2", "--max_workers=3", "--optimizer=sgd", path) as job:
        (address,) = job.await_output(r"listening on (\S+)")
        job.await_output("before it joined the job, and others wait for it, or for one that is started elsewhere\n")
        with psrun(f"--server={address.decode()}", "--workers=1", script(REAL_WORKER), "--epochs=1") as more:
            assert more.await_end() == 0, more.text
        assert job.await_end() == 0, job.text


@needs_programs
@pytest.mark.parametrize("flag", ["--keep_running", "--keep_running=1"])
def test_servers_that_are_to_keep_running_end_on_ctrl_c(script: Script, flag: str) -> None:
    with psrun(flag, "--optimizer=sgd", script(REAL_WORKER)) as job:
        job.await_output("the servers run until Ctrl-C")
        job.process.send_signal(signal.SIGINT)
        assert job.await_end() == 0


@needs_programs
def test_where_each_servers_page_is_is_said(script: Script) -> None:
    flags = ("--servers=2", "--http_listen=127.0.0.1:0", "--keep_running", "--optimizer=sgd")
    with psrun(*flags, script(REAL_WORKER), "--steps=5") as job:
        job.await_output("the servers run until Ctrl-C")
        pages = job.await_output(r"\[server [01]\] page at (http://127\.0\.0\.1:[0-9]+)\n", times=2)
        for page in pages:
            with urllib.request.urlopen(page.decode() + "/healthz", timeout=TIMEOUT_S) as answer:
                assert answer.status == 200
        job.process.send_signal(signal.SIGINT)
        assert job.await_end() == 0, job.text


def test_what_servers_are_started_with() -> None:
    flags = {"job": "j", "metrics_file": "runs.d/m.jsonl", "mode": "asp"}
    assert server_flags(0, 1, 3, flags, chief=None) == [
        "--listen=127.0.0.1:0",
        "--num_workers=3",
        "--optimizer=from_worker",
        "--job=j",
        "--metrics_file=runs.d/m.jsonl",
        "--mode=asp",
    ]
    second = server_flags(1, 2, 3, {**flags, "optimizer": "adam"}, chief="127.0.0.1:7")
    assert {"--shard=1", "--num_shards=2", "--chief=127.0.0.1:7", "--optimizer=adam"} < set(second)
    assert "--metrics_file=runs.d/m.1.jsonl" in second


@pytest.mark.parametrize(
    ("given", "taken"),
    [("127.0.0.1:8080", "127.0.0.1:8082"), ("[::1]:8080", "[::1]:8082"), ("localhost:0", "localhost:0"), ("x", "x")],
)
def test_each_server_has_its_page_on_a_port_of_its_own(given: str, taken: str) -> None:
    flags = {"http_listen": given}
    assert f"--http_listen={taken}" in server_flags(2, 3, 1, flags, chief="127.0.0.1:7")
    assert f"--http_listen={given}" in server_flags(0, 3, 1, flags, chief=None)


# ---- Failures


def test_the_first_failure_ends_everything_and_is_named(script: Script) -> None:
    path = script("""
        if rank == 1:
            print("about to fail", file=sys.stderr)
            sys.exit(3)
        try:
            time.sleep(100)
        finally:
            print("cleaned up")
    """)
    status, output = ran("--workers=3", NO_SERVER, path)
    assert status == 3
    assert output.count("cleaned up") <= 2  # Those that were up already.
    assert "[worker 1] about to fail\npsrun: worker 1 ended with status 3: ending the others\n" in output
    assert output.endswith("psrun: the first failure: worker 1 ended with status 3\n")


def test_the_exception_of_the_first_failure_is_the_last_line(script: Script) -> None:
    path = script("""
        if rank == 1:
            try:
                raise KeyError("not this one")
            except KeyError:
                raise ValueError("the data\\nare gone")
        try:
            print("ready")
            time.sleep(100)
        except KeyboardInterrupt:
            raise RuntimeError("a victim")
    """)
    status, output = ran("--workers=2", NO_SERVER, path)
    assert status == 1
    assert output.endswith("psrun: the first failure: worker 1 ended with status 1: ValueError: the data\n")


def test_whoever_fails_because_of_another_is_not_blamed_although_it_was_faster(script: Script, tmp_path: Path) -> None:
    path = script("""
        class JobFailed(Exception): pass
        JobFailed.__module__ = "psgrad"
        done = sys.argv[1]
        if rank == 0:
            open(done, "w").close()
            raise JobFailed("worker 1 has left")
        while not os.path.exists(done):
            time.sleep(0.01)
        time.sleep(0.1)
        raise ValueError("the cause")
    """)
    status, output = ran("--workers=2", NO_SERVER, path, tmp_path / "done")
    assert status == 1
    assert output.endswith("psrun: the first failure: worker 1 ended with status 1: ValueError: the cause\n") or (
        output.endswith("psrun: worker 1 ended with status 1: ValueError: the cause\n")
    )


def test_a_script_runs_as_python_runs_it(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From its own folder, as __main__, whose classes can be pickled; its traceback begins in it."""
    (tmp_path / "beside.py").write_text("name = 'beside'")
    path = script("""
        import multiprocessing, pickle, beside
        class Mine: pass
        def square(x: int): return x * x
        assert square.__annotations__ == {"x": int}
        assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
        assert os.path.isabs(__file__) and sys.path[0] == os.path.dirname(__file__)
        if __name__ == "__main__":
            print(beside.name, sys.argv[1:], multiprocessing.get_context("spawn").Pool(1).map(square, [3]))
            raise ValueError("no frame of psrun's is above")
    """)
    monkeypatch.chdir(tmp_path)
    status, output = ran(NO_SERVER, path.name, "-x", "--help")
    assert status == 1
    assert output.startswith("[worker 0] beside ['-x', '--help'] [9]\n[worker 0] Traceback (most recent call last):\n"
                             f'[worker 0]   File "{path}", line 1')  # fmt: skip


def test_a_worker_that_is_killed_is_named_with_the_signal(script: Script) -> None:
    status, output = ran(NO_SERVER, script("os.kill(os.getpid(), signal.SIGKILL)"))
    assert status == 1
    assert output == "psrun: worker 0 was killed by signal 9 (SIGKILL)\n"


FAILS_AT_FIRST = """
    lives = len(open("lives").read()) if os.path.exists("lives") else 0
    open("lives", "a").write("x")
    if lives < int(sys.argv[1]):
        sys.exit(3)
    print("lives on")
"""


def test_a_worker_that_fails_is_started_again_as_often_as_was_said(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = script(FAILS_AT_FIRST)
    status, output = ran(NO_SERVER, "--max_restarts=1", path, "1")
    assert status == 0, output
    assert output == (
        "psrun: worker 0 ended with status 3; it is started again in 1 s (1 of 1 times)\n[worker 0] lives on\n"
    )
    (tmp_path / "lives").unlink()
    status, output = ran(NO_SERVER, "--max_restarts=1", path, "2")
    assert status == 3
    assert output.endswith("(1 of 1 times)\npsrun: worker 0 ended with status 3\n")


def test_ctrl_c_ends_the_wait_for_a_worker_that_is_to_be_started_again(script: Script) -> None:
    with psrun(NO_SERVER, "--max_restarts=9", script("sys.exit(3)")) as job:
        job.await_output("started again in 4 s")
        job.process.send_signal(signal.SIGINT)
        assert job.await_end() == 130
    assert "started again in 8 s" not in job.text


@needs_programs
def test_where_workers_come_and_go_a_killed_one_is_replaced_and_the_others_go_on(script: Script) -> None:
    path = script(REAL_WORKER)
    with psrun(
        "--workers=2", "--min_workers=1", "--optimizer=sgd", "--mode=bsp", "--reconnect_grace=100ms",
        path, "--epochs=20", "--experiment_step_time=20ms",
    ) as job:  # fmt: skip
        job.await_output(r"\[worker \d\] .*rank \d of \d as", times=2)
        os.kill(children_of(job.process.pid, "ps_worker")[1], signal.SIGKILL)
        job.await_output(r"killed by signal 9 \(SIGKILL\); it is started again in 1 s \(1 of 3 times\)")
        job.await_output(r"\[worker \d\] .*rank \d of \d as", times=3)
        assert job.await_end() == 0, job.text
    assert "weights hash: " in job.text


@needs_programs
def test_whoever_comes_again_after_the_jobs_end_is_no_failure(script: Script, tmp_path: Path) -> None:
    # Worker 1 dies in the job; most often the other one ends it within the second before the next one is started.
    path = script("""
        import subprocess
        command = [os.environ["PSGRAD_BIN"] + "/ps_worker", "--server=" + os.environ["PS_SERVER"],
                   "--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3", "--batch_size=10",
                   "--epochs=5", "--metrics_file=" + sys.argv[1 + rank], "--experiment_step_time=5ms",
                   "--connect_timeout=2s"]
        if rank == 0:
            os.execv(command[0], command)
        if os.path.exists(sys.argv[2]):
            os.unlink(sys.argv[2])
        worker = subprocess.Popen(command)
        def trains():
            return os.path.exists(sys.argv[2]) and '"step"' in open(sys.argv[2]).read()
        while worker.poll() is None and not trains():
            time.sleep(0.01)
        worker.kill()
        sys.exit(3)
    """)
    flags = ("--workers=2", "--min_workers=1", "--optimizer=sgd", "--reconnect_grace=100ms")
    status, output = ran(*flags, path, tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    assert status == 0, output
    assert "worker 1 ended with status 3; it is started again in 1 s (1 of 3 times)" in output


def test_min_and_max_workers_have_runs_handed_out_and_restarts() -> None:
    for flags in (["--min_workers=1", "--workers=2"], ["--max_workers=4", "--workers=2"]):
        options = run.parse([*flags, "-m", "x"])
        assert (options.server_flags["budget"], options.max_restarts) == ("job", 3)
    elastic = ["--workers=2", "--min_workers=1"]
    assert run.parse([*elastic, "--budget=share", "-m", "x"]).server_flags["budget"] == "share"
    assert run.parse([*elastic, "--max_restarts=0", "-m", "x"]).max_restarts == 0
    assert run.parse(["--workers=4", "-m", "x"]).max_restarts == 0
    fixed = run.parse(["--workers=4", "--min_workers=4", "-m", "x"])
    assert ("budget" in fixed.server_flags, fixed.max_restarts, fixed.elastic) == (False, 0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_restarts=often", "-m", "x"], "--max_restarts=often: expected a number from 0 on"),
        (["nowhere.py"], "nowhere.py: there is no such script"),
        (
            ["--mode=asp", "--optimizer", "adam", "x.py"],
            "adam: there is no such script; flags of ps_server are given as",
        ),
        ([], "the script is missing"),
        (["-m"], "-m: the module is missing"),
        (["--workers=0", "-m", "x"], "--workers=0: expected a number from 1 on"),
        (["--workers"], "--workers: a value is missing"),
        (["--grace=soon", "-m", "x"], "--grace=soon: expected a duration"),
        (["--num_workers=3", "-m", "x"], "--num_workers=3: psrun itself sets --num_workers of ps_server"),
        (["--server=a:1", "--mode=asp", "-m", "x"], "--mode is for servers that psrun starts"),
        (["-n4", "-m", "x"], "-n4: not a flag"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"psrun: {message}")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--mode=asp", "--workers", "4", "--help"]])
def test_help_is_given_wherever_a_flag_may_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: psrun")


def test_a_missing_server_program_is_said_with_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PSGRAD_BIN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"^ps_nothing: there is no such program in .*{tmp_path} or on PATH$"):
        find_program("ps_nothing")


# ---- Ending


WAITS = """
    try:
        print("ready")
        time.sleep(100)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_in_a_terminal_interrupts_each_worker_once(script: Script) -> None:
    path = script("""
        interrupts = 0
        def count(number, frame):
            global interrupts
            interrupts += 1
        signal.signal(signal.SIGINT, count)
        print("ready")
        while not interrupts:
            signal.pause()
        time.sleep(0.2)
        print("interrupts:", interrupts)
    """)
    with psrun("--workers=2", NO_SERVER, path) as job:
        job.await_output("ready", times=2)
        os.killpg(job.process.pid, signal.SIGINT)  # As a terminal does.
        assert job.await_end() == 130
    assert job.text.count("interrupts: 1") == 2
    assert "psrun: stopped by SIGINT: ending all" in job.text


@needs_programs
def test_servers_end_after_the_workers(script: Script) -> None:
    path = script(WAITS)
    with psrun("--workers=2", "--optimizer=sgd", path) as job:
        job.await_output("ready", times=2)
        job.process.send_signal(signal.SIGTERM)
        assert job.await_end() == 143
    last_worker = job.text.rindex("interrupted")
    assert job.text.count("interrupted") == 2
    assert last_worker < job.text.index("ps_server: SIGTERM: stopping")


def test_a_worker_that_ignores_a_signal_gets_the_next(script: Script) -> None:
    path = script("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("process", os.getpid())
        time.sleep(100)
    """)
    with psrun("--workers=2", NO_SERVER, "--grace=100ms", path) as job:
        pids = job.await_output("process ([0-9]+)", times=2)
        job.process.send_signal(signal.SIGINT)
        assert job.await_end() == 130
    await_exit_of([int(pid) for pid in pids])


def test_a_second_ctrl_c_kills_at_once(script: Script) -> None:
    path = script("""
        def ignore(number, frame):
            print("ignored")
        signal.signal(signal.SIGINT, ignore)
        print("ready")
        while True:
            signal.pause()
    """)
    with psrun(NO_SERVER, "--grace=1h", path) as job:
        job.await_output("ready")
        job.process.send_signal(signal.SIGINT)
        job.await_output("ignored")
        job.process.send_signal(signal.SIGINT)
        assert job.await_end() == 130


@needs_programs
def test_no_process_outlives_a_killed_psrun(script: Script) -> None:
    path = script("print('process', os.getpid())\ntime.sleep(100)")
    with psrun("--workers=2", "--servers=2", "--optimizer=sgd", path) as job:
        workers = [int(pid) for pid in job.await_output("process ([0-9]+)", times=2)]
        servers = children_of(job.process.pid, "ps_server")
        assert len(servers) == 2
        job.process.kill()
        await_exit_of([*workers, *servers])


def test_what_a_worker_leaves_behind_is_ended(script: Script) -> None:
    path = script("""
        import subprocess
        print("process", subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    """)
    with psrun(NO_SERVER, path) as job:
        (pid,) = job.await_output("process ([0-9]+)")
        assert job.await_end() == 0
    await_exit_of([int(pid)])


def test_ctrl_c_works_while_nobody_reads_the_output(script: Script) -> None:
    path = script("""
        print("process", os.getpid())
        while True:
            print("x" * 10000)
    """)
    with psrun(NO_SERVER, path) as job:
        (pid,) = job.await_output("process ([0-9]+)")
        job.process.send_signal(signal.SIGINT)
        await_exit_of([int(pid)])
        assert job.process.wait(TIMEOUT_S) == 130


def test_it_ends_when_the_reader_of_its_output_has_gone(script: Script) -> None:
    with psrun(NO_SERVER, script("while True: print('x')"), stderr=subprocess.DEVNULL) as job:
        job.await_output("x")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE


# ---- Output


def test_lines_of_several_workers_stay_whole(script: Script) -> None:
    path = script("""
        line = bytes([ord("a") + rank]) * 9000 + bytes([0xFF, ord("\\n")])
        for _ in range(50):
            os.write(1, line[:5000])
            os.write(1, line[5000:])
        os.write(2, b"no newline")
    """)
    with psrun("--workers=3", NO_SERVER, path) as job:
        assert job.await_end() == 0
    lines = job.output.splitlines()
    for rank in range(3):
        letter = bytes([ord("a") + rank])
        assert lines.count(b"[worker %d] " % rank + letter * 9000 + b"\xff") == 50
        assert lines.count(b"[worker %d] no newline" % rank) == 1
    assert len(lines) == 153


def test_stdout_and_stderr_stay_apart(script: Script) -> None:
    with psrun(NO_SERVER, script("print('out')\nprint('err', file=sys.stderr)"), stderr=subprocess.DEVNULL) as job:
        assert job.await_end() == 0
    assert job.text == "[worker 0] out\n"


def test_output_is_cut_into_lines() -> None:
    lines = Lines("> ")
    assert lines.feed(b"on") == b""
    assert lines.feed(b"e\n\ntwo\nthr") == b"> one\n> \n> two\n"
    assert lines.end() == b"> thr\n"
    assert lines.end() == b""


def test_each_update_of_a_progress_bar_is_a_line() -> None:
    lines = Lines("> ")
    assert lines.feed(b"10 %\r20 %\r") == b"> 10 %\n"
    assert lines.feed(b"\nend\r\n30 %") == b"> 20 %\n> end\n"
    assert lines.end() == b"> 30 %\n"


def test_the_length_of_a_line_is_bounded() -> None:
    lines = Lines("> ")
    written = b"".join(lines.feed(b"x" * 10_000) for _ in range(20)) + lines.feed(b"\n") + lines.end()
    pieces = written.splitlines()
    assert [len(piece) - 2 for piece in pieces] == [65536, 65536, 65536, 200_000 - 3 * 65536]
    assert all(piece.startswith(b"> x") for piece in pieces)
