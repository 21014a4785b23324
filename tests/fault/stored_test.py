"""A checkpoint that was stored with the first version of its format stays readable: stored_test.py BUILD_FOLDER CASE.

tests/data/checkpoints is the folder of a job of two servers and two workers (FLAGS), when it was killed. To make
another one: stored_test.py BUILD_FOLDER make FOLDER.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

from job import BIN, Job, wait_until

STORED = pathlib.Path(__file__).resolve().parent.parent / "data" / "checkpoints"
FLAGS = ["--optimizer=adam", "--learning_rate=0.01", "--checkpoint_every=1000000"]
FLAGS += ["--schedule=cosine", "--schedule_length=20000samples"]
SLOWLY = ["--experiment_step_time=1ms"]
VERSION = 36  # The stored checkpoint's, as is the next.
SHA256 = "e80a5b5c06748b7ecadde7ceac29a22433ae6974f52729bac0ebda0b1727f03b"  # Of its weights, as a file.


def make(folder):
    with Job("bsp", 2, flags=FLAGS, worker_flags=SLOWLY) as job:
        job.start_workers()
        wait_until("training", lambda: job.version() > 20)
        assert job.ask("checkpoint").returncode == 0
        for program in job.servers + job.workers:
            program.kill()
        newest = max(job.dir.glob("checkpoint-*"))
        shutil.copytree(newest, pathlib.Path(folder) / newest.name)


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


if __name__ == "__main__":
    {"make": make, "weights": weights, "job": job}[sys.argv[2]](*sys.argv[3:])
