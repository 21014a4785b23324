"""A server dies, or its disk fails, at each system call of a save: system_call_test.py BUILD_FOLDER CASE.

strace injects it, into the one thread that writes checkpoints; the calls are counted for each kind by itself. What a
kill leaves is what was there when the call began, so what a call has done is seen by the kill at the next one.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from job import BIN, Job, Program, undisturbed, wait_until

MANY = 100  # More than a save has of any kind of call.
STEPS = 3000
CALLS = ["mkdir", "openat", "write", "fsync", "rename", "unlink", "unlinkat"]
FAILING = {"mkdir": "ENOSPC", "openat": "EROFS", "write": "ENOSPC", "fsync": "EIO", "rename": "EIO", "unlink": "EROFS"}
FLAGS = ["--checkpoint_every=1000000", "--keep_checkpoints=2"]


def writing_thread(process):
    """The thread that writes checkpoints."""
    tasks = pathlib.Path(f"/proc/{process.pid}/task").iterdir()
    return next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == "checkpoints")


class Injection:
    """While it is there, the thread's calls are traced, and the N-th of this kind meets with this."""

    def __init__(self, job, server, call, what, number):
        self.log = job.folder / f"{call}-{number}.trace"
        inject = [] if call is None else [f"--inject={call}:{what}:when={number}"]
        arguments = ["strace", "-y", "-o", self.log, f"-etrace={','.join(CALLS)}", *inject]
        arguments += ["-p", str(writing_thread(server.process))]
        self.err = job.folder / "strace.err"
        with open(self.err, "wb") as err:
            self.process = subprocess.Popen(arguments, stderr=err, stdin=subprocess.DEVNULL)
        attached = b" attached"
        wait_until("strace", lambda: attached in self.err.read_bytes() or self.process.poll() is not None)

    def ends(self, server, after_s):
        """Whether it has killed the server, at most so long from now."""
        deadline = time.monotonic() + after_s
        while server.runs() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.end()
        return not server.runs()

    def kill(self):
        self.process.kill()

    def end(self):
        """What was traced."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        return self.log.read_text()


def may_trace():
    if not shutil.which("strace"):
        return "strace is not installed"
    program = subprocess.Popen(["sleep", "30"])
    try:
        traced = subprocess.run(
            ["timeout", "1", "strace", "-p", str(program.pid)], capture_output=True, text=True, check=False
        )
    finally:
        program.kill()
        program.wait()
    return None if " attached" in traced.stderr else f"strace may not trace: {traced.stderr.strip()}"


def wait_for_progress(job):
    """Until a version was made that is not the one that it began with."""
    before = -1
    while before < 0:
        before = job.version()
    wait_until("a later version", lambda: job.version() > before)


def killed(calls):
    """The job goes back to the old checkpoint or to the new one, and its weights are what they would have been."""
    expected = undisturbed(steps=STEPS)
    kills = []
    with Job("bsp", 1, steps=STEPS, flags=FLAGS, worker_flags=["--experiment_step_time=1ms"]) as job:
        job.start_workers()
        job.wait_for_training()
        # Then there is an older one to remove.
        assert job.ask("checkpoint").returncode == 0
        for call in calls:
            for number in range(1, MANY):
                old = job.newest()
                injection = Injection(job, job.servers[0], call, "signal=KILL", number)
                asked = Program(job.folder, "asked", [*job.control(), "checkpoint"])
                done = (asked, job.servers[0])
                wait_until("the kill, or the checkpoint", lambda done=done: not all(program.runs() for program in done))
                # What it removes, it removes after its answer.
                killed = injection.ends(server=job.servers[0], after_s=0.1)
                if not killed:
                    assert asked.end() == 0 and job.newest() > old, asked.errors() + job.servers[0].errors()
                    break
                asked.kill()
                kills.append(f"{call} {number}")
                new = job.newest()
                assert new >= old, f"killed at {call} {number}: checkpoint {new} after {old}"
                assert len(job.complete()) >= 2 or call.startswith("unlink"), f"killed at {call} {number}"
                job.servers[0].process.wait()
                said = len(job.servers[0].errors())
                job.servers[0] = job.start_server(0)
                wait_until("the job to run", lambda at=said: "the job is running" in job.servers[0].errors()[at:])
                line = re.search(r"goes on from (.*)", job.servers[0].errors()[said:])
                assert f"/checkpoint-{new:06d}, version" in line[1], f"{call} {number}: {line[0]}"
            else:
                raise AssertionError(f"a save has {MANY} calls of {call}")
            assert number > 1, f"a save has no {call}"
        print(f"killed {len(kills)} times, at {', '.join(kills)}")
        assert all(worker.runs() for worker in job.workers), f"only {STEPS} steps for {len(kills)} kills"
        assert job.finish() == expected


def failing():
    """Training goes on, one line says what is wrong, and the older checkpoint stays; the next one is taken."""
    failures = 0
    with Job("bsp", 1, steps=1000000, flags=FLAGS, worker_flags=["--experiment_step_time=1ms"]) as job:
        job.start_workers()
        job.wait_for_training()
        assert job.ask("checkpoint").returncode == 0
        for call, error in FAILING.items():
            for number in range(1, MANY):
                old, said = job.newest(), len(job.servers[0].errors())
                injection = Injection(job, job.servers[0], call, f"error={error}", number)
                asked = job.ask("checkpoint")
                traced = injection.end()
                if "(INJECTED)" not in traced:
                    assert asked.returncode == 0, asked.stderr
                    break
                failures += 1
                where = f"{error} at {call} {number}"

                def warnings(at=said):
                    return [line for line in job.servers[0].errors()[at:].splitlines() if " W " in line]

                def failed(warnings=warnings):
                    return [line for line in warnings() if "failed, and the job goes on without it" in line]

                assert job.servers[0].runs() and all(worker.runs() for worker in job.workers), f"{where}: ended"
                if asked.returncode == 0:  # What failed was to remove something.
                    assert job.newest() > old, f"{where}: it is said to be complete, but is not there"
                    assert warnings() or call in ("unlink", "openat", "fsync"), f"{where}: no line says so"
                else:
                    # Besides there may be a line of the removal before, which is not waited for.
                    wait_until(f"{where}: the line that says so", failed)
                    assert len(failed()) == 1, f"{where}: {warnings()}"
                    assert job.newest() >= old, f"{where}: checkpoint {old} is gone"
                assert len(job.complete()) >= 2, f"{where}: {len(job.complete())} checkpoints are left"
            else:
                raise AssertionError(f"a save has {MANY} calls of {call}")
        wait_for_progress(job)
        assert job.ask("checkpoint").returncode == 0
        print(f"{failures} failures")


def ordered():
    """Nothing is relied on before it is on disk: each file before its name, each name before the next step."""
    with Job("bsp", 1, steps=1000000, flags=FLAGS, worker_flags=["--experiment_step_time=1ms"]) as job:
        job.start_workers()
        job.wait_for_training()
        assert job.ask("checkpoint").returncode == 0
        injection = Injection(job, job.servers[0], None, None, 0)
        assert job.ask("checkpoint").returncode == 0
        wait_until("the oldest one's end", lambda: not (job.dir / "checkpoint-000001").exists())
        check_order(injection.end())


def check_order(traced):
    written, named, renames = set(), set(), 0  # Files, and folders with names, that are not on disk yet.
    for line in traced.splitlines():
        call, paths = line.split("(")[0].split()[-1], re.findall(r'[<"](/[^>"]+)[>"]', line)
        if not paths:  # An event's or a socket's, or the second half of a call that another thread's came between.
            continue
        if call == "write":
            written.add(paths[0])
        elif call == "fsync":
            written.discard(paths[0])
            named.discard(paths[0])
        elif call in ("rename", "unlink", "mkdir") and "EISDIR" not in line:
            old, folder = paths[0], str(pathlib.Path(paths[0]).parent)
            assert old not in written, f"named before it is on disk: {line}"
            commits = call == "rename" and paths[1].endswith("manifest.json")
            assert (call == "rename" and not commits) or not named, f"before {named} are on disk: {line}"
            named.add(folder)
            renames += call == "rename"
    assert renames == 3 and not written, traced


@contextlib.contextmanager
def checkpoint_under_way(call, delay_s):
    """A job that has begun a checkpoint, each such call of which takes this long."""
    with Job("bsp", 1, steps=1000000, flags=FLAGS, worker_flags=["--experiment_step_time=1ms"]) as job:
        job.start_workers()
        job.wait_for_training()
        injection = Injection(job, job.servers[0], call, f"delay_exit={delay_s}s", "1+")
        asked = Program(job.folder, "asked", [*job.control(), "checkpoint"])
        wait_until("the checkpoint to be begun", lambda: (job.dir / "checkpoint-000002").exists())
        yield job, injection
        asked.end()
        injection.end()


def hanging():
    """A disk that hangs: lines say so while the job runs and when it ends, which does not wait for it."""
    with checkpoint_under_way("fsync", 1000) as (job, injection):
        server = job.servers[0]
        wait_until("the line that says so", lambda: "one part of a checkpoint has taken 5." in server.errors())
        assert job.ask("shutdown").returncode == 0
        wait_until("its last line", lambda: "nothing was written or read for 5." in server.errors())
        injection.kill()  # It holds what it delays, also at the end of the process.
        assert server.end() == 0, server.errors()
        assert not (job.dir / "checkpoint-000002/shard-0-of-1.json").exists(), "what hangs was not ended"


def slow():
    """A disk that is slow: a server that ends waits until its part is written, however long that takes in all."""
    with checkpoint_under_way("write", 2) as (job, _):
        assert job.ask("shutdown").returncode == 0
        assert job.servers[0].end() == 0, job.servers[0].errors()
        said = job.servers[0].errors()
        assert "is being written or read there as long as it goes on" in said, said
        assert "nothing was written" not in said, said
        assert not list(job.dir.glob("checkpoint-000002/*.tmp-*")), list(job.dir.glob("*/*"))
        assert (job.dir / "checkpoint-000002/shard-0-of-1.json").exists(), list(job.dir.glob("*/*"))


def start_hanging():
    """A start that hangs in the system can be ended, and says in what it hangs."""
    with Job("bsp", 0) as job:
        job.dir.mkdir()
        folder = [f"--checkpoint_dir={job.dir}"]
        for path, flags, words in (
            (job.dir / "shard-0.lock", folder, f"the file system of --checkpoint_dir={job.dir}; ending\n"),
            ("/etc/hosts", [*folder, "--listen=localhost:0"], "listening at --listen=localhost:0 (perhaps"),
        ):
            trace = job.folder / "trace"
            strace = ["strace", "-f", "-o", trace, "-P", path, "-etrace=openat"]
            strace += ["-einject=openat:delay_enter=1000s", str(BIN / "ps_server"), *flags]
            traced = Program(job.folder, "traced", strace)
            wait_until("the program to take signals", lambda traced=traced: catches_signals(traced.process.pid))
            # Before that, it would end in order.
            wait_until("the start to hang", lambda traced=traced, path=path: opens(traced.process.pid, path))
            os.kill(child_of(traced.process.pid), signal.SIGTERM)
            said = f"ps_server: the start hangs in {words}"
            wait_until("its last line", lambda traced=traced, said=said: said in traced.errors())
            wait_until("its end", lambda trace=trace: "exited with 1" in trace.read_text())
            traced.kill()  # It holds what it delays, also at the end of the process.


def child_of(process):
    children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    named = [child for child in children if pathlib.Path(f"/proc/{child}/comm").read_text() == "ps_server\n"]
    return int(named[0]) if named else None


def catches_signals(process):
    """Whether its child is a server that has a thread for SIGTERM."""
    server = child_of(process)
    if server is None:
        return False
    blocked = re.search(r"^SigBlk:\s*(\w+)", pathlib.Path(f"/proc/{server}/status").read_text(), re.MULTILINE)
    return bool(int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1)


def opens(process, path):
    """Whether a thread of its child, a server, is in a system call for this path."""
    server = child_of(process)
    for task in pathlib.Path(f"/proc/{server}/task").iterdir():
        with contextlib.suppress(OSError, OverflowError, ValueError):
            call = (task / "syscall").read_text().split()  # The number, and then the arguments.
            if len(call) < 3:
                continue
            with open(f"/proc/{server}/mem", "rb", buffering=0) as memory:
                memory.seek(int(call[2], 16))
                if memory.read(256).split(b"\0")[0] in (os.fsencode(path), os.fsencode(os.path.basename(path))):
                    return True
    return False


if __name__ == "__main__":
    cases = {"failing": failing, "ordered": ordered, "hanging": hanging, "slow": slow}
    cases["start hanging"] = start_hanging
    cases["killed at writes"] = lambda: killed(["write"])
    cases["killed at syncs"] = lambda: killed(["fsync"])
    cases["killed at names"] = lambda: killed(["mkdir", "openat", "rename", "unlink", "unlinkat"])
    why_not = may_trace()
    if why_not is not None:
        print(f"SKIPPED: {why_not}")
        sys.exit(0)
    if not (BIN / "ps_server").exists():
        sys.exit(f"{BIN}: no ps_server")
    cases[sys.argv[2]]()
