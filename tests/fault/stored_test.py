"""Checkpoints that earlier releases have stored stay readable: stored_test.py BUILD_FOLDER CASE.

tests/data/checkpoints is the folder of a job of two servers and two workers (FLAGS), when it was killed, in the first
version of the format. tests/data/outer_checkpoints is of a job with outer momentum (OUTER), by the last release before
diloco. To make others: stored_test.py BUILD_FOLDER make|make_outer FOLDER.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

from job import BIN, Job, wait_until

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
STORED = DATA / "checkpoints"
OUTER_STORED = DATA / "outer_checkpoints"
FLAGS = ["--optimizer=adam", "--learning_rate=0.01", "--checkpoint_every=1000000"]
FLAGS += ["--schedule=cosine", "--schedule_length=20000samples"]
SLOWLY = ["--experiment_step_time=1ms"]
# Nothing of a worker's own outlasts a round, so a job that goes on ends in the weights of one that was never ended.
OUTER = ["--optimizer=sgd", "--outer_momentum=0.6", "--checkpoint_every=1000000"]
VERSION = 36  # The stored checkpoint's, as is the next.
SHA256 = "e80a5b5c06748b7ecadde7ceac29a22433ae6974f52729bac0ebda0b1727f03b"  # Of its weights, as a file.


def make(folder, mode="bsp", flags=FLAGS):
    with Job(mode, 2, flags=flags, worker_flags=SLOWLY) as job:
        job.start_workers()
        wait_until("training", lambda: job.version() > 20)
        assert job.ask("checkpoint").returncode == 0
        for program in job.servers + job.workers:
            program.kill()
        newest = max(job.dir.glob("checkpoint-*"))
        shutil.copytree(newest, pathlib.Path(folder) / newest.name)


def make_outer(folder):
    make(folder, "local_sgd", OUTER)


def weights():
    """Read by itself, it has the same bits as ever."""
    with Job("bsp", 1) as job:
        output = job.folder / "weights.safetensors"
        command = [str(BIN / "ps_ctl"), "export", f"--from={STORED}", f"--output={output}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert f"version {VERSION} of checkpoint" in done.stdout, done.stdout
        data = output.read_bytes()
        values = data[8 + int.from_bytes(data[:8], "little") :]
        assert hashlib.sha256(values).hexdigest() == SHA256, hashlib.sha256(values).hexdigest()


def job():
    """The job goes on with it to its end."""
    with Job("bsp", 2, flags=[*FLAGS, "--restore=latest"], copy=STORED) as job:
        job.start_workers()
        job.finish()
        said = "".join(worker.errors() for worker in job.workers) + job.servers[0].errors()
        assert re.search(rf"goes on from \S+, version {VERSION}\b", said), said
        newest = job.complete()[job.newest()]
        assert newest.finished() and newest.manifest["shards"][0]["version"] == job.steps, newest.manifest


def outer():
    """A release without --outer_lr has stored the outer velocity, and the job ends as if it had been one release's."""
    with Job("local_sgd", 2, flags=OUTER) as undisturbed:
        undisturbed.start_workers()
        expected = undisturbed.finish()
    with Job("local_sgd", 2, flags=[*OUTER, "--restore=latest"], copy=OUTER_STORED) as job:
        job.start_workers()
        ended = job.finish()
        said = "".join(worker.errors() for worker in job.workers) + job.servers[0].errors()
        assert re.search(r"goes on from \S+, version [1-9]\d*\b", said), said
        assert ended == expected, (ended, expected)


if __name__ == "__main__":
    {"make": make, "make_outer": make_outer, "weights": weights, "job": job, "outer": outer}[sys.argv[2]](*sys.argv[3:])
