"""Servers are killed at random moments: random_kill_test.py BUILD_FOLDER MODE [SEED [RUNS]].

Every complete checkpoint has the record of applied pushes (of each rank, the last step) beside its version. What a
generation makes goes on from the version that it began with, so where every push makes a version, a push that was
counted twice, or not at all, since the job's beginning shows: the version is not the number of recorded pushes.
"""

import random
import re
import sys
import time

from job import (
    EACH_PUSH_IS_A_VERSION,
    HALF,
    LOCAL_STEPS,
    MODE_FLAGS,
    TAKES_LOCAL_STEPS,
    Job,
    undisturbed,
    wait_until,
)

WORKERS, STEPS, BATCH = 4, 240, 8
RUNS = {
    "bsp": 5,
    "asp": 3,
    "ssp": 3,
    "backup": 3,
    "local_sgd": 2,
    "diloco": 2,
    "diloco_quorum": 2,
    "diloco_async": 3,
    "easgd": 2,
}
MOMENTS = ["before the first checkpoint", "while training", "while finishing"]


def pushes_of(mode):
    return STEPS // LOCAL_STEPS if mode in TAKES_LOCAL_STEPS else STEPS


def check_each_push_is_a_version(checkpoint, shard, per_push):
    ledger, version = checkpoint.ledger(shard), checkpoint.manifest["shards"][shard]["version"]
    pushes = sum(step + 1 for step, _ in ledger.values())
    where = f"{checkpoint.path.name}, shard {shard}: version {version}, record {ledger}"
    assert all(answer == "ANSWER_APPLIED" for _, answer in ledger.values()), where
    assert version == pushes, f"{where}: not one version a push"
    assert checkpoint.position(shard) == pushes * per_push, f"{where}: {checkpoint.position(shard)} samples"
    assert ledger == checkpoint.ledger(0), f"{where}: shard 0 has {checkpoint.ledger(0)}"


def check_each_push_counts(checkpoint, shard, per_push):
    """Rounds of a quorum: on all shards they are of the same pushes."""
    ledger, version = checkpoint.ledger(shard), checkpoint.manifest["shards"][shard]["version"]
    pushes = sum(step + 1 for step, _ in ledger.values())
    where = f"{checkpoint.path.name}, shard {shard}: version {version}, record {ledger}"
    assert all(answer == "ANSWER_APPLIED" for _, answer in ledger.values()), where
    assert pushes / WORKERS <= version <= pushes, where
    assert version == checkpoint.manifest["shards"][0]["version"], f"{where}: another version than shard 0's"
    assert checkpoint.position(shard) == pushes * per_push, f"{where}: {checkpoint.position(shard)} samples"
    assert ledger == checkpoint.ledger(0), f"{where}: shard 0 has {checkpoint.ledger(0)}"


def check_steps_are_versions(checkpoint, shard, mode, per_push):
    ledger, version = checkpoint.ledger(shard), checkpoint.manifest["shards"][shard]["version"]
    where = f"{checkpoint.path.name}, shard {shard}: version {version}, record {ledger}"
    assert version == checkpoint.manifest["shards"][0]["version"], f"{where}: another version than shard 0's"
    made_it = [rank for rank, push in ledger.items() if push == (version - 1, "ANSWER_APPLIED")]
    left_out = 1 if mode == "backup" else 0
    assert version == 0 or len(made_it) >= WORKERS - left_out, where
    # A worker that was left out may be a step behind or ahead in what the version counts.
    position, passed = checkpoint.position(shard), version * WORKERS * per_push
    least, most = passed - left_out * version * per_push, passed + left_out * WORKERS * per_push
    assert least <= position <= most, f"{where}: {position} samples, not {least} to {most}"


def check_records(job, mode):
    """Of every checkpoint that was complete in any generation."""
    per_push = BATCH * (LOCAL_STEPS if mode in TAKES_LOCAL_STEPS else 1)
    checkpoints, generation = job.complete(), 0
    for _, checkpoint in sorted(checkpoints.items()):
        assert checkpoint.manifest["generation"] >= generation, f"{checkpoint.path.name}: an older generation"
        generation = checkpoint.manifest["generation"]
        for shard in range(len(checkpoint.shards)):
            if mode in EACH_PUSH_IS_A_VERSION:
                check_each_push_is_a_version(checkpoint, shard, per_push)
            elif mode == "diloco_quorum":
                check_each_push_counts(checkpoint, shard, per_push)
            else:
                check_steps_are_versions(checkpoint, shard, mode, per_push)
    last = checkpoints[max(checkpoints)]
    assert last.finished(), f"{last.path.name} is not the finished job's"
    for shard in range(len(last.shards)):
        steps = {rank: step for rank, (step, _) in last.ledger(shard).items()}
        where = f"{last.path.name}, shard {shard}: {steps}"
        # In backup a worker that is left out takes up where the others are, and that may be the end.
        left_out = 1 if mode == "backup" else 0
        assert set(steps) <= set(range(WORKERS)) and max(steps.values()) == pushes_of(mode) - 1, where
        assert list(steps.values()).count(pushes_of(mode) - 1) >= WORKERS - left_out, where
    return len(checkpoints)


def wait_for(moment, job, chance):
    if moment == "before the first checkpoint":
        time.sleep(chance.uniform(0, 0.3))
    elif moment == "while training":
        wait_until("the first checkpoint", lambda: job.newest() >= 1)
        time.sleep(chance.uniform(0, 0.4))
    else:
        wait_until("a worker to be done", lambda: "is done" in job.servers[0].errors())
        time.sleep(chance.uniform(0, 0.01))


def forms_of(mode, number):
    """Flags of how a run's pushes and weights are sent. Without error feedback bsp ends in equal weights."""
    if mode == "bsp":
        return HALF if number in (1, 3) else []
    return [*HALF, "--error_feedback"] if number == 1 else []


def run(mode, chance, number):
    shards, moment = 2 + number % 2, MOMENTS[number % len(MOMENTS)]
    victims = chance.choice([[chance.randrange(shards)], [0], list(range(shards))])
    # In some runs workers have slices of a version before it is committed, which a rollback takes back.
    early = mode == "bsp" and number in (0, 1)
    form = forms_of(mode, number)
    how = " ".join([", with early slices"] * early + form)
    what = f"{mode}, {shards} servers, {victims} killed {moment}{how}"
    print(what, flush=True)
    flags = [
        *MODE_FLAGS[mode],
        "--checkpoint_every=40",
        "--keep_checkpoints=1000",
        "--lease=5s",
        "--reconnect_grace=5s",
        *(["--stream=always"] if early else []),
        *form,
    ]
    worker_flags = ["--experiment_step_time=2ms", *(["--shared_memory=off"] if early else [])]
    # All workers may have left: then nobody comes back to what is started again, and it ends after this time.
    timeout = 8 if moment == "while finishing" else 20
    flags += [f"--server_timeout={timeout}s", f"--connect_timeout={timeout}s"]
    with Job(mode, shards, steps=STEPS, workers=WORKERS, flags=flags, worker_flags=worker_flags) as job:
        job.start_workers()
        wait_for(moment, job, chance)
        job.kill_and_restart(victims, pause=chance.uniform(0, 0.2))
        for worker in job.workers:
            assert worker.end() == 0, f"{what}: {worker.errors()}"
        for server in job.servers:
            assert server.end() == 0, f"{what}: {server.errors()}"
        records = check_records(job, mode)
        back = re.findall(r"rolled back to step \d+", job.workers[0].errors())
        print(
            f"  {records} records in order; {', '.join(back) or 'the workers had not begun, or had left'}", flush=True
        )
        return what, job.weights()


if __name__ == "__main__":
    mode, seed = sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 17
    runs = int(sys.argv[4]) if len(sys.argv) > 4 else RUNS[mode]
    expected = {}
    for number in range(runs):
        what, weights = run(mode, random.Random(f"{seed} {mode} {number}"), number)
        form = tuple(forms_of(mode, number))
        if mode == "bsp" and form not in expected:
            expected[form] = undisturbed(steps=STEPS, workers=WORKERS, flags=form)
        assert expected.get(form) in (None, weights), f"{what}: the weights are not those of a run without it"
