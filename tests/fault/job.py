"""Real servers and workers of one job, with checkpoints in a folder of its own, for the tests in this folder."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BIN = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve() / "bin"
LIMIT = 40  # Seconds that anything is waited for.
STEPS = 600
WORKERS = 2
LOCAL_STEPS = 2
MODE_FLAGS = {
    "bsp": [],
    "asp": [],
    "ssp": ["--staleness=2"],
    "backup": ["--backup_workers=1"],
    "local_sgd": [f"--local_steps={LOCAL_STEPS}"],
    "diloco": [f"--local_steps={LOCAL_STEPS}"],
    "diloco_quorum": [f"--local_steps={LOCAL_STEPS}", "--quorum=2", "--quorum_grace=20ms"],
    "diloco_async": [f"--local_steps={LOCAL_STEPS}"],
    "easgd": [f"--local_steps={LOCAL_STEPS}"],
}
TAKES_LOCAL_STEPS = ("local_sgd", "diloco", "diloco_quorum", "diloco_async", "easgd")
EACH_PUSH_IS_A_VERSION = ("asp", "ssp", "diloco_async", "easgd")
EACH_PUSH_COUNTS = (*EACH_PUSH_IS_A_VERSION, "diloco_quorum")  # Alone, or with others in a version.
HALF = ["--wire_dtype=bfloat16", "--weights_wire_dtype=bfloat16"]
SAMPLES, BATCH_SIZE = 4000, 8
MODEL = [f"--dataset=synthetic:samples={SAMPLES},features=20,classes=4", "--model=mlp:20,64,4"]
MODEL += [f"--batch_size={BATCH_SIZE}"]


def flags_of_mode(mode):
    """The flags of ps_server. Without its barrier, diloco is here a mode of its own, or two."""
    name, _, sync = mode.partition("diloco_")
    return ["--mode=diloco", f"--outer_sync={sync}"] if sync else [f"--mode={name}"]


def wait_until(what, true, limit=LIMIT):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline, f"waited {limit} s for {what}"
        time.sleep(0.01)


class Program:
    """One program, whose output is kept; started again, it goes on writing there."""

    def __init__(self, folder, name, arguments, environment=None):
        """`environment`: what it has besides this program's own."""
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        own = os.environ | (environment or {})
        with open(self.out, "ab") as out, open(self.err, "ab") as err:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=own)

    def kill(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.wait(LIMIT)

    def end(self):
        return self.process.wait(LIMIT)

    def runs(self):
        return self.process.poll() is None

    def errors(self):
        return self.err.read_text(errors="replace")


class Checkpoint:
    """What the JSON files of a complete checkpoint say."""

    def __init__(self, path):
        self.path = path
        self.manifest = json.loads((path / "manifest.json").read_text())
        count = len(self.manifest["shards"])
        self.shards = [json.loads((path / f"shard-{i}-of-{count}.json").read_text()) for i in range(count)]

    def number(self):
        return self.manifest["number"]

    def finished(self):
        return self.manifest["finished"]

    def ledger(self, shard):
        """The step and answer of each rank's last push on this shard."""
        pushes = self.shards[shard]["state"]["shard"].get("ledger", [])
        return {push.get("rank", 0): (int(push.get("step", 0)), push.get("answer")) for push in pushes}

    def position(self, shard):
        return int(self.shards[shard]["state"]["shard"].get("position", 0))


class Job:
    """Use it as `with Job(...) as job`: what still runs at its end is killed."""

    def __init__(
        self,
        mode,
        shards,
        steps=STEPS,
        flags=(),
        workers=WORKERS,
        worker_flags=(),
        folder=None,
        own=False,
        copy=None,
        checkpoints=True,
    ):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        self.dir = self.folder / "checkpoints" if folder is None else pathlib.Path(folder)
        if copy is not None:
            shutil.copytree(copy, self.dir)
        self.own = own  # Each server has a folder of its own; `dir` is the chief's.
        self.mode, self.shards, self.steps, self.worker_flags = mode, shards, steps, list(worker_flags)
        self.checkpoints = checkpoints
        self.flags = [*flags_of_mode(mode), "--optimizer=momentum", "--learning_rate=0.05", f"--num_workers={workers}"]
        self.flags += ["--checkpoint_every=50", "--server_timeout=60s"] if checkpoints else []
        self.flags += flags
        self.num_workers = workers
        self.addresses, self.servers, self.workers = [], [], []

    def __enter__(self):
        try:
            for shard in range(self.shards):
                self.addresses.append("127.0.0.1:0")
                self.servers.append(self.start_server(shard))
                self.addresses[shard] = self.listening(shard)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            for program in {program.err: program for program in self.servers + self.workers}.values():
                print(f"---- {program.err.name}:\n{program.errors()[-4000:]}", file=sys.stderr)
        self.stop()

    def listening(self, shard):
        server = self.servers[shard]
        wait_until("a server to listen", lambda: "listening on " in server.out.read_text() or not server.runs())
        assert server.runs(), server.errors()
        return re.findall(r"listening on (\S+)", server.out.read_text())[-1]

    def start_server(self, shard, flags=()):
        arguments = [f"--listen={self.addresses[shard]}", f"--shard={shard}", f"--num_shards={self.shards}"]
        if shard > 0:
            arguments.append(f"--chief={self.addresses[0]}")
        folder = self.folder / f"checkpoints-{shard}" if self.own and shard > 0 else self.dir
        arguments += [f"--checkpoint_dir={folder}"] if self.checkpoints else []
        arguments += [f"--metrics_file={self.folder}/server-{shard}.jsonl", *self.flags, *flags]
        return Program(self.folder, f"server-{shard}", [str(BIN / "ps_server"), *arguments])

    def start_workers(self, flags=None):
        """`flags`: further ones, by rank."""
        for rank in range(self.num_workers):
            self.workers.append(self.start_worker(f"worker-{rank}", f"--rank={rank}", *(flags or {}).get(rank, ())))

    def start_worker(self, name, *flags):
        arguments = [str(BIN / "ps_worker"), f"--server={self.addresses[0]}", *MODEL, f"--steps={self.steps}"]
        return Program(self.folder, name, [*arguments, *self.worker_flags, *flags])

    def control(self):
        return [str(BIN / "ps_ctl"), f"--server={self.addresses[0]}"]

    def ask(self, *arguments):
        """What ps_ctl says, whether it succeeded or not."""
        command = [*self.control(), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    def version(self, shard=0):
        """This shard's version, as ps_ctl status tells it; -1: it does not answer now."""
        status = self.ask("--timeout=5s", "status")
        found = re.search(rf"^ +{shard} +\S+:\d+ +(\d+)", status.stdout, re.MULTILINE)
        return int(found[1]) if status.returncode == 0 and found else -1

    def wait_for_training(self):
        """Only then another checkpoint can be asked for: the first is complete a moment before the job runs."""
        wait_until("the job to run", lambda: "the job is running" in self.servers[0].errors())

    def complete(self):
        """Complete checkpoints by number, as far as they still are there."""
        found = {}
        for folder in sorted(self.dir.glob("checkpoint-*")):
            try:
                checkpoint = Checkpoint(folder)
                found[checkpoint.number()] = checkpoint
            except FileNotFoundError:  # It is not complete, or has successors.
                continue
        return found

    def newest(self):
        """The number of the newest complete checkpoint; 0: there is none."""
        folders = [folder for folder in self.dir.glob("checkpoint-*") if (folder / "manifest.json").exists()]
        return max((int(folder.name.split("-")[1]) for folder in folders), default=0)

    def has_finished_checkpoint(self):
        return any(checkpoint.finished() for checkpoint in self.complete().values())

    def kill_and_restart(self, victims, pause=0):
        for shard in victims:
            self.servers[shard].kill()
        time.sleep(pause)
        for shard in victims:
            self.servers[shard] = self.start_server(shard)

    def resize(self, shards):
        """Other servers in place of these, which were killed; the chief's address stays."""
        for server in self.servers:
            server.kill()
        self.shards, self.servers, self.addresses = shards, [], self.addresses[:1]
        for shard in range(shards):
            if shard > 0:
                self.addresses.append("127.0.0.1:0")
            self.servers.append(self.start_server(shard))
            self.addresses[shard] = self.listening(shard)

    def finish(self):
        """The weights hash, after all have ended well."""
        for program in self.workers + self.servers:
            assert program.end() == 0, f"{program.err.name}: {program.errors()}"
        return self.weights()

    def weights(self):
        printed = "".join(worker.out.read_text() for worker in self.workers)
        return re.search(r"weights hash: (\w+)", printed)[1]

    def stop(self):
        for program in self.workers + self.servers:
            if program.runs():
                program.kill()
        self.temporary.cleanup()


def undisturbed(mode="bsp", shards=1, **options):
    """The weights hash of a job in which nobody is killed."""
    with Job(mode, shards, **options) as job:
        job.start_workers()
        return job.finish()
