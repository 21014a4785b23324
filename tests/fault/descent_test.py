"""A chief that is started again and knows nothing of the job's checkpoints: descent_test.py BUILD_FOLDER CASE."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys

from job import BIN, Job, Program, wait_until

SLOWLY = ["--experiment_step_time=4ms"]
NEW = ["--checkpoint_every=20", "--keep_checkpoints=2"]


@contextlib.contextmanager
def training(shards, own=False):
    """A job that has taken a few checkpoints."""
    with Job("bsp", shards, flags=NEW, worker_flags=SLOWLY, own=own) as job:
        job.start_workers()
        wait_until("three checkpoints", lambda: job.newest() >= 3)
        yield job


def complete(folders):
    """The files of checkpoints that have their manifest in the first of these folders."""
    names = [manifest.parent.name for manifest in folders[0].glob("checkpoint-*/manifest.json")]
    paths = [path for folder in folders for name in names for path in folder.glob(f"{name}/*")]
    assert paths
    return {path: path.stat().st_mtime_ns for path in paths}


def check_refused(programs, words):
    for program in programs:
        assert program.end() == 1, program.errors()
        for word in words:
            assert word in program.errors(), f"{word}: {program.errors()}"


def restart_chief(job, how):
    """As one does whose volume is not mounted, or who has forgotten the flag. The folder that it should have had."""
    job.servers[0].kill()
    right = job.dir
    if how == "without":
        job.checkpoints = False
        job.flags = [flag for flag in job.flags if not flag.startswith(("--checkpoint", "--keep", "--server_timeout"))]
    else:
        job.dir = job.folder / "not-mounted"
    job.servers[0] = job.start_server(0)
    return right


def elsewhere():
    """Whoever knows of the checkpoints refuses it, names their folder and ends; they stay."""
    for shards, own, how in [(2, False, "empty"), (2, True, "empty"), (1, False, "empty"), (2, False, "without")]:
        with training(shards, own) as job:
            for worker in job.workers:
                worker.process.send_signal(signal.SIGSTOP)  # So that no checkpoint is on its way.
            right = restart_chief(job, how)
            folders = [right, job.folder / "checkpoints-1"]
            before = complete(folders)
            for worker in job.workers:
                worker.process.send_signal(signal.SIGCONT)
            word = "without --checkpoint_dir" if how == "without" else "not-mounted"
            check_refused(job.workers + job.servers[1:], [str(right), word])
            assert job.servers[0].runs() and str(right) in job.servers[0].errors(), job.servers[0].errors()
            assert complete(folders) == before


def started_again():
    """A shard that was started again, too, knows them from its folder."""
    for own in (False, True):
        with training(2, own) as job:
            for program in [*job.workers, job.servers[1]]:
                program.kill()
            right = restart_chief(job, "empty")
            folder = job.folder / "checkpoints-1" if own else right
            job.listening(0)
            arguments = ["--shard=1", "--num_shards=2", f"--chief={job.addresses[0]}", f"--checkpoint_dir={folder}"]
            before = complete([right, folder])
            shard = Program(job.folder, "again", [str(BIN / "ps_server"), *arguments, *job.flags])
            check_refused([shard], [str(folder), "not-mounted"])
            assert complete([right, folder]) == before


@contextlib.contextmanager
def killed(shards=2, own=True, chief_alone=False):
    """Training, of which the chief was killed when its newest checkpoint was of a later version than the first."""
    with training(shards, own) as job:
        for worker in job.workers:
            worker.process.send_signal(signal.SIGSTOP)  # So that no checkpoint is on its way.
        job.servers[0].kill()
        if chief_alone:
            for worker in job.workers:
                worker.process.send_signal(signal.SIGCONT)
        else:
            for program in job.servers[1:] + job.workers:
                program.kill()
        yield job


def start(job, name, shard, folder):
    arguments = [f"--shard={shard}", f"--num_shards={job.shards}", f"--checkpoint_dir={folder}", *job.flags]
    where = f"--chief={job.addresses[0]}" if shard else f"--listen={job.addresses[0]}"
    return Program(job.folder, name, [str(BIN / "ps_server"), where, *arguments])


def check_anew(chief, words):
    wait_until("the chief to begin anew", lambda: "begins anew" in chief.errors())
    for word in words:
        assert word in chief.errors(), f"{word}: {chief.errors()}"


def other_servers_folder():
    """The chief comes back with the folder of another server, which has the job's generation, and no manifest."""
    with killed(chief_alone=True) as job:
        folders = [job.dir, job.folder / "checkpoints-1"]
        before = complete(folders)
        chief = start(job, "wrong", 0, folders[1])
        check_anew(chief, ["no checkpoint here is complete"])
        check_refused(job.workers + job.servers[1:], [str(job.dir), "up to version", "has none of them"])
        assert chief.runs(), chief.errors()
        assert complete(folders) == before
        chief.kill()


def swapped():
    """So it is for servers that were all started again, each with the folder of the other."""
    with killed() as job:
        folders = [job.dir, job.folder / "checkpoints-1"]
        before = complete(folders)
        chief = start(job, "wrong", 0, folders[1])
        check_anew(chief, ["no checkpoint here is complete"])
        shard = start(job, "swapped", 1, folders[0])
        check_refused([shard], [f"in {folders[0]}", "up to version", "has none of them"])
        assert complete(folders) == before
        chief.kill()


def removed():
    """Manifests, or whole checkpoints, are gone; who was in the job knows of them."""
    for shards, what in [(1, "manifests"), (1, "checkpoints"), (2, "manifests")]:
        with killed(shards, own=False, chief_alone=True) as job:
            for path in job.dir.glob("checkpoint-*"):
                if what == "manifests":
                    (path / "manifest.json").unlink(missing_ok=True)
                else:
                    shutil.rmtree(path)
            before = sorted(job.dir.glob("checkpoint-*/*"))
            chief = start(job, "again", 0, job.dir)
            check_anew(chief, ["is complete" if what == "manifests" else "a job was here before"])
            check_refused(job.workers + job.servers[1:], [str(job.dir), "up to version"])
            assert sorted(job.dir.glob("checkpoint-*/*")) == before
            chief.kill()


def on_purpose():
    """With --restore=none the job begins anew."""
    with training(2) as job:
        job.servers[0].kill()
        job.dir = job.folder / "new"
        job.servers[0] = job.start_server(0, ["--restore=none"])
        job.finish()


def own_line():
    """Once a job that began anew goes on from a checkpoint of its own, nobody removes those of others."""
    with Job("bsp", 2, steps=1000000, flags=[*NEW, "--restore=none"], worker_flags=SLOWLY) as job:
        theirs, first = [job.folder / f"theirs-{copy}" for copy in (1, 2)], job.dir / "checkpoint-000001"
        with training(1) as other:
            for program in other.servers + other.workers:
                program.kill()
            for copy in theirs:
                shutil.copytree(other.dir / f"checkpoint-{other.newest():06d}", copy)
        job.start_workers()
        wait_until("its first one to go", lambda: job.newest() >= 3 and not first.exists())
        theirs[0].rename(first)
        wait_until("the others' to be removed, as it was told to", lambda: not first.exists())
        job.kill_and_restart([1])
        wait_until("the job to go on from its own", lambda: "goes on from" in job.servers[0].errors())
        theirs[1].rename(first)
        before = job.newest()
        wait_until("three more", lambda: job.newest() >= before + 3)
        assert (first / "manifest.json").exists()


def without():
    """A shard that is started again without --checkpoint_dir is told so."""
    with training(2) as job:
        job.servers[1].kill()
        arguments = ["--shard=1", "--num_shards=2", f"--chief={job.addresses[0]}", "--mode=bsp", "--optimizer=momentum"]
        arguments += ["--learning_rate=0.05", "--num_workers=2"]
        shard = Program(job.folder, "without", [str(BIN / "ps_server"), *arguments])
        check_refused([shard], ["shard 1 was started without --checkpoint_dir", str(job.dir)])
        job.servers[1] = job.start_server(1)
        job.finish()


def locked():
    """While another process holds a lock in the folder, the server names it, and may be stopped."""
    for how in (signal.SIGINT, signal.SIGTERM):
        with Job("bsp", 0) as job:
            job.dir.mkdir()
            with open(job.dir / "generation.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                server = Program(job.folder, "server", [str(BIN / "ps_server"), f"--checkpoint_dir={job.dir}"])
                words = [f"{job.dir}/generation.lock", f"process {os.getpid()}", "waiting for it"]
                wait_until(
                    "the lock to be named", lambda server=server, words=words: all(w in server.errors() for w in words)
                )
                server.process.send_signal(how)
                assert server.end() == 1, server.errors()
                assert "stopped" in server.errors(), server.errors()


if __name__ == "__main__":
    cases = [elsewhere, started_again, other_servers_folder, swapped, removed, on_purpose, own_line, without, locked]
    {case.__name__: case for case in cases}[sys.argv[2]]()
