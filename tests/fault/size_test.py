"""A job goes on at another size, and with all that it had: size_test.py BUILD_FOLDER CASE."""

import sys

from job import Job, undisturbed, wait_until

OPTIMIZERS = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lamb"]
SLOWLY = ["--experiment_step_time=3ms"]
SLOWLY_ENOUGH = ["--experiment_step_time=10ms"]  # To be asked for a checkpoint meanwhile, on a busy machine too.
ON_REQUEST = ["--checkpoint_every=1000000", "--keep_checkpoints=100"]


def take_checkpoint(job, after):
    """Its number. It is of a version after this one."""
    wait_until(f"version {after}", lambda: job.version() > after)
    asked = job.ask("checkpoint")
    assert asked.returncode == 0, asked.stderr
    return job.newest()


def servers():
    """From 3 servers to 1 to 5, in the middle of training: the end is the same."""
    with Job("bsp", 3, flags=ON_REQUEST, worker_flags=SLOWLY_ENOUGH) as job:
        job.start_workers()
        first = take_checkpoint(job, 20)
        job.resize(1)
        second = take_checkpoint(job, 60)
        job.resize(5)
        weights = job.finish()
        kept = job.complete()
        assert [len(kept[number].shards) for number in (first, second, max(kept))] == [3, 1, 5]
    assert weights == undisturbed()


def same_bits():
    """A finished job, served again by another number of servers, has the same weights: no step comes in between."""
    with Job("bsp", 3, steps=60, flags=ON_REQUEST) as job:
        job.start_workers()
        expected = job.finish()
        for shards in (1, 5):
            job.servers, job.workers, job.shards = [], [], shards
            job.addresses = job.addresses[:1]
            for shard in range(shards):
                if shard > 0:
                    job.addresses.append("127.0.0.1:0")
                job.servers.append(job.start_server(shard))
                job.addresses[shard] = job.listening(shard)
            for worker in range(job.num_workers):
                (job.folder / f"worker-{worker}.out").unlink()
            job.start_workers()
            assert job.finish() == expected, f"{shards} servers: other weights"


def optimizers():
    """The state of each is stored: killed, the end is the same."""
    for optimizer in OPTIMIZERS:
        flags = [f"--optimizer={optimizer}", "--learning_rate=0.01"]
        expected = undisturbed(steps=150, flags=flags)
        with Job("bsp", 2, steps=150, flags=[*flags, "--checkpoint_every=25"], worker_flags=SLOWLY) as job:
            job.start_workers()
            wait_until("two checkpoints", lambda job=job: job.newest() >= 2)
            job.kill_and_restart([0, 1])
            assert job.finish() == expected, f"--optimizer={optimizer}: other weights"


def schedules():
    """In the middle of an epoch and of a learning rate's way, which is a function of the samples that have passed."""
    for schedule in (
        ["--schedule=cosine", "--schedule_length=3epochs", "--warmup=0.5epochs"],
        ["--schedule=step", "--schedule_step=0.7epochs", "--schedule_gamma=0.5"],
    ):
        expected = undisturbed(steps=500, flags=schedule)
        flags = [*schedule, *ON_REQUEST]
        with Job("bsp", 2, steps=500, flags=flags, worker_flags=SLOWLY_ENOUGH) as job:
            job.start_workers()
            number = take_checkpoint(job, 100)
            assert job.complete()[number].position(0) % 4000 != 0
            job.kill_and_restart([0, 1])
            assert job.finish() == expected, f"{schedule}: other weights"


def restart_with(job, workers):
    """All of the job is killed and started with so many workers; without the ones it had."""
    for program in job.servers + job.workers:
        program.kill()
    job.flags.append(f"--num_workers={workers}")
    job.num_workers, job.workers = workers, []
    for shard in range(job.shards):
        job.servers[shard] = job.start_server(shard)


def workers():
    """From 2 workers to 4: at the same place in the samples, where all make a step together; else it is refused."""
    for mode in ("bsp", "backup", "local_sgd"):
        with Job(mode, 2, flags=ON_REQUEST, worker_flags=SLOWLY_ENOUGH) as job:
            job.start_workers()
            number = take_checkpoint(job, 20)
            before = job.complete()[number]
            restart_with(job, 4)
            job.start_workers()
            job.finish()
            last = job.complete()[job.newest()]
            assert last.finished() and last.manifest["num_workers"] == 4
            assert sorted(last.ledger(0)) == [0, 1, 2, 3], last.ledger(0)
            assert last.position(0) > before.position(0)
            print(f"{mode}: stored at {before.position(0)} samples, ended at {last.position(0)}")
    for mode in ("asp", "ssp", "easgd"):
        with Job(mode, 2, flags=ON_REQUEST, worker_flags=SLOWLY_ENOUGH) as job:
            job.start_workers()
            take_checkpoint(job, 20)
            restart_with(job, 4)
            assert job.servers[0].end() == 1, f"{mode}: {job.servers[0].errors()}"
            said = job.servers[0].errors()[-400:]
            assert "--num_workers" in said, f"{mode}: {said}"


if __name__ == "__main__":
    cases = {"servers": servers, "same_bits": same_bits, "optimizers": optimizers, "schedules": schedules}
    (cases | {"workers": workers})[sys.argv[2]]()
