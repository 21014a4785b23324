"""Workers that die, pause, are replaced or leave, under each --on_worker_loss: loss_test.py BUILD_FOLDER CASE."""

import json
import re
import signal
import sys
import time

from job import BIN, EACH_PUSH_COUNTS, TAKES_LOCAL_STEPS, Job, Program, undisturbed, wait_until

PACE = "--experiment_step_time=4ms"
QUICKLY = ["--reconnect_grace=100ms"]
ALL = ["bsp", "backup", "local_sgd", "diloco", "ssp", "asp", "diloco_quorum", "diloco_async", "easgd"]


def job_of(mode, shards, action, *flags, steps=None, workers=3, **options):
    """A job whose workers have something to do for a second or more, and that makes 75 versions or more."""
    steps = steps or (600 if mode in ("local_sgd", "diloco", "diloco_quorum") else 200)
    rounds = ["--local_steps=8"] if mode.startswith("diloco") else []
    rounds += ["--quorum=2"] if mode == "diloco_quorum" else []
    flags = [*rounds, f"--on_worker_loss={action}", *QUICKLY, *flags]
    return Job(mode, shards, steps=steps, flags=flags, workers=workers, worker_flags=[PACE], **options)


def trains(job, version=20, slow=None):
    """`slow` is the rank of a worker that is to be lost: it has most of its work before it when the job trains."""
    job.start_workers() if slow is None else job.start_workers({slow: ["--experiment_step_time=20ms"]})
    wait_until("training", lambda: job.version() > version)


def lost(job, rank):
    wait_until("the chief to notice", lambda: re.search(rf"rank {rank} \(.*was lost", job.servers[0].errors()))


def waits():
    """bsp: whoever takes a killed worker's rank completes its step, so the weights are those of an undisturbed job."""
    expected = undisturbed(steps=200, workers=3)
    for shards, checkpoints in [(1, False), (2, True)]:
        with job_of("bsp", shards, "wait", checkpoints=checkpoints) as job:
            trains(job, slow=1)
            job.workers[1].kill()
            lost(job, 1)
            assert re.search(r"step \d+: waiting for a worker to take rank 1 \(", job.ask("status").stdout)
            job.workers[1] = job.start_worker("replacement")
            assert job.finish() == expected


def samples_of(job):
    """That each shard has counted, by the last checkpoint."""
    last = job.complete()[job.newest()]
    assert last.finished()
    return [last.position(shard) for shard in range(job.shards)]


def samples_undisturbed(mode, flags):
    with job_of(mode, 2, "wait", *flags) as job:
        job.worker_flags = []
        job.start_workers()
        job.finish()
        return samples_of(job)


def waits_in_every_mode():
    """In the others a replacement takes the rank too, and the job comes to its end, with all of the lost one's share.

    Of the push that was under way a server may have nothing.
    """
    norms = ["--clip_norm=100"]
    for mode, *flags in [(mode,) for mode in ALL[1:]] + [("asp", *norms)]:
        with job_of(mode, 2, "wait", *flags) as job:
            trains(job, slow=1)
            job.workers[1].kill()
            lost(job, 1)
            status = job.ask("status").stdout
            assert re.search(r"waiting for a worker to take rank 1 \(", status), (mode, flags, status)
            job.workers[1] = job.start_worker("replacement")
            job.finish()
            samples = samples_of(job)
        if mode in EACH_PUSH_COUNTS:
            expected, push = samples_undisturbed(mode, flags), 64 if mode in TAKES_LOCAL_STEPS else 8
            for shard in range(2):
                assert expected[shard] - push <= samples[shard] <= expected[shard], (mode, flags, expected, samples)
            assert max(samples) == expected[0], (mode, flags, expected, samples)


def nobody_comes():
    """A rank that nobody takes in time ends the job with the rank and the flag."""
    with job_of("bsp", 1, "wait", "--replacement_timeout=500ms", checkpoints=False) as job:
        trains(job, slow=1)
        job.workers[1].kill()
        assert job.servers[0].end() == 1
        said = job.servers[0].errors()
        assert re.search(r"rank 1 \(.*\) was lost .* s ago, and no worker has taken its place", said), said
        for rank in (0, 2):
            assert job.workers[rank].end() == 1
            assert "--replacement_timeout=0.5 s" in job.workers[rank].errors()


def continues():
    """The others go on at once: each version is made of the ranks that remain, and of the same on all servers."""
    for mode in ALL:
        flags = ["--budget=job"] if mode == "bsp" else []
        with job_of(mode, 2, "continue", *flags) as job:
            trains(job, slow=1)
            job.workers[1].kill()
            job.workers.pop(1)
            job.finish()


def continues_with_the_same_sets():
    """bsp over two servers: from some version on, the same on both, steps are made of the ranks that remain."""
    with job_of("bsp", 2, "continue", checkpoints=False) as job:
        trains(job, slow=1)
        job.workers[1].kill()
        job.workers.pop(1)
        job.finish()
        sets = []
        for shard in (0, 1):
            lines = map(json.loads, (job.folder / f"server-{shard}.jsonl").read_text().splitlines())
            sets.append([line["ranks"] for line in lines if line["event"] == "apply"])
        assert sets[0] == sets[1]
        assert len(sets[0]) == 200, len(sets[0])
        without = sets[0].index([0, 2])
        assert 20 < without < 200, without
        assert all(ranks == [0, 1, 2] for ranks in sets[0][:without])
        assert all(ranks == [0, 2] for ranks in sets[0][without:])


def fails():
    """A mode that would go on does not where it is told to fail."""
    with job_of("asp", 1, "fail", steps=100000, checkpoints=False) as job:
        trains(job)
        job.workers[1].kill()
        assert job.servers[0].end() == 1
        assert re.search(r"the job failed: rank 1 \(.*was lost", job.servers[0].errors())


def pauses():
    """A worker that was stopped for longer than its lease finds out, joins again, and the job ends with all ranks."""
    for mode, shards, checkpoints in [("bsp", 1, False), ("bsp", 2, True), ("asp", 2, False), ("local_sgd", 1, True)]:
        with job_of(mode, shards, "continue", "--lease=500ms", steps=1200, checkpoints=checkpoints) as job:
            trains(job)
            job.workers[1].process.send_signal(signal.SIGSTOP)
            lost(job, 1)
            job.workers[1].process.send_signal(signal.SIGCONT)
            job.finish()
            said = job.workers[1].errors()
            assert re.search(r"fenced: rank 1, incarnation 1 .*joining again as ", said), said
            assert re.search(r"joined again as rank 1, incarnation 2, at step \d+; going on", said), said


def pauses_and_waits():
    """bsp that waits for it: the weights are those of an undisturbed job."""
    with job_of("bsp", 2, "wait", "--lease=500ms", checkpoints=False) as job:
        trains(job)
        job.workers[1].process.send_signal(signal.SIGSTOP)
        lost(job, 1)
        job.workers[1].process.send_signal(signal.SIGCONT)
        assert job.finish() == undisturbed(steps=200, workers=3)


def ends_for_its_successor():
    """A stopped worker whose rank another one has taken ends, and names it; with --rejoin=false it ends in any case."""
    with job_of("bsp", 1, "wait", "--lease=500ms", steps=600, checkpoints=False) as job:
        trains(job)
        paused = job.workers[1]
        paused.process.send_signal(signal.SIGSTOP)
        lost(job, 1)
        job.workers[1] = job.start_worker("replacement", "--name=successor")
        wait_until("the successor", lambda: "rank 1 of 3" in job.workers[1].errors())
        paused.process.send_signal(signal.SIGCONT)
        assert paused.end() == 1
        said = paused.errors().splitlines()[-1]
        assert re.search(r"joining again: .*rank 1 \(successor on .*\), incarnation 2, has this worker's rank", said), (
            said
        )
        job.finish()
    with job_of("asp", 1, "continue", "--lease=500ms", steps=2000, checkpoints=False) as job:
        job.worker_flags.append("--rejoin=false")
        trains(job)
        paused = job.workers.pop(1)
        paused.process.send_signal(signal.SIGSTOP)
        lost(job, 1)
        paused.process.send_signal(signal.SIGCONT)
        assert paused.end() == 1
        assert "fenced: rank 1, incarnation 1" in paused.errors().splitlines()[-1]
        job.finish()


def leaves():
    """SIGTERM, or ps_ctl drain: the worker ends its step and leaves with status 0, and nobody waits for its lease."""
    for ask in ["signal", "rank", "name"]:
        with job_of("bsp", 2, "wait", checkpoints=ask == "rank") as job:
            if ask == "name":
                job.start_workers = lambda flags, job=job: job.workers.extend(
                    job.start_worker(f"worker-{rank}", f"--rank={rank}", f"--name=w{rank}", *flags.get(rank, ()))
                    for rank in range(3)
                )
            trains(job, slow=1)
            if ask == "signal":
                job.workers[1].process.send_signal(signal.SIGTERM)
            else:
                drained = job.ask("drain", "1" if ask == "rank" else "w1")
                assert drained.returncode == 0, drained.stderr
                assert re.match(r"rank 1 \(.* on .*\) is asked to leave\n", drained.stdout)
            began = time.monotonic()
            assert job.workers[1].end() == 0, job.workers[1].errors()
            assert re.search(r"leaving the job at step \d+, as asked", job.workers[1].errors())
            assert not job.workers[1].out.read_text()
            wait_until("the chief to know", lambda: "left: asked to, before its step" in job.servers[0].errors())
            assert time.monotonic() - began < 8, "somebody waited for the lease"
            job.workers[1] = job.start_worker("replacement")
            assert job.finish() == undisturbed(steps=200, workers=3)
    with job_of("bsp", 1, "fail", checkpoints=False) as job:
        trains(job, slow=1)
        refused = job.ask("drain", "1")
        assert refused.returncode == 1
        assert "would fail without it (--on_worker_loss=fail)" in refused.stderr, refused.stderr
        job.finish()
    with job_of("asp", 1, "continue", checkpoints=False) as job:
        trains(job, slow=1)
        unknown = job.ask("drain", "7")
        assert unknown.returncode == 1
        assert re.search(r"no worker has the name or rank 7; there are: rank 0 \(.*\), rank 1 \(", unknown.stderr)
        job.finish()


def leaves_a_step_that_waits():
    """A worker that is to leave while its step waits for a lost one leaves without it, also where ps_ctl drain asks."""
    with job_of("bsp", 1, "wait", workers=3, checkpoints=False) as job:
        trains(job)
        job.workers[1].kill()
        lost(job, 1)
        wait_until("the step to wait", lambda: "waiting for a worker to take rank 1" in job.ask("status").stdout)
        job.workers[0].process.send_signal(signal.SIGTERM)
        assert job.ask("drain", "2").returncode == 0
        for rank in (0, 2):
            assert job.workers[rank].end() == 0, job.workers[rank].errors()
            assert "leaving the job without it" in job.workers[rank].errors(), job.workers[rank].errors()
        for rank in range(3):
            job.workers[rank] = job.start_worker(f"replacement-{rank}")
        assert job.finish() == undisturbed(steps=200, workers=3)


def waits_twice():
    """A rank that is lost again, after its new owner has made steps, is waited for as long as at first."""
    flags = ["wait", "--replacement_timeout=3s"]
    expected = undisturbed(steps=1500, workers=2)
    with job_of("bsp", 1, *flags, steps=1500, workers=2, checkpoints=False) as job:
        trains(job, slow=1)
        for loss in range(2):
            job.workers[1].kill()
            wait_until("the loss", lambda loss=loss: job.servers[0].errors().count("is kept for another") > loss)
            assert job.servers[0].runs(), job.servers[0].errors()
            lost_at, version = time.monotonic(), job.version()
            job.workers[1] = job.start_worker(f"replacement-{loss}", "--rank=1")
            wait_until("more steps", lambda version=version: job.version() > version + 20)
            # Longer than the first wait would have been.
            wait_until("the time to pass", lambda lost_at=lost_at: time.monotonic() > lost_at + 3.2)
        assert job.finish() == expected


def leaves_after_its_round():
    """A worker that is to leave while it computes, and waits for nobody, ends its round however long that takes.

    Of a model in fragments one is exchanged then; what is lost of the others is said.
    """
    lost_samples = "had learnt from 240 samples of those parts of the model that are exchanged later is lost"  # 30 * 8.
    for mode, flags, said in (
        ("local_sgd", ["--local_steps=60"], False),
        ("diloco", ["--local_steps=60", "--fragments=2"], True),
    ):
        with Job(mode, 1, steps=1000, flags=flags, workers=1, checkpoints=False) as job:
            metrics = job.folder / "worker.jsonl"
            job.workers = [job.start_worker("worker-0", "--experiment_step_time=200ms", f"--metrics_file={metrics}")]
            wait_until("training", lambda file=metrics: file.exists() and '"event":"step"' in file.read_text())
            job.workers[0].process.send_signal(signal.SIGTERM)
            assert job.workers[0].end() == 0, job.workers[0].errors()
            assert "leaving the job at step 1, as asked" in job.workers[0].errors(), job.workers[0].errors()
            assert (lost_samples in job.workers[0].errors()) == said, job.workers[0].errors()


def newcomer():
    """A replacement that is told only the address takes model, data and flags from the job, and completes it."""
    expected = undisturbed(steps=200, workers=3)
    for checkpoints in (False, True):
        with job_of("bsp", 2, "wait", checkpoints=checkpoints) as job:
            trains(job, slow=1)
            job.workers[1].kill()
            lost(job, 1)
            command = [str(BIN / "ps_worker"), f"--server={job.addresses[0]}"]
            job.workers[1] = Program(job.folder, "newcomer", command)
            wait_until("the newcomer", lambda: "rank 1 of 3" in job.workers[1].errors())
            assert "taken from the job: --batch_size=8 --dataset=synthetic:" in job.workers[1].errors()
            assert job.finish() == expected
    with job_of("asp", 1, "wait", checkpoints=False) as job:
        trains(job, slow=1)
        job.workers[1].kill()
        lost(job, 1)
        other = Program(job.folder, "other", [str(BIN / "ps_worker"), f"--server={job.addresses[0]}", "--seed=7"])
        assert other.end() == 1
        assert "--seed=7 (the job has 1)" in other.errors(), other.errors()
        job.workers[1] = job.start_worker("replacement")
        job.finish()


def newcomer_of_a_restored_job():
    """What each worker was started with is part of a checkpoint."""
    with job_of("bsp", 1, "wait") as job:
        job.workers = [job.start_worker(f"worker-{rank}", f"--rank={rank}") for rank in (0, 2)]
        job.workers.insert(1, job.start_worker("worker-1", "--rank=1", f"--save_weights={job.folder}/saved"))
        wait_until("a checkpoint of training", lambda: job.newest() >= 2)
        job.workers[1].kill()
        job.servers[0].kill()
        job.servers[0] = job.start_server(0)
        wait_until("the others", lambda: job.servers[0].errors().count("joined (2 of 3)") == 2)
        command = [str(BIN / "ps_worker"), f"--server={job.addresses[0]}"]
        job.workers[1] = Program(job.folder, "newcomer", command)
        job.finish()
        taken = re.search(r"taken from the job: (.*)", job.workers[1].errors())[1]
        assert f"--save_weights={job.folder}/saved" in taken, taken


def leaves_a_job_that_went_back():
    """A worker that is asked to leave, and whose job has gone back to a checkpoint meanwhile, has left well."""
    with job_of("bsp", 1, "wait") as job:
        job.start_workers()
        wait_until("a checkpoint of training", lambda: job.newest() >= 2)
        leaving = job.workers.pop(1)
        leaving.process.send_signal(signal.SIGSTOP)
        job.servers[0].kill()
        job.servers[0] = job.start_server(0)
        wait_until("the others", lambda: job.servers[0].errors().count("joined (2 of 3)") == 2)
        leaving.process.send_signal(signal.SIGTERM)
        leaving.process.send_signal(signal.SIGCONT)
        assert leaving.end() == 0, leaving.errors()
        job.workers.append(job.start_worker("replacement"))
        assert job.finish() == undisturbed(steps=200, workers=3)


def suspended_server():
    """A server that stands still for most of a lease loses no worker: their heartbeats could not be heard."""
    with job_of("bsp", 1, "fail", "--lease=1s", checkpoints=False) as job:
        trains(job)
        job.servers[0].process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)
        job.servers[0].process.send_signal(signal.SIGCONT)
        assert job.finish() == undisturbed(steps=200, workers=3)


def nobody_comes_after_a_rollback():
    """A worker that dies together with its server is waited for as long as one that dies alone, and is named."""
    for action, flags, said in [
        ("wait", ["--replacement_timeout=1s"], r"rank 1 did not come back within 1(\.\d)? s, nor did another worker"),
        ("fail", ["--server_timeout=4s"], r"rank 1 did not come back within 4(\.\d)? s \(--server_timeout\)"),
    ]:
        with job_of("bsp", 1, action, *flags) as job:
            job.start_workers()
            wait_until("a checkpoint of training", lambda job=job: job.newest() >= 2)
            job.servers[0].kill()
            job.workers.pop(1).kill()
            job.servers[0] = job.start_server(0)
            for program in job.servers + job.workers:
                assert program.end() == 1, program.errors()
                assert re.search(said, program.errors()), program.errors()


def newcomer_comes_first():
    """After a rollback a newcomer may get the rank of a worker that comes back later: that one takes another."""
    with job_of("bsp", 1, "wait") as job:
        job.start_workers()
        wait_until("a checkpoint of training", lambda: job.newest() >= 2)
        job.workers[2].kill()
        job.workers[0].process.send_signal(signal.SIGSTOP)
        job.servers[0].kill()
        job.servers[0] = job.start_server(0)
        command = [str(BIN / "ps_worker"), f"--server={job.addresses[0]}"]
        job.workers[2] = Program(job.folder, "newcomer", command)
        wait_until("the newcomer", lambda: "rank 0 of 3" in job.workers[2].errors())
        wait_until("the other worker", lambda: job.workers[1].errors().count("rank 1 of 3") == 2)
        job.workers[0].process.send_signal(signal.SIGCONT)
        assert job.finish() == undisturbed(steps=200, workers=3)
        assert "rank 2 of 3" in job.workers[0].errors(), job.workers[0].errors()


def notices_in_a_long_round():
    """A round that would last for many minutes ends at once when the job does, or when it goes back."""
    rounds = ["--local_steps=100000"]
    for mode, *more in [("diloco",), ("diloco_quorum", "--quorum=2"), ("diloco_async",)]:
        with Job(
            mode, 1, steps=100000, flags=[*rounds, *more, *QUICKLY, "--on_worker_loss=fail"], worker_flags=[PACE]
        ) as job:
            files = {rank: job.folder / f"worker-{rank}.jsonl" for rank in range(job.num_workers)}
            job.start_workers({rank: [f"--metrics_file={file}"] for rank, file in files.items()})
            for file in files.values():
                wait_until("its first batch", lambda file=file: file.exists() and '"step"' in file.read_text())
            job.kill_and_restart([0])
            for worker in job.workers:
                wait_until("it to go back", lambda worker=worker: "rolled back to step 0" in worker.errors())
            job.workers[1].kill()
            assert job.servers[0].end() == 1
            assert job.workers[0].end() == 1
            said = job.workers[0].errors()
            assert re.search(
                r"what this worker had learnt from \d+ samples since its last exchange is dropped", said
            ), said
            assert "the job failed: rank 1" in said, said


if __name__ == "__main__":
    {
        "waits": waits,
        "waits_in_every_mode": waits_in_every_mode,
        "nobody_comes": nobody_comes,
        "continues": continues,
        "same_sets": continues_with_the_same_sets,
        "fails": fails,
        "pauses": pauses,
        "pauses_and_waits": pauses_and_waits,
        "ends_for_its_successor": ends_for_its_successor,
        "leaves": leaves,
        "leaves_a_step_that_waits": leaves_a_step_that_waits,
        "waits_twice": waits_twice,
        "leaves_after_its_round": leaves_after_its_round,
        "newcomer": newcomer,
        "newcomer_of_a_restored_job": newcomer_of_a_restored_job,
        "newcomer_comes_first": newcomer_comes_first,
        "nobody_comes_after_a_rollback": nobody_comes_after_a_rollback,
        "leaves_a_job_that_went_back": leaves_a_job_that_went_back,
        "suspended_server": suspended_server,
        "notices_in_a_long_round": notices_in_a_long_round,
    }[sys.argv[2]]()
