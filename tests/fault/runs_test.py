"""--budget=job with checkpoints: every batch counts once in what the final weights come from.

runs_test.py BUILD_FOLDER CASE
"""

import random
import sys
import time

from job import BATCH_SIZE, SAMPLES, Job, wait_until


def last_manifest(job):
    checkpoints = [checkpoint for checkpoint in job.complete().values() if checkpoint.finished()]
    assert len(checkpoints) == 1, "there is one last checkpoint"
    return checkpoints[0].manifest


def check_all_used(job, runs):
    state = last_manifest(job)["state"]["runs"]
    assert state["runs"] == runs, state
    assert state["next"] == runs and state["returned"] == [], state


def killed():
    """In every mode all batches are used; in asp, where each makes a version, each has made one."""
    moments = random.Random(19)
    for mode, shards, victims in [
        ("asp", 2, [0]),
        ("asp", 2, [1]),
        ("asp", 1, [0]),
        ("bsp", 2, [1]),
        ("ssp", 2, [0, 1]),
        ("easgd", 2, [1]),
        ("local_sgd", 2, [0]),
    ]:
        flags = ["--budget=job", "--checkpoint_every=20"]
        with Job(mode, shards, flags=flags, worker_flags=["--experiment_step_time=3ms"]) as job:
            job.start_workers()
            wait_until("the first checkpoint", lambda job=job: job.newest() >= 1)
            time.sleep(moments.uniform(0, 0.3))
            job.kill_and_restart(victims)
            job.finish()
            runs = job.steps * job.num_workers
            check_all_used(job, runs)
            versions = [shard["version"] for shard in last_manifest(job)["shards"]]
            assert mode != "asp" or versions == [runs] * shards, versions


def more_workers():
    """An asynchronous job goes on with more workers, and each batch still makes one version."""
    flags = ["--budget=job", "--checkpoint_every=20"]
    with Job("asp", 2, steps=0, flags=flags, worker_flags=["--epochs=2", "--experiment_step_time=1ms"]) as job:
        job.start_workers()
        wait_until("some checkpoints", lambda: job.newest() >= 3)
        for program in job.servers + job.workers:
            program.kill()
        job.workers.clear()
        job.num_workers = 4
        job.flags = [flag for flag in job.flags if not flag.startswith("--num_workers")] + ["--num_workers=4"]
        for shard in range(job.shards):
            job.servers[shard] = job.start_server(shard)
        job.start_workers()
        job.finish()
        runs = 2 * SAMPLES // BATCH_SIZE
        check_all_used(job, runs)
        assert [shard["version"] for shard in last_manifest(job)["shards"]] == [runs, runs]


def worker_lost():
    """What a lost worker had pushed is not handed out again: in asp and ssp each batch makes one version.

    In asp rank 0 is slow, so that it does not take all runs before the last replacement has joined.
    """
    moments = random.Random(23)
    for mode, action in [("asp", "wait"), ("asp", "continue"), ("ssp", "wait")]:
        flags = ["--budget=job", f"--on_worker_loss={action}", "--reconnect_grace=100ms"]
        pace = ["--experiment_step_time=1ms", *(["--experiment_straggler=0:20"] if mode == "asp" else [])]
        with Job(mode, 1, flags=flags, worker_flags=pace) as job:
            job.start_workers()
            job.wait_for_training()
            for number in range(3):
                time.sleep(moments.uniform(0, 0.1))
                job.workers[1].kill()
                job.workers[1] = job.start_worker(f"replacement-{number}", "--rank=1")
                name = job.workers[1].errors
                wait_until("the replacement", lambda name=name: "rank 1 of" in name())
            job.finish()
            runs = job.steps * job.num_workers
            check_all_used(job, runs)
            assert [shard["version"] for shard in last_manifest(job)["shards"]] == [runs], mode


if __name__ == "__main__":
    {"killed": killed, "more_workers": more_workers, "worker_lost": worker_lost}[sys.argv[2]]()
