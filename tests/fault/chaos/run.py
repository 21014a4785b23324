"""Carries out one plan with real programs, and says what is wrong with what comes of it."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import checker
import plan as plans
import records
from job import BIN, LOCAL_STEPS, MODE_FLAGS, MODEL, Program
from proxy import Link, Proxies

LEARNING_RATE = "0.05"
LIMIT_S = 60  # For the job to end after the last event. All limits of the flags below are shorter.
SERVER_FLAGS = [
    "--optimizer=momentum",
    f"--learning_rate={LEARNING_RATE}",
    f"--num_workers={plans.WORKERS}",
    f"--num_shards={plans.SHARDS}",
    "--lease=1s",
    "--reconnect_grace=300ms",
    "--checkpoint_every=40",
    "--keep_checkpoints=1000",
    "--server_timeout=15s",
    "--connect_timeout=15s",
    "--cut_timeout=300ms",
]
# A worker may end with status 1 where another one owns its rank, or the job is about to end without it;
NOT_NEEDED = (
    r"has this worker's rank|no rank is free|no other is free|already has all of its workers"
    r"|all workers are done; the job is about to end|the job is finished"
)
# or, once the servers have ended, where it had been lost and wants to come back.
CAME_TOO_LATE = r"gave up joining|gave up asking for the job's flags|not reachable for \d+ s \(--server_timeout\)"


class Server:
    def __init__(self, run, shard):
        self._run, self.shard, self.starts = run, shard, 0
        self.address, self.program, self.start_at = "127.0.0.1:0", None, None
        self.metrics = []

    def start(self):
        run = self._run
        self.metrics.append(run.folder / f"server-{self.shard}-{self.starts}.jsonl")
        arguments = [f"--listen={self.address}", f"--shard={self.shard}", f"--mode={run.plan.mode}"]
        arguments += [f"--on_worker_loss={run.plan.on_loss}", f"--checkpoint_dir={run.folder}/checkpoints"]
        arguments += [f"--metrics_file={self.metrics[-1]}", *SERVER_FLAGS, *MODE_FLAGS[run.plan.mode]]
        arguments += ["--replacement_timeout=20s"] if run.plan.on_loss == "wait" else []
        if self.shard > 0:
            arguments += [f"--chief={run.links['follow'].address}", f"--advertise={run.links['shard-1'].address}"]
        self.program = Program(run.folder, f"server-{self.shard}", [str(BIN / "ps_server"), *arguments])
        self.starts += 1
        self.start_at = None

    def await_address(self):
        """Of its first start; later it listens there again."""
        printed = self.program.out.read_text
        self._run.wait_until(f"server {self.shard} to listen", lambda: "listening on " in printed() or not self.runs())
        if not self.runs():
            raise TimeoutError(f"server {self.shard} did not start: {_last_line(self.program)}")
        self.address = re.search(r"listening on (\S+)", printed())[1]

    def runs(self):
        return self.program.runs()


class Worker:
    """A place for a worker, which one after another takes."""

    def __init__(self, run, rank):
        self._run, self.rank, self.starts = run, rank, 0
        self.program, self.start_at, self.how = None, 0.0, "same"
        self.metrics = []

    def start(self):
        run = self._run
        name = f"worker-{self.rank}-{self.starts}"
        self.metrics.append(run.folder / f"{name}.jsonl")
        arguments = [f"--server={run.links[f'worker-{self.rank}'].address}", f"--metrics_file={self.metrics[-1]}"]
        arguments += ["--connect_timeout=15s"]
        if self.how == "same":
            arguments += [*MODEL, f"--steps={plans.STEPS}", "--experiment_step_time=4ms"]
            arguments += [] if run.plan.shared_memory[self.rank] else ["--shared_memory=off"]
        # A rank is claimed at first only: later it may have another owner.
        arguments += [f"--rank={self.rank}"] if self.starts == 0 else []
        self.program = Program(run.folder, name, [str(BIN / "ps_worker"), *arguments])
        self.starts += 1
        self.start_at = None

    def runs(self):
        return self.program is not None and self.program.runs()

    def left_early(self):
        return "leaving the job" in self.program.errors() and not self.program.out.read_text()


class Run:
    def __init__(self, plan, folder):
        self.plan, self.folder = plan, pathlib.Path(folder)
        self.links, self.happened, self.found, self.served = {}, [], [], []
        self.servers = [Server(self, shard) for shard in range(plans.SHARDS)]
        self.workers = [Worker(self, rank) for rank in range(plans.WORKERS)]
        self.undo = []  # (when, what to call).

    def wait_until(self, what, true, limit_s=30):
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {limit_s} s for {what}")
            time.sleep(0.01)

    # ---- From its beginning to its end

    def carry_out(self):
        with Proxies() as proxies:
            try:
                self.links = {name: Link(proxies) for name in plans.LINKS}
                self._start()
                self._let_things_happen()
            except TimeoutError as late:
                self.found.append(str(late))
            finally:
                self._stop()
        self._judge()
        return self.found

    def _start(self):
        self.servers[0].start()
        self.servers[0].await_address()
        for name in [*(f"worker-{rank}" for rank in range(plans.WORKERS)), "follow"]:
            self.links[name].lead_to(self.servers[0].address)
        self.servers[1].start()
        self.servers[1].await_address()
        self.links["shard-1"].lead_to(self.servers[1].address)
        for worker in self.workers:
            worker.start()
        running = "the job is running"
        self.wait_until("the job to run", lambda: running in self.servers[0].program.errors())

    def _let_things_happen(self):
        began = time.monotonic()
        events = list(self.plan.events)
        last = began
        while not self._is_over():
            now = time.monotonic()
            while events and events[0].at_s <= now - began:
                self._cause(events.pop(0), now)
                last = now
            for due in [entry for entry in self.undo if entry[0] <= now]:
                self.undo.remove(due)
                due[1]()
                last = now
            self._replace(now)
            if not events and not self.undo and now - last > LIMIT_S:
                waiting = [line for line in self.servers[0].program.errors().splitlines() if "waiting" in line]
                raise TimeoutError(f"the job had not ended {LIMIT_S} s after the last event; {waiting[-1:]}")
            time.sleep(0.01)

    def _is_over(self):
        ended = all(not server.runs() and server.start_at is None for server in self.servers)
        return ended and all(not worker.runs() for worker in self.workers)

    # ---- What happens

    def _cause(self, event, now):
        kind, _, what = event.what.partition(" ")
        if what in ("server", "worker"):
            happened = self._to_program(event, kind, what, now)
        else:
            happened = self._to_link(event, now)
        self.happened.append({"t": time.time(), "event": event.what, "target": event.target, "happened": happened})

    def _to_program(self, event, kind, what, now):
        place = (self.servers if what == "server" else self.workers)[int(event.target.split("-")[1])]
        if not place.runs():
            return False
        process = place.program.process
        if kind == "stop":
            process.send_signal(signal.SIGSTOP)
            self.undo.append(
                (now + event.for_s, lambda: process.poll() is None and process.send_signal(signal.SIGCONT))
            )
            return True
        if what == "worker":
            place.how = event.how
        if kind == "end":  # _replace sees that it has left.
            process.send_signal(signal.SIGTERM)
            return True
        place.program.kill()
        if what == "server" or event.how != "nobody":
            place.start_at = now + event.for_s
        return True

    def _to_link(self, event, now):
        link = self.links[event.target]
        if event.what == "partition":
            link.swallow()
            self.undo.append((now + event.for_s, link.heal))
        elif event.what == "delay":
            link.delay(event.amount)
            self.undo.append((now + event.for_s, lambda: link.delay(0.0)))
        elif event.what == "reset later":
            link.reset_after(int(event.amount))
        else:
            link.reset()
        return True

    def _replace(self, now):
        for place in self.servers + self.workers:
            if place.start_at is not None and place.start_at <= now:
                place.start()
        for worker in self.workers:
            if worker.runs() or worker.start_at is not None or worker.program.process.returncode != 0:
                continue
            if worker.left_early() and worker.how != "nobody":
                worker.start_at = now

    # ---- What came of it

    def _stop(self):
        for place in self.servers + self.workers:
            if place.program is not None and place.runs():
                place.program.process.send_signal(signal.SIGCONT)
                place.program.kill()

    def _judge(self):
        if not self.found:
            self._judge_ends()
        self.served = [records.served_by([path for path in server.metrics if path.exists()]) for server in self.servers]
        files = [path for worker in self.workers for path in worker.metrics if path.exists()]
        pushed = [push for path in files for push in records.pushed_by(path, plans.SHARDS, LOCAL_STEPS)]
        judged = checker.Records(self.plan.mode, self.plan.on_loss, plans.WORKERS, self.served, pushed)
        if not self.found:
            self._judge_completeness()
        self.found += checker.problems(judged)
        self.found += list(self._left_behind())

    def _judge_ends(self):
        for server in self.servers:
            if server.program.process.returncode != 0:
                self.found.append(f"server {server.shard} ended with an error: {_last_line(server.program)}")
        for worker in self.workers:
            status, said = worker.program.process.returncode, _last_line(worker.program)
            killed = status == -signal.SIGKILL and (worker.how == "nobody" or worker.start_at is not None)
            rightly = status == 1 and re.search(f"{NOT_NEEDED}|{CAME_TOO_LATE}", said)
            if status != 0 and not killed and not rightly:
                self.found.append(f"{worker.program.err.name} ended with status {status}: {said}")
        if not any(worker.program.process.returncode == 0 for worker in self.workers):
            self.found.append("no worker has ended well")

    def _judge_completeness(self):
        """The job has done all of its work."""
        manifests = sorted((self.folder / "checkpoints").glob("checkpoint-*/manifest.json"))
        if not manifests or not json.loads(manifests[-1].read_text())["finished"]:
            self.found.append("the last checkpoint is not that of a finished job")
        versions = plans.VERSIONS.get(self.plan.mode)
        for shard, served in enumerate(self.served):
            line = checker.line_of_descent(served)
            last = line[-1]["version"] if line else 0
            if versions is not None and last != versions:
                self.found.append(f"shard {shard}: the last version is {last}, and not {versions}")

    def _left_behind(self):
        for temporary in (self.folder / "checkpoints").glob("**/*.tmp*"):
            yield f"{temporary.name} is left behind"
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self.folder).encode() in command and b"ps_" in command:
                    yield f"process {entry.name} is left behind"

    def model(self):
        """The tensors of the last checkpoint, as bytes; None: the job has not come to its end."""
        output = self.folder / "model.safetensors"
        command = [str(BIN / "ps_ctl"), "export", f"--from={self.folder}/checkpoints", f"--output={output}"]
        if subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0:
            return None
        return tensors_of(output)

    def replayed(self):
        """The tensors that the recorded sets must have made (replay.cc); None: the record has holes."""
        lines = [checker.line_of_descent(served) for served in self.served]
        whole = [line for line in lines if [apply["version"] for apply in line] == list(range(1, plans.STEPS + 1))]
        if not whole:
            return None
        line = whole[0]
        sets = "".join(" ".join(map(str, apply["ranks"])) + "\n" for apply in line)
        output = self.folder / "replayed.safetensors"
        flags = [*MODEL, f"--steps={plans.STEPS}"]
        command = [str(BIN / "ps_replay"), str(plans.WORKERS), LEARNING_RATE, str(output), *flags]
        subprocess.run(command, input=sets, text=True, capture_output=True, timeout=60, check=True)
        return tensors_of(output)

    def hashes(self):
        printed = "".join(path.read_text() for path in self.folder.glob("worker-*.out"))
        return set(re.findall(r"weights hash: (\w+)", printed))

    def said(self):
        """All logs and records, by file name."""
        files = [path for path in sorted(self.folder.iterdir()) if path.suffix in (".err", ".out", ".jsonl")]
        return {path.name: path.read_text(errors="replace") for path in files}


def tensors_of(path):
    """What follows the header of a safetensors file."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def _last_line(program):
    return (program.errors().splitlines() or ["it said nothing"])[-1]


@dataclasses.dataclass
class Outcome:
    """What is wrong with a run, and what it came to."""

    found: list
    model: bytes | None = None
    hashes: set = dataclasses.field(default_factory=set)
    happened: int = 0  # Of the plan's events: the others came after the end.
    compared: str = ""  # What the weights were compared with.
    said: dict = dataclasses.field(default_factory=dict)  # All logs and records, by file name.


def run(plan, undisturbed=None):
    """`undisturbed`: the outcome of the same job without events, where it must come to the same weights."""
    with tempfile.TemporaryDirectory(prefix="ps-chaos-") as folder:
        one = Run(plan, folder)
        outcome = Outcome([])
        try:
            outcome.found = one.carry_out()
            outcome.model, outcome.hashes = one.model(), one.hashes()
            if not outcome.found:
                _compare_weights(one, outcome, undisturbed)
        except (OSError, subprocess.SubprocessError, AssertionError) as problem:
            outcome.found.append(f"{type(problem).__name__}: {problem}")
        outcome.happened = sum(event["happened"] for event in one.happened)
        outcome.said = one.said() | {"happened": json.dumps(one.happened, indent=1)}
        return outcome


def _compare_weights(one, outcome, undisturbed):
    if outcome.model is None:
        outcome.found.append("there is no checkpoint that can be exported")
    if len(outcome.hashes) > 1:
        outcome.found.append(f"several hashes were printed: {outcome.hashes}")
    if one.plan.mode == "bsp" and (replayed := one.replayed()) is not None:
        outcome.compared = "; weights as replayed"
        if replayed != outcome.model:
            outcome.found.append("the weights are not those that the recorded sets of pushes make")
    if undisturbed is None:
        return
    outcome.compared += "; weights as of an undisturbed job"
    if outcome.model != undisturbed.model:
        outcome.found.append("the weights are not those of an undisturbed job")
    if not outcome.hashes <= undisturbed.hashes:
        outcome.found.append(f"the hash {outcome.hashes} is not that of an undisturbed job, {undisturbed.hashes}")
