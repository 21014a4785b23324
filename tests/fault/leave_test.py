"""Servers with --checkpoint_dir are asked to leave, or a job ends by itself: leave_test.py BUILD_FOLDER CASE."""

import signal
import sys

from job import Job, undisturbed, wait_until

RARELY = "--checkpoint_every=1000000"


def leave(who):
    """The hash of a job of two servers, some of which were sent SIGTERM, and started again."""
    with Job("bsp", 2, flags=[RARELY], worker_flags=["--experiment_step_time=4ms"]) as job:
        job.start_workers()
        wait_until("training", lambda: job.version() > 20)
        for shard in who:
            job.servers[shard].process.send_signal(signal.SIGTERM)
        for shard in who:
            assert job.servers[shard].end() == 1, job.servers[shard].errors()
        assert job.newest() == 2, "no checkpoint was taken before leaving"
        reached = job.complete()[2].manifest["shards"][0]["version"]
        assert reached > 20, reached
        for shard in who:
            job.servers[shard] = job.start_server(shard)
        weights = job.finish()
        assert f"(version {reached}); going on" in "".join(worker.errors() for worker in job.workers)
        return weights


def all_at_once():
    """As a cluster is shut down: all servers are asked to leave, and nothing is lost."""
    assert leave([0, 1]) == undisturbed(shards=2)


def one():
    """A server that is not the chief has a checkpoint taken before it leaves, too."""
    assert leave([1]) == undisturbed(shards=2)


def not_finite():
    """A job that ended because something was not finite is not started again with the same flags."""
    with Job("bsp", 1, flags=["--learning_rate=1e30"]) as job:
        job.start_workers()
        assert job.servers[0].end() == 1
        for worker in job.workers:
            assert worker.end() == 1, worker.errors()
        again = job.start_server(0)
        assert again.end() == 1
        refusal = again.errors().splitlines()[-1]
        assert "with these flags the job has ended: " in refusal and "is not finite" in refusal, refusal
        job.servers[0] = job.start_server(0, ["--learning_rate=0.05"])
        job.workers.clear()
        job.start_workers()
        job.finish()


def status():
    """ps_ctl status says which checkpoint is the last, and how old it is."""
    with Job("bsp", 1, flags=[RARELY], worker_flags=["--experiment_step_time=4ms"]) as job:
        assert "no checkpoint yet" in job.ask("status").stdout
        job.start_workers()
        wait_until("training", lambda: job.version() > 0)
        first = job.ask("status").stdout
        assert f"last checkpoint: {job.dir}/checkpoint-000001, version 0, " in first, first
        assert job.ask("checkpoint").returncode == 0
        assert f"last checkpoint: {job.dir}/checkpoint-000002, version " in job.ask("status").stdout
        job.finish()


if __name__ == "__main__":
    {"all_at_once": all_at_once, "one": one, "not_finite": not_finite, "status": status}[sys.argv[2]]()
