"""An operator ends a job with ps_ctl shutdown: shutdown_test.py BUILD_FOLDER CASE."""

import re
import sys

from job import Job, undisturbed, wait_until

PACE = ["--experiment_step_time=4ms"]
SAID = "the job was shut down by an operator (ps_ctl shutdown)"


def shut_down(job, *flags):
    asked = job.ask("shutdown", *flags)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.endswith("job default is shut down\n"), asked.stdout
    for program in job.servers + [worker for worker in job.workers if worker.process.returncode is None]:
        assert program.end() == 0, f"{program.err.name}: {program.errors()}"
    return asked.stdout


def trains(job, version=20):
    job.start_workers()
    wait_until("training", lambda: job.version() > version)


def running():
    """Servers and workers exit with status 0, and say why, in every mode."""
    for mode in ["bsp", "asp", "ssp", "backup", "local_sgd", "diloco_quorum", "diloco_async", "easgd"]:
        rounds = ["--local_steps=2"] if mode.startswith("diloco") else []
        rounds += ["--quorum=1"] if mode == "diloco_quorum" else []
        with Job(mode, 2, steps=100000, flags=rounds, worker_flags=PACE, checkpoints=False) as job:
            trains(job)
            shut_down(job)
            assert all(SAID in program.errors() for program in job.servers + job.workers)


def checkpoint():
    """The same commands go on from the checkpoint, and end with the weights of an undisturbed job."""
    with Job("bsp", 2, flags=["--checkpoint_every=100000"], worker_flags=PACE) as job:
        trains(job)
        said = shut_down(job, "--checkpoint")
        version = int(re.match(r"\S*/checkpoint-\d+ version (\d+)\n", said)[1])
        assert version > 20
        for shard in (0, 1):
            job.servers[shard] = job.start_server(shard)
        job.workers.clear()
        job.start_workers()
        assert job.finish() == undisturbed()
        assert f"version {version}" in job.servers[0].errors()


def waiting():
    """A job that waits for workers, or for one that was lost, is ended as well; what is missing does not come."""
    with Job("bsp", 2, checkpoints=False) as job:
        job.workers.append(job.start_worker("worker-0"))
        wait_until("the worker", lambda: "joined (1 of 2)" in job.servers[0].errors())
        shut_down(job)
    with Job("bsp", 2, flags=["--on_worker_loss=wait"], worker_flags=PACE, checkpoints=False) as job:
        trains(job)
        job.workers.pop(1).kill()
        wait_until("the loss", lambda: "is kept for another worker" in job.servers[0].errors())
        shut_down(job)


def broken():
    """A job that waits for a server: whoever is there, and whoever asks the chief within a second, ends well."""
    with Job("bsp", 2, steps=100000, worker_flags=PACE) as job:
        trains(job)
        job.servers.pop(1).kill()
        wait_until("the loss", lambda: re.search("shard 1 at .*connection lost", job.servers[0].errors()))
        shut_down(job)


def kept():
    """Servers that were kept running after the end."""
    with Job("bsp", 2, steps=20, flags=["--keep_running"], checkpoints=False) as job:
        job.start_workers()
        for worker in job.workers:
            assert worker.end() == 0
        assert "finished" in job.ask("status").stdout
        shut_down(job)


def refused():
    """Nothing is ended where the checkpoint that was asked for cannot be taken."""
    with Job("bsp", 1, steps=200, worker_flags=["--experiment_step_time=20ms"], checkpoints=False) as job:
        trains(job)
        asked = job.ask("shutdown", "--checkpoint")
        assert asked.returncode == 1
        assert re.search(r"nothing was ended, .*takes no checkpoints \(--checkpoint_dir\)", asked.stderr), asked.stderr
        job.finish()
        assert job.ask("drain", "0", "--checkpoint").returncode == 2


if __name__ == "__main__":
    {
        "running": running,
        "checkpoint": checkpoint,
        "waiting": waiting,
        "broken": broken,
        "kept": kept,
        "refused": refused,
    }[sys.argv[2]]()
