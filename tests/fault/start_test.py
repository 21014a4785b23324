"""What comes before a job runs: start_test.py BUILD_FOLDER CASE."""

import re
import resource
import signal
import subprocess
import sys
import time

from job import BIN, LIMIT, MODEL, Job, Program, wait_until


def silent_chief():
    """A chief that takes connections and says nothing: its time is the flag's, whatever the worker was given."""
    with Job("bsp", 1, workers=1, checkpoints=False) as job:
        job.servers[0].process.send_signal(signal.SIGSTOP)
        for name, model in (("given", MODEL), ("bare", [])):
            began = time.monotonic()
            flags = [f"--server={job.addresses[0]}", "--connect_timeout=2s", *model]
            worker = Program(job.folder, name, [str(BIN / "ps_worker"), *flags])
            wait_until("its first line", lambda worker=worker: f"asking {job.addresses[0]}" in worker.errors())
            assert worker.end() == 1
            took = time.monotonic() - began
            last = worker.errors().splitlines()[-1]
            assert "(--connect_timeout)" in last, worker.errors()
            said = re.search(r"after (\d+(?:\.\d)?) s \(", last)
            # The flag's time once, not once for each call. This machine may be busy.
            assert said and 2 <= float(said[1]) < 4, worker.errors()
            assert took < LIMIT / 2, f"{name}: it took {took} s"


def moved_shard():
    """A shard that is started again elsewhere before the job runs is found there."""
    with Job("asp", 2, steps=20, checkpoints=False, worker_flags=["--start_timeout=60s"]) as job:
        job.workers.append(job.start_worker("worker-0", "--rank=0"))
        wait_until("worker 0 to have joined", lambda: "exchanging with" in job.workers[0].errors())
        job.servers[1].kill()
        job.servers[1].out.unlink()
        job.addresses[1] = "127.0.0.1:0"
        job.servers[1] = job.start_server(1)
        job.addresses[1] = job.listening(1)
        job.workers.append(job.start_worker("worker-1", "--rank=1"))
        job.finish()
        assert f"shard 1 is at {job.addresses[1]} now" in job.workers[0].errors(), job.workers[0].errors()


def limited():
    """Where memory is limited no exception ends a program that nobody catches: it says in a line what it lacks.

    gRPC 1.51 itself may crash where it gets no thread, and ends a program without a word where it gets no memory. That
    is not ours to catch.
    """
    told = 0
    with Job("bsp", 1, workers=1, checkpoints=False) as job:
        for megabytes in (96, 128, 200, 230, 260, 300):
            for program, arguments in (
                ("ps_ctl", [f"--server={job.addresses[0]}", "status"]),
                (
                    "ps_server",
                    [
                        "--num_workers=1",
                        "--chief=127.0.0.1:1",
                        "--num_shards=2",
                        "--shard=1",
                        "--connect_timeout=300ms",
                    ],
                ),
                ("ps_worker", ["--server=127.0.0.1:1", "--connect_timeout=300ms", *MODEL]),
            ):
                limit = megabytes << 20
                ended = subprocess.run(
                    [str(BIN / program), *arguments],
                    capture_output=True,
                    text=True,
                    timeout=LIMIT,
                    check=False,
                    preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
                )
                where = f"{program} in {megabytes} MB: {ended.returncode}: {ended.stderr}"
                assert "terminate called" not in ended.stderr, where
                told += "memory" in ended.stderr or "refuses a thread" in ended.stderr
    assert told > 0


if __name__ == "__main__":
    {case.__name__: case for case in (silent_chief, moved_shard, limited)}[sys.argv[2]]()
