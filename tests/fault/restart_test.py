"""Servers with --checkpoint_dir are killed and started again: restart_test.py BUILD_FOLDER CASE."""

import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BIN = pathlib.Path(sys.argv[1]) / "bin"
LIMIT = 120  # Seconds that anything is waited for.
STEPS = 600
WORKERS = 2


def wait_until(what, true):
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, f"waited {LIMIT} s for {what}"
        time.sleep(0.01)


class Program:
    """One program, whose output is kept; started again, it goes on writing there."""

    def __init__(self, folder, name, arguments):
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with open(self.out, "ab") as out, open(self.err, "ab") as err:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=err, stdin=subprocess.DEVNULL)

    def kill(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.wait(LIMIT)

    def end(self):
        return self.process.wait(LIMIT)

    def errors(self):
        return self.err.read_text(errors="replace")


class Job:
    """Servers and workers of one job, with checkpoints in a folder of its own."""

    def __init__(self, folder, mode, shards, steps=STEPS, flags=()):
        self.folder, self.shards, self.steps = pathlib.Path(folder), shards, steps
        self.dir = self.folder / "checkpoints"
        self.flags = [f"--mode={mode}", f"--num_workers={WORKERS}", "--checkpoint_every=50", "--optimizer=momentum"]
        self.flags += ["--learning_rate=0.05", "--server_timeout=60s", *flags]
        self.addresses, self.servers, self.workers = [], [], []
        for shard in range(shards):
            self.addresses.append("127.0.0.1:0")
            self.servers.append(self.start_server(shard))
            out = self.servers[shard].out
            wait_until("a server to listen", lambda out=out: "listening on " in out.read_text())
            self.addresses[shard] = re.search(r"listening on (\S+)", out.read_text())[1]

    def start_server(self, shard, flags=()):
        arguments = [f"--listen={self.addresses[shard]}", f"--shard={shard}", f"--num_shards={self.shards}"]
        if shard > 0:
            arguments.append(f"--chief={self.addresses[0]}")
        arguments += [f"--checkpoint_dir={self.dir}", *self.flags, *flags]
        return Program(self.folder, f"server-{shard}", [str(BIN / "ps_server"), *arguments])

    def start_workers(self):
        flags = [
            "--dataset=synthetic:samples=4000,features=20,classes=4",
            "--model=mlp:20,64,4",
            "--batch_size=8",
            f"--steps={self.steps}",
        ]
        for rank in range(WORKERS):
            arguments = [str(BIN / "ps_worker"), f"--server={self.addresses[0]}", f"--rank={rank}", *flags]
            self.workers.append(Program(self.folder, f"worker-{rank}", arguments))

    def checkpoints(self):
        return len(list(self.dir.glob("checkpoint-*/manifest.json"))), max(
            (int(path.parent.name.split("-")[1]) for path in self.dir.glob("checkpoint-*/manifest.json")), default=0
        )

    def has_finished_checkpoint(self):
        for manifest in self.dir.glob("checkpoint-*/manifest.json"):
            try:
                if '"finished": true' in manifest.read_text():
                    return True
            except FileNotFoundError:  # It has a successor.
                continue
        return False

    def kill_and_restart(self, victims):
        for shard in victims:
            self.servers[shard].kill()
        for shard in victims:
            self.servers[shard] = self.start_server(shard)

    def finish(self):
        """The weights hash, after all have ended well."""
        for program in self.workers + self.servers:
            assert program.end() == 0, program.errors()
        printed = "".join(worker.out.read_text() for worker in self.workers)
        return re.search(r"weights hash: (\w+)", printed)[1]

    def stop(self):
        for program in self.workers + self.servers:
            if program.process.poll() is None:
                program.kill()


def run(mode, shards, victims, at_checkpoint, flags=()):
    """The hash of a job whose servers are killed when this checkpoint is there; None: never."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, mode, shards, flags=flags)
        try:
            job.start_workers()
            if at_checkpoint is not None:
                wait_until(f"checkpoint {at_checkpoint}", lambda: job.checkpoints()[1] >= at_checkpoint)
                job.kill_and_restart(victims)
            weights = job.finish()
            errors = "".join(worker.errors() for worker in job.workers)
            if at_checkpoint is not None and at_checkpoint < 8:
                assert "rolled back to step" in errors, errors
            return weights
        finally:
            job.stop()


def bsp():
    """Whoever is killed, the weights are those of a run without it, on any number of servers."""
    moments = random.Random(17)
    undisturbed = run("bsp", 1, [], None)
    for shards, victims in [(1, [0]), (2, [1]), (2, [0]), (2, [0, 1]), (3, [1, 2])]:
        moment = moments.randint(1, 6)
        weights = run("bsp", shards, victims, moment)
        assert weights == undisturbed, f"{shards} servers, {victims} killed at checkpoint {moment}: other weights"


def stopped():
    """A server that is asked to leave takes a checkpoint first, and nothing is made twice."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, "bsp", 1, flags=["--checkpoint_every=1000000"])
        try:
            job.start_workers()
            wait_until("the first checkpoint", lambda: job.checkpoints()[1] == 1)
            job.servers[0].kill(signal.SIGTERM)
            assert job.checkpoints()[1] == 2, job.servers[0].errors()
            job.servers[0] = job.start_server(0)
            assert job.finish() == run("bsp", 1, [], None)
        finally:
            job.stop()


def resized():
    """A job goes on on another number of servers, with the same weights."""
    undisturbed = run("bsp", 1, [], None)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, "bsp", 3)
        try:
            job.start_workers()
            wait_until("checkpoint 3", lambda: job.checkpoints()[1] >= 3)
            for server in job.servers:
                server.kill()
            job.shards, job.servers = 1, job.servers[:1]
            job.servers[0] = job.start_server(0)
            assert job.finish() == undisturbed
        finally:
            job.stop()


def modes():
    """In every other mode the job comes to its end, too."""
    moments = random.Random(18)
    cases = [("asp", []), ("ssp", []), ("local_sgd", []), ("easgd", []), ("backup", ["--backup_workers=1"])]
    for number, (mode, flags) in enumerate(cases):
        run(mode, 2, [number % 2], moments.randint(1, 2), [*flags, "--checkpoint_every=20"])


def finished():
    """Killed when all workers were done, the servers come back to serve the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, "bsp", 2, steps=100, flags=["--server_timeout=5s"])
        try:
            job.start_workers()
            wait_until("the last checkpoint", job.has_finished_checkpoint)
            for worker in job.workers:
                worker.process.send_signal(signal.SIGSTOP)
            job.servers[1].kill()
            job.servers[1] = job.start_server(1)
            for worker in job.workers:
                worker.process.send_signal(signal.SIGCONT)
            # Who had left before has no reason to come back, and the servers then wait for nobody who would.
            for worker in job.workers:
                assert worker.end() == 0, worker.errors()
            assert "weights hash: " in "".join(worker.out.read_text() for worker in job.workers)
        finally:
            job.stop()


def refused():
    """What cannot be gone back to is skipped, or refused, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, "bsp", 1)
        try:
            job.start_workers()
            wait_until("three checkpoints", lambda: job.checkpoints()[1] >= 4)
            job.servers[0].kill()
            newest = max(job.dir.glob("checkpoint-*/manifest.json")).parent
            other = job.start_server(0, ["--mode=asp"])
            assert other.end() == 1
            assert "--mode=asp (the checkpoint's is bsp)" in other.errors(), other.errors()
            values = next(newest.glob("*.safetensors"))
            damaged = bytearray(values.read_bytes())
            damaged[-1] ^= 1
            values.write_bytes(damaged)
            second = Program(job.folder, "second", [str(BIN / "ps_server"), f"--checkpoint_dir={job.dir}"])
            job.servers[0] = job.start_server(0)
            wait_until("the damaged one to be named", lambda: newest.name in job.servers[0].errors())
            second.kill()
            undisturbed = run("bsp", 1, [], None)
            assert job.finish() == undisturbed
            assert str(values.name) in job.servers[0].errors(), job.servers[0].errors()
        finally:
            job.stop()


if __name__ == "__main__":
    if not shutil.which(str(BIN / "ps_server")):
        sys.exit(f"{BIN}: no ps_server")
    cases = {"bsp": bsp, "modes": modes, "finished": finished, "refused": refused, "stopped": stopped}
    (cases | {"resized": resized})[sys.argv[2]]()
