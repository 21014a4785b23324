"""Disks that are full, read-only or damaged, and folders that two jobs want: disk_test.py BUILD_FOLDER CASE."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from job import BIN, LIMIT, Job, Program, undisturbed, wait_until

SLOWLY = ["--experiment_step_time=4ms"]
ON_REQUEST = ["--checkpoint_every=1000000", "--keep_checkpoints=3"]


class SmallDisk:
    """A file system of its own, in memory; `with SmallDisk() as folder`."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.folder = tempfile.mkdtemp()
        mounted = mount("-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", self.folder)
        if mounted is not None:
            os.rmdir(self.folder)
            print(f"SKIPPED: a file system is needed that may be filled: {mounted}")
            sys.exit(0)
        return pathlib.Path(self.folder)

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", self.folder], check=True, timeout=30)
        os.rmdir(self.folder)


def mount(*arguments):
    """What is wrong, or None."""
    if os.geteuid() != 0:
        return "only root may mount"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def check_fails_and_goes_on(job, words):
    old, said = job.newest(), len(job.servers[0].errors())
    asked = job.ask("checkpoint")
    assert asked.returncode == 1 and words in asked.stderr, f"{asked.stdout}{asked.stderr}"
    lines = [line for line in job.servers[0].errors()[said:].splitlines() if " W " in line]
    assert len(lines) == 1 and words in lines[0] and "the job goes on without it" in lines[0], lines
    assert job.newest() == old
    before = job.version()
    wait_until("a later version", lambda: job.version() > before)


def check_is_well_again(job):
    old = job.newest()
    asked = job.ask("checkpoint")
    assert asked.returncode == 0 and job.newest() > old, asked.stderr
    job.kill_and_restart([0])
    assert job.finish() == undisturbed(steps=job.steps)


def job_on(folder):
    return Job("bsp", 1, steps=2000, flags=ON_REQUEST, worker_flags=SLOWLY, folder=folder)


def full():
    """A full disk: training goes on, one line says so; once there is room the next one is taken."""
    with SmallDisk("512k") as disk, job_on(disk / "ck") as job:
        job.start_workers()
        job.wait_for_training()
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        for _ in range(3):
            check_fails_and_goes_on(job, "No space left on device")
        folders = sorted(path.name for path in job.dir.glob("checkpoint-*"))
        assert folders in (["checkpoint-000001"], ["checkpoint-000001", "checkpoint-000004"]), folders
        (disk / "filler").unlink()
        check_is_well_again(job)


def read_only():
    """A file system that becomes read-only, as after an error of its disk."""
    with SmallDisk("1m") as disk, job_on(disk / "ck") as job:
        job.start_workers()
        job.wait_for_training()
        # The server holds its lock open for writing, which stops a remount; a second mount of the same does not.
        assert mount("--bind", str(disk), str(disk)) is None
        try:
            assert mount("-o", "remount,bind,ro", str(disk)) is None
            check_fails_and_goes_on(job, "Read-only file system")
            job.servers[0].kill()
            refused = job.start_server(0)
            assert refused.end() != 0, "a server has begun on a file system that it cannot write"
            assert "Read-only file system" in refused.errors()[-1000:], refused.errors()
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)
        job.servers[0] = job.start_server(0)
        wait_until("the job to go on", lambda: job.version() > 0)
        check_is_well_again(job)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "torn":
        del data[len(data) // 2 :]
    elif how == "gone":
        path.unlink()
        return
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damaged():
    """Each of a checkpoint's files: it is named, and the one before is taken; asked for by its path it is refused."""
    with Job("bsp", 2, steps=300, flags=ON_REQUEST, worker_flags=SLOWLY) as job:
        job.start_workers()
        job.wait_for_training()
        for _ in range(2):
            assert job.ask("checkpoint").returncode == 0
        for program in job.servers + job.workers:
            program.kill()
        newest = max(job.dir.glob("checkpoint-*"))
        whole = job.folder / "whole"
        shutil.copytree(job.dir, whole)
        for file in sorted(path.name for path in newest.iterdir()):
            for how in ("torn", "flipped", "gone"):
                shutil.rmtree(job.dir)
                shutil.copytree(whole, job.dir)
                damage(newest / file, how)
                check_damaged(job, newest, file, how)


def check_damaged(job, newest, file, how):
    where = f"{file} {how}"
    said = [len(server.errors()) for server in job.servers]
    for shard in range(2):
        job.servers[shard] = job.start_server(shard)
    job.workers = []
    job.start_workers()
    wait_until("the job to run", lambda: "the job is running" in job.servers[0].errors()[said[0] :])
    errors = "".join(server.errors()[at:] for server, at in zip(job.servers, said, strict=True))
    if (file, how) == ("manifest.json", "gone"):  # As if it had not been complete: nothing is damaged.
        assert "goes on from" in errors and newest.name not in errors, f"{where}: {errors}"
    else:
        assert newest.name in errors and file in errors, f"{where}: {errors}"
    for program in job.servers + job.workers:
        program.kill()
    if how == "gone":
        return
    refused = job.start_server(0, [f"--restore={newest}"])
    second = job.start_server(1, [f"--restore={newest}"])
    job.servers, job.workers = [refused, second], []
    if file == "manifest.json":
        assert refused.end() == 1, f"{where}: {refused.errors()}"
    else:
        job.start_workers()  # A shard reads its file when it knows the layout.
        assert refused.end() == 1, f"{where}: {refused.errors()}"
    assert file in refused.errors()[said[0] :] + second.errors()[said[1] :], f"{where}: {refused.errors()}"
    for program in job.servers + job.workers:
        if program.runs():
            program.kill()


def shared():
    """Two jobs on one folder: the second is refused, and the first does not notice."""
    with Job("bsp", 1, worker_flags=SLOWLY) as job:
        job.start_workers()
        wait_until("the first checkpoint", lambda: job.newest() >= 1)
        arguments = [str(BIN / "ps_server"), f"--checkpoint_dir={job.dir}", "--job=other"]
        second = Program(job.folder, "second", arguments)
        assert second.end() == 1
        assert "another process writes shard 0 there" in second.errors(), second.errors()
        # When the first one has ended, its checkpoints are still another job's.
        for program in job.servers + job.workers:
            program.kill(signal.SIGKILL)
        third = Program(job.folder, "third", arguments)
        assert third.end() == 1
        assert "--job=" in third.errors(), third.errors()


def same_inode():
    """A lock's holder is named, and not who holds a file of the same number in another file system."""
    with contextlib.ExitStack() as stack:
        disk, other = stack.enter_context(SmallDisk("1m")), stack.enter_context(SmallDisk("1m"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        paths = [where / "generation.lock" for where in (other, disk)]
        files = [stack.enter_context(open(path, "w")) for path in paths]
        if os.fstat(files[0].fileno()).st_ino != os.fstat(files[1].fileno()).st_ino:
            print("SKIPPED: these file systems number their files together")
            return
        fcntl.flock(files[1], fcntl.LOCK_EX)
        innocent = subprocess.Popen(["flock", "--no-fork", other / "generation.lock", "sleep", str(LIMIT)])
        try:
            wait_until("its lock", lambda: f" {innocent.pid} " in pathlib.Path("/proc/locks").read_text())
            arguments = [str(BIN / "ps_server"), f"--checkpoint_dir={disk}"]
            server = Program(pathlib.Path(folder), "server", arguments)
            wait_until("the holder to be named", lambda: " holds this lock" in server.errors())
            server.kill()
            assert f"process {os.getpid()} (" in server.errors(), f"not {innocent.pid}: {server.errors()}"
        finally:
            innocent.kill()
            innocent.wait()


if __name__ == "__main__":
    cases = {"full": full, "read_only": read_only, "damaged": damaged, "shared": shared, "same_inode": same_inode}
    cases[sys.argv[2]]()
