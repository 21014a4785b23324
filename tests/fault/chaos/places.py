"""The places of a job's programs; one process after another takes them."""

import re
import signal

import plan as plans
from clock import WallClock
from job import BIN, MODEL, Program

LEARNING_RATE = "0.05"
SERVER_FLAGS = [
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
    "--stream=always",  # Of workers of this host, too.
]


class Place:
    def __init__(self, run, name):
        self._run, self.name, self.starts = run, name, 0
        self.program, self.start_at = None, None
        self.metrics = []
        self.clock = WallClock(run.folder / f"{name}.clock")

    def _start(self, name, metrics, program, arguments):
        self.metrics.append(self._run.folder / f"{metrics}.jsonl")
        command = [str(BIN / program), f"--metrics_file={self.metrics[-1]}", *arguments]
        self.program = Program(self._run.folder, name, command, self.clock.environment())
        self.starts += 1
        self.start_at = None

    def runs(self):
        return self.program is not None and self.program.runs()

    def last_line(self):
        return (self.program.errors().splitlines() or ["it said nothing"])[-1]


class Server(Place):
    def __init__(self, run, shard):
        super().__init__(run, f"server-{shard}")
        self.shard, self.address = shard, "127.0.0.1:0"

    def start(self):
        run = self._run
        arguments = [f"--listen={self.address}", f"--shard={self.shard}", *SERVER_FLAGS, *run.plan.server_flags()]
        arguments += [f"--on_worker_loss={run.plan.on_loss}", f"--checkpoint_dir={run.folder}/checkpoints"]
        arguments += ["--replacement_timeout=20s"] if run.plan.on_loss == "wait" else []
        if self.shard > 0:
            arguments += [f"--chief={run.links['follow'].address}", f"--advertise={run.links['shard-1'].address}"]
        self._start(self.name, f"{self.name}-{self.starts}", "ps_server", arguments)

    def await_address(self):
        """Of its first start; later it listens there again."""
        printed = self.program.out.read_text
        self._run.wait_until(f"{self.name} to listen", lambda: "listening on " in printed() or not self.runs())
        if not self.runs():
            raise TimeoutError(f"{self.name} did not start: {self.last_line()}")
        self.address = re.search(r"listening on (\S+)", printed())[1]


class Worker(Place):
    """`number`: its rank at first, if the job has so many; the others come later."""

    def __init__(self, run, number):
        super().__init__(run, f"worker-{number}")
        self.number, self.how = number, "same"

    def start(self):
        run, name = self._run, f"{self.name}-{self.starts}"
        link = run.links.get(self.name) or run.links["worker-0"]  # Who comes later has no link of its own.
        arguments = [f"--server={link.address}", "--connect_timeout=15s"]
        if self.how == "same":
            arguments += [*MODEL, run.plan.budget(), "--experiment_step_time=4ms"]
            shared = run.plan.shared_memory[self.number % plans.WORKERS]
            arguments += [] if shared else ["--shared_memory=off"]
        # A rank is claimed at first only: later it may have another owner.
        arguments += [f"--rank={self.number}"] if self.starts == 0 and self.number < plans.WORKERS else []
        self._start(name, name, "ps_worker", arguments)

    def left_early(self):
        """As it was asked to; by SIGTERM itself, if that came before the program waited for it."""
        status = self.program.process.returncode
        left = status == 0 and "leaving the job" in self.program.errors() and not self.program.out.read_text()
        return left or status == -signal.SIGTERM
