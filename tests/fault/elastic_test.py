"""Jobs in which workers come and go, --min_workers and --max_workers: elastic_test.py BUILD_FOLDER CASE."""

import json
import re
import signal
import sys
import time

from job import BATCH_SIZE, EACH_PUSH_IS_A_VERSION, SAMPLES, Job, wait_until

QUICKLY = ["--budget=job", "--reconnect_grace=100ms"]
EACH_BATCH_IS_A_VERSION = ("asp", "ssp")
WAITS = "training waits for 1 more worker (1 of at least 2 (--min_workers) is there)"
EPOCHS = 2
RUNS = EPOCHS * SAMPLES // BATCH_SIZE


def elastic(mode, shards, *flags, **options):
    """A job that begins with two workers, may have one to four, and trains for some seconds."""
    rounds = ["--local_steps=4"] if mode.startswith("diloco") or mode in ("local_sgd", "easgd") else []
    rounds += ["--quorum=2"] if mode == "diloco_quorum" else []
    limits = [] if any("max_workers" in flag for flag in flags) else ["--min_workers=1", "--max_workers=4"]
    worker_flags = [f"--epochs={EPOCHS}", "--experiment_step_time=20ms"]
    return Job(mode, shards, steps=0, flags=[*rounds, *QUICKLY, *limits, *flags], worker_flags=worker_flags, **options)


def add(job, name, *flags):
    job.workers.append(job.start_worker(name, *flags))
    return job.workers[-1]


def takes_part(job, worker):
    """It has got runs of the job's samples."""
    wait_until("a worker to join", lambda: re.search(r"rank \d+ of \d+ as", worker.errors()))
    rank = int(re.search(r"rank (\d+) of \d+ as", worker.errors())[1])
    wait_until("its first run", lambda: any(run["worker"] == rank for run in records(job, "run")))
    return rank


def records(job, event, last_start=False):
    """Lines of the chief's metrics file, but for one that is being written; all, or since it was last started."""
    lines = (job.folder / "server-0.jsonl").read_text().splitlines(keepends=True)
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    starts = [number for number, value in enumerate(values) if value["event"] == "start"]
    return [value for value in values[starts[-1] if last_start else 0 :] if value["event"] == event]


def check_each_batch_counts_once(job):
    """What was dealt less what came back is each run once, and the last checkpoint knows of none that is left.

    Each shard has counted each sample, but for those of pushes that did not come to it before their worker was lost.
    """
    counts = [0] * RUNS
    for run in records(job, "run"):
        counts[run["run"]] += -1 if run["returned"] else 1
    assert counts == [1] * RUNS, {run: count for run, count in enumerate(counts) if count != 1}
    last = job.complete()[job.newest()]
    assert last.finished()
    state = last.manifest["state"]["runs"]
    assert (state["next"], state["returned"]) == (RUNS, []), state
    counted = [last.position(shard) for shard in range(job.shards)]
    # What was late in backup is told with the next version, which does not come at the end.
    late = [answer for _, answer in last.ledger(0).values()].count("ANSWER_STALE") if job.mode == "backup" else 0
    # One that was refused and came back since its worker was lost has passed twice.
    again = sum(run["returned"] for run in records(job, "run")) if job.mode == "backup" else 0
    most = EPOCHS * SAMPLES + again * BATCH_SIZE
    assert EPOCHS * SAMPLES - late * BATCH_SIZE <= max(counted) <= most, counted
    assert job.mode in EACH_PUSH_IS_A_VERSION or len(set(counted)) == 1, counted
    return last


def come_and_go(modes=("bsp", "asp", "ssp", "backup")):
    """Two more, one is asked to leave, one is killed, another one comes; nobody waits for them."""
    for number, mode in enumerate(modes):
        with elastic(mode, 1 + number % 2) as job:
            job.start_workers()
            wait_until("training", lambda job=job: job.version() > 3)
            for name in ("third", "fourth"):
                takes_part(job, add(job, name))
            status = job.ask("status").stdout
            assert "workers: 4 of 1 to 4" in status
            assert re.search(rf"samples of epoch 1 of {EPOCHS}: \d+ of {SAMPLES} counted, \d+ handed out", status), (
                status
            )
            job.workers[0].process.send_signal(signal.SIGTERM)
            assert job.workers.pop(0).end() == 0
            job.workers.pop(1).kill()  # The third.
            takes_part(job, add(job, "fifth"))
            job.finish()
            last = check_each_batch_counts_once(job)
            if mode in EACH_BATCH_IS_A_VERSION:
                assert [shard["version"] for shard in last.manifest["shards"]] == [RUNS] * job.shards, mode


def nobody_waits_for_a_newcomer():
    """It contributes nothing to the step that the others are at, whatever it does, and trains from the next one on."""
    for number, mode in enumerate(("bsp", "local_sgd", "diloco")):
        with elastic(mode, 1 + number % 2, "--on_worker_loss=continue") as job:
            job.start_workers()
            wait_until("training", lambda job=job: job.version() > 3)
            newcomer = add(job, "third", "--experiment_step_time=10m")
            rank = takes_part(job, newcomer)
            step = int(re.search(rf"rank {rank} .*starts at step (\d+)", job.servers[0].errors())[1])
            # Over its first batch it idles, so the step after is the first that waits for it.
            wait_until("the step that it came to", lambda job=job, step=step: job.version() == step + 1)
            newcomer.kill()
            job.workers.remove(newcomer)
            job.finish()
            check_each_batch_counts_once(job)


def come_and_go_with_local_steps():
    come_and_go(("local_sgd", "diloco", "diloco_quorum", "diloco_async", "easgd"))


def waits_below_the_least():
    """With fewer than --min_workers no step is made, and nobody is taken for late; with another worker it goes on."""
    for mode in ("bsp", "asp", "local_sgd"):
        flags = ["--min_workers=2", "--max_workers=3", "--progress_timeout=2s", "--lease=2s"]
        with elastic(mode, 2, *flags) as job:
            job.start_workers()
            wait_until("training", lambda job=job: job.version() > 3)
            job.workers.pop(1).kill()
            wait_until("the wait", lambda job=job: WAITS in job.servers[0].errors())
            wait_until("the worker's last push", lambda job=job: WAITS in job.workers[0].errors())
            version = job.version()
            time.sleep(2.5)  # Longer than --progress_timeout.
            assert job.version() == version
            assert WAITS in job.ask("status").stdout
            assert job.ask("checkpoint").returncode == 0, "no version is waited for"
            takes_part(job, add(job, "another"))
            job.finish()
            check_each_batch_counts_once(job)


def nobody_comes():
    """A job that has too few for too long takes a checkpoint and fails; started again it goes on from there."""
    flags = ["--min_workers=2", "--max_workers=3", "--replacement_timeout=1s"]
    for mode in ("bsp", "asp"):
        with elastic(mode, 2, "--checkpoint_every=1h", *flags) as job:
            job.start_workers()
            wait_until("training", lambda job=job: job.version() > 20)
            job.workers.pop(1).kill()
            assert job.servers[0].end() == 1
            assert "the job failed: " + WAITS.replace("waits", "has waited") in job.servers[0].errors()
            assert "(--replacement_timeout=1.0 s)" in job.servers[0].errors()
            assert job.servers[1].end() == job.workers.pop().end() == 1
            saved = job.complete()[job.newest()].manifest
            assert min(shard["version"] for shard in saved["shards"]) > 20, saved
            for shard in range(2):
                job.servers[shard] = job.start_server(shard)
            add(job, "one")
            add(job, "two")
            job.finish()
            runs = saved["state"]["runs"]
            left = [*runs["returned"], *range(runs["next"], RUNS)]
            assert sorted(run["run"] for run in records(job, "run", last_start=True)) == sorted(left)
            assert job.complete()[job.newest()].manifest["state"]["runs"]["next"] == RUNS


def stands_by():
    """A worker beyond --max_workers waits, and takes the place of one that is lost; the next in line moves up."""
    with elastic("bsp", 1, "--min_workers=1", "--max_workers=2", "--max_standbys=2") as job:
        job.start_workers()
        wait_until("training", lambda: job.version() > 3)
        for number, name in enumerate(("next", "last")):
            add(job, name, f"--name={name}")
            wait_until("it to stand by", lambda n=number: f"{n + 1} standing by" in job.ask("status").stdout)
        add(job, "refused")
        refused = job.workers.pop()
        assert refused.end() == 1
        why = "the job has all of its workers (--max_workers=2), and 2 more stand by (--max_standbys)"
        assert refused.errors().splitlines()[-1] == f"ps_worker: {why}", refused.errors()
        job.workers.pop(1).kill()
        wait_until("the next", lambda: "rank 1 (next on" in job.servers[0].errors())
        assert "last on" not in job.servers[0].errors()
        assert "workers: 2 of 1 to 2, 1 standing by" in job.ask("status").stdout
        job.workers.pop(0).kill()
        wait_until("the last", lambda: "rank 0 (last on" in job.servers[0].errors())
        job.finish()
        check_each_batch_counts_once(job)


def all_leave():
    """Nobody is there for a while, as where all spot machines are taken away at once; then two others come."""
    for mode in ("bsp", "asp"):
        with elastic(mode, 1) as job:
            job.start_workers()
            wait_until("training", lambda job=job: job.version() > 3)
            job.workers.pop(1).kill()
            job.workers[0].process.send_signal(signal.SIGTERM)
            assert job.workers.pop(0).end() == 0
            wait_until("the wait", lambda job=job: "training waits for 1 more worker (0 of" in job.servers[0].errors())
            add(job, "third")
            add(job, "fourth")
            job.finish()
            check_each_batch_counts_once(job)


CASES = [
    come_and_go,
    come_and_go_with_local_steps,
    nobody_waits_for_a_newcomer,
    waits_below_the_least,
    nobody_comes,
    stands_by,
    all_leave,
]

if __name__ == "__main__":
    {case.__name__: case for case in CASES}[sys.argv[2]]()
