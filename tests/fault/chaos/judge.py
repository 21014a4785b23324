"""What is wrong with a run that has ended: how its programs ended, what they have recorded, what they left behind."""

import json
import os
import pathlib
import re
import signal

import checker
import plan as plans
import records

# A worker may end with status 1 where another one owns its rank, or the job is about to end without it;
NOT_NEEDED = (
    r"has this worker's rank|no rank is free|no other is free|already has all of its workers"
    r"|all workers are done; the job is about to end|the job is finished"
)
# or, once the servers have ended, where it had been lost and wants to come back.
CAME_TOO_LATE = (
    r"gave up joining|gave up taking a run of samples|gave up asking for the job's flags"
    r"|not reachable for \d+ s \(--server_timeout\)"
)


def judge(run):
    """Adds to what the run has found by itself."""
    if not run.found:
        run.found += _ends(run)
    run.served = [records.served_by([path for path in server.metrics if path.exists()]) for server in run.servers]
    files = [path for worker in run.workers for path in worker.metrics if path.exists()]
    pushed = [push for path in files for push in records.pushed_by(path, plans.SHARDS)]
    if not run.found:
        run.found += _completeness(run)
    samples = plans.JOB_SAMPLES if run.plan.elastic else None
    told = checker.Records(run.plan.mode, run.plan.on_loss, plans.WORKERS, run.served, pushed, samples)
    run.found += checker.problems(told)
    run.found += _left_behind(run.folder)


def _ends(run):
    for server in run.servers:
        if server.program.process.returncode != 0:
            yield f"{server.name} ended with an error: {server.last_line()}"
    for worker in (worker for worker in run.workers if worker.program is not None):
        status, said = worker.program.process.returncode, worker.last_line()
        killed = status == -signal.SIGKILL and (worker.how == "nobody" or worker.start_at is not None)
        killed = killed or status == -signal.SIGTERM  # Before it waited for the signal.
        rightly = status == 1 and re.search(f"{NOT_NEEDED}|{CAME_TOO_LATE}", said)
        if status != 0 and not killed and not rightly:
            yield f"{worker.program.err.name} ended with status {status}: {said}"
    if not any(worker.program and worker.program.process.returncode == 0 for worker in run.workers):
        yield "no worker has ended well"


def _completeness(run):
    """The job has done all of its work."""
    manifests = sorted((run.folder / "checkpoints").glob("checkpoint-*/manifest.json"))
    if not manifests or not json.loads(manifests[-1].read_text())["finished"]:
        yield "the last checkpoint is not that of a finished job"
    versions = None if run.plan.elastic else plans.VERSIONS.get(run.plan.mode)
    for shard, served in enumerate(run.served):
        line = checker.line_of_descent(served)
        last = line[-1]["version"] if line else 0
        if versions is not None and last != versions:
            yield f"shard {shard}: the last version is {last}, and not {versions}"


def _left_behind(folder):
    for temporary in (folder / "checkpoints").glob("**/*.tmp*"):
        yield f"{temporary.name} is left behind"
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command and b"ps_" in command:
                yield f"process {entry.name} is left behind"
