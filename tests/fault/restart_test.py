"""Servers with --checkpoint_dir are killed and started again: restart_test.py BUILD_FOLDER CASE."""

import random
import signal
import sys
import time

from job import BIN, Job, Program, undisturbed, wait_until


def run(mode, shards, victims, after_s, flags=()):
    """The hash of a job whose servers are killed so long after the first checkpoint, with most of its steps to come."""
    with Job(mode, shards, flags=flags, worker_flags=["--experiment_step_time=3ms"]) as job:
        job.start_workers()
        wait_until("the first checkpoint", lambda: job.newest() >= 1)
        time.sleep(after_s)
        job.kill_and_restart(victims)
        weights = job.finish()
        errors = "".join(worker.errors() for worker in job.workers)
        assert "rolled back to step" in errors, errors
        return weights


def bsp():
    """Whoever is killed, the weights are those of a run without it, on any number of servers."""
    moments = random.Random(17)
    expected = undisturbed()
    for shards, victims in [(1, [0]), (2, [1]), (2, [0]), (2, [0, 1]), (3, [1, 2])]:
        moment = moments.uniform(0, 0.4)
        weights = run("bsp", shards, victims, moment)
        assert weights == expected, f"{shards} servers, {victims} killed after {moment:.3f} s: other weights"


def own_folders():
    """Servers that share no folder: each has its part in its own."""
    with Job("bsp", 2, flags=["--checkpoint_every=40"], worker_flags=["--experiment_step_time=3ms"], own=True) as job:
        job.start_workers()
        job.wait_for_training()
        for number, victims in enumerate([[1], [0], [0, 1]]):
            since = job.newest()
            wait_until("another checkpoint", lambda since=since: job.newest() > since)
            job.kill_and_restart(victims)
            wait_until("the job to go back", lambda times=number: job.workers[0].errors().count("going on") > times)
        assert job.finish() == undisturbed()
        for folder in (job.dir, job.folder / "checkpoints-1"):  # A server may end before it hears of the last one.
            assert len(list(folder.glob("checkpoint-*"))) in (3, 4), list(folder.iterdir())


def stopped():
    """A server that is asked to leave takes a checkpoint first, and nothing is made twice."""
    # A step takes so long that the job cannot be over before the signal comes.
    flags, paced = ["--checkpoint_every=1000000"], ["--experiment_step_time=3ms"]
    with Job("bsp", 1, flags=flags, worker_flags=paced) as job:
        job.start_workers()
        job.wait_for_training()
        job.servers[0].kill(signal.SIGTERM)
        assert job.newest() == 2, job.servers[0].errors()
        job.servers[0] = job.start_server(0)
        assert job.finish() == undisturbed()


def modes():
    """In every other mode the job comes to its end, too."""
    moments = random.Random(18)
    rounds = ["--local_steps=8"]
    cases = [
        ("asp", []),
        ("ssp", []),
        ("local_sgd", rounds),
        ("diloco", rounds),
        ("diloco_quorum", [*rounds, "--quorum=1", "--quorum_grace=5ms"]),
        ("diloco_async", rounds),
        ("easgd", rounds),
        ("backup", ["--backup_workers=1"]),
    ]
    for number, (mode, flags) in enumerate(cases):
        run(mode, 2, [number % 2], moments.uniform(0, 0.3), [*flags, "--checkpoint_every=20"])


def outer():
    """The outer optimizer's state, and its place in a step, are those of the checkpoint: so are the weights, then.

    Workers' optimizers have no state, which would begin anew. Without a barrier only one worker's order is known, or
    that of a quorum of all.
    """
    moments = random.Random(19)
    flags = ["--optimizer=sgd", "--local_steps=4", "--outer_momentum=0.6"]
    for mode, workers, more in [
        ("diloco", 2, []),
        ("diloco_quorum", 2, ["--quorum=2", "--quorum_grace=10s"]),
        ("diloco_async", 1, ["--dn_buffer=7"]),
    ]:
        options = {"flags": [*flags, *more, "--checkpoint_every=10"], "workers": workers}
        expected = undisturbed(mode, 1, **options)
        for shards, victims in [(1, [0]), (2, [1])]:
            with Job(mode, shards, worker_flags=["--experiment_step_time=3ms"], **options) as job:
                job.start_workers()
                wait_until("the first checkpoint", lambda job=job: job.newest() >= 1)
                time.sleep(moments.uniform(0.3, 0.7))
                job.kill_and_restart(victims)
                assert job.finish() == expected, (mode, shards)
                assert "rolled back to step" in job.workers[0].errors()


def finished():
    """Killed when all workers were done, the servers come back to serve the last evaluation."""
    with Job("bsp", 2, steps=100, flags=["--server_timeout=5s"]) as job:
        job.start_workers()
        wait_until("the last checkpoint", job.has_finished_checkpoint)
        for worker in job.workers:
            worker.process.send_signal(signal.SIGSTOP)
        job.kill_and_restart([1])
        for worker in job.workers:
            worker.process.send_signal(signal.SIGCONT)
        # Who had left before has no reason to come back, and the servers then wait for nobody who would.
        for worker in job.workers:
            assert worker.end() == 0, worker.errors()
        assert job.weights()


def finished_meanwhile():
    """A server that is started again when its chief is about to end the finished job ends well, too."""
    with Job("bsp", 2, steps=20) as job:
        chief, job.servers[0] = job.servers[0], None
        chief.kill()
        job.servers[0] = job.start_server(0, ["--keep_running"])
        job.start_workers()
        assert [worker.end() for worker in job.workers] == [0, 0]
        assert job.servers[1].end() == 0
        job.servers[1] = job.start_server(1)
        assert job.servers[1].end() == 0, job.servers[1].errors()
        assert "the job is finished: nobody needs this server any more" in job.servers[1].errors()
        job.servers[0].kill(signal.SIGTERM)


def refused():
    """What cannot be gone back to is skipped, or refused, by its name."""
    with Job("bsp", 1, worker_flags=["--experiment_step_time=2ms"]) as job:
        job.start_workers()
        wait_until("two checkpoints", lambda: job.newest() >= 2)
        job.servers[0].kill()
        newest = job.dir / f"checkpoint-{job.newest():06d}"
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
        assert job.finish() == undisturbed()
        assert str(values.name) in job.servers[0].errors(), job.servers[0].errors()


if __name__ == "__main__":
    cases = [bsp, own_folders, modes, outer, finished, finished_meanwhile, refused, stopped]
    {case.__name__: case for case in cases}[sys.argv[2]]()
