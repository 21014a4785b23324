"""The client goes on with a job whose servers were killed and came back with a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import psgrad
from psgrad.data import Batches
from server_processes import Restartable

LAYOUT = [psgrad.Tensor("w", (3, 4)), psgrad.Tensor("b", (4,))]
SGD = psgrad.OptimizerSettings("momentum", {"learning_rate": 0.125, "momentum": 0.5})
STEPS = 40


def arrays(value: float) -> list[Any]:
    """One for each tensor of LAYOUT."""
    return [np.full(tensor.shape, value, np.float32) for tensor in LAYOUT]


def join(address: str, **options: Any) -> psgrad.Client:
    """A member of the job."""
    return psgrad.Client.join(address, LAYOUT, **{"optimizer": SGD, **options})


def train(client: psgrad.Client, at: dict[int, Any], steps: int = STEPS) -> tuple[str, list[Any]]:
    """Makes the steps; before each that `at` names, once, it calls that. The hash, and results of rollbacks."""
    weights = arrays(0)
    result = client.start(arrays(1), weights)
    back = []
    while result.next_step < steps:
        step = result.next_step
        if step in at:
            at.pop(step)()
        result = client.push_pull(step, arrays(np.sin(step)), weights, version=result.version)
        if not result.answers:
            back.append(result)
            assert client.rolled_back_to == result.next_step == result.version <= step
            assert client.rollbacks == len(back)
        else:
            assert client.rolled_back_to is None
    return client.weights_hash(), back


def undisturbed(folder: Any) -> str:
    """The hash of the same training on one server without checkpoints."""
    servers = Restartable(folder)
    try:
        client = join(servers.start(1, keeps=False))
        weights_hash, _ = train(client, {})
        client.done()
        client.leave()
        return weights_hash
    finally:
        servers.end()


@pytest.mark.parametrize(("shards", "killed"), [(1, [0]), (2, [0]), (2, [1]), (2, [1, 0])])
def test_the_result_is_that_of_an_undisturbed_run(
    restartable: Restartable, tmp_path: Any, shards: int, killed: list[int]
) -> None:
    """In bsp, where the loop goes on at next_step."""

    def kill() -> None:
        for shard in killed:
            restartable.kill(shard)
        for shard in sorted(killed):
            restartable.start_again(shard)

    client = join(restartable.start(1, shards=shards))
    assert client.server_timeout == 60
    generation = client.generation
    weights_hash, back = train(client, {23: kill})
    assert len(back) == 1
    assert client.generation > generation
    assert client.start_step == back[0].next_step
    client.done()
    client.leave()
    assert restartable.wait() == [0] * shards
    assert weights_hash == undisturbed(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_groups_have_is_part_of_a_checkpoint(restartable: Restartable, tmp_path: Any, shards: int) -> None:
    """It is told once, and not again after the rollback: neither what the join brought nor what a push has told."""
    layout = [psgrad.Tensor("w", (3, 4), group=1), psgrad.Tensor("b", (4,), learning_rate_factor=0.5, group=2)]
    settings = psgrad.OptimizerSettings("momentum", {"learning_rate": 0.125}, groups=[{"momentum": 0.25}])
    told = {5: [{"weight_decay": 0.01}, {"momentum": 0.75, "learning_rate": 0.0625}, {"learning_rate": 0.5}]}

    def trained(address: str, at: dict[int, Any], tells: dict[int, Any]) -> tuple[str, list[Any]]:
        client = psgrad.Client.join(address, layout, optimizer=settings)
        weights = arrays(0)
        result = client.start(arrays(1), weights)
        while result.next_step < STEPS:
            step = result.next_step
            at.pop(step, lambda: None)()
            result = client.push_pull(
                step, arrays(np.sin(step)), weights, version=result.version, groups=tells.get(step)
            )
            assert result.answers or result.version >= 10
        rollbacks = [client.rollbacks]
        weights_hash = client.weights_hash()
        client.done()
        client.leave()
        return weights_hash, rollbacks

    def kill() -> None:
        for shard in range(shards):
            restartable.kill(shard)
        for shard in range(shards):
            restartable.start_again(shard)

    disturbed, rollbacks = trained(restartable.start(1, shards=shards), {23: kill}, told)
    assert rollbacks == [1]
    assert restartable.wait() == [0] * shards
    hashes = []
    for tells in (told, {}):
        servers = Restartable(tmp_path)
        try:
            hashes.append(trained(servers.start(1, keeps=False), {}, tells)[0])
        finally:
            servers.end()
    assert disturbed == hashes[0] != hashes[1]


def test_two_rollbacks_and_a_wait_for_a_server_are_said(
    restartable: Restartable, caplog: pytest.LogCaptureFixture
) -> None:
    """What is waited for, and where it goes on."""
    caplog.set_level(logging.INFO, "psgrad")

    def kill() -> None:
        restartable.kill()
        threading.Timer(3.5, restartable.start_again).start()

    client = join(restartable.start(1), notice_every=0.5)
    _, back = train(client, {12: kill, 33: kill})
    assert len(back) == 2
    client.done()
    client.leave()
    assert "waiting for it to come back" in caplog.text
    assert f"the job was rolled back: joining it again as {client.name}, rank 0" in caplog.text
    assert f"rolled back to step {back[1].next_step} (version {back[1].version}); going on" in caplog.text


def test_batches_of_a_client_rewind(restartable: Restartable) -> None:
    """Without an optimizer."""
    client = join(restartable.start(1))
    weights = arrays(0)
    result = client.start(arrays(1), weights)
    seen: list[tuple[int, list[int]]] = []
    kill = [lambda: (restartable.kill(), restartable.start_again())]
    for batch in Batches(range(60), client, batch_size=4, epochs=2, shuffle=False, collate=list):
        step = result.next_step
        if step == 17 and kill:
            kill.pop()()
        result = client.push_pull(step, arrays(1), weights, version=result.version)
        seen.append((step, batch))
    assert not kill
    assert len(seen) > 30
    assert all(batch == list(range(4 * (step % 15), 4 * (step % 15) + 4)) for step, batch in seen)
    assert result.next_step == 30


@pytest.mark.parametrize(
    ("mode", "shards", "killed"), [("bsp", 1, 0), ("bsp", 2, 1), ("asp", 1, 0), ("asp", 2, 1), ("ssp", 1, 0)]
)
@pytest.mark.parametrize("at", [0, 17, 30])
def test_batches_of_a_client_take_the_runs_that_are_handed_out_again(
    restartable: Restartable, mode: str, shards: int, killed: int, at: int
) -> None:
    """With --budget=job, and where it is taking a run that notices the rollback: also the first and the last one."""
    client = join(restartable.start(1, "--budget=job", shards=shards, mode=mode))
    weights = arrays(0)
    result = client.start(arrays(1), weights)
    generation = client.generation
    kill = [lambda: (restartable.kill(killed), restartable.start_again(killed))]
    used: list[list[int]] = []  # By step, of the pushes that the job has.
    back = []

    def kill_at(step: int) -> None:
        if step == at and kill:
            kill.pop()()

    batches = Batches(
        range(60), client, batch_size=4, epochs=2, shuffle=False, collate=list, empty_step=lambda: pytest.fail("alone")
    )
    kill_at(0)
    for batch in batches:
        result = client.push_pull(result.next_step, arrays(1), weights, version=result.version)
        if result.answers:
            used.append(batch)
            kill_at(len(used))
        else:
            back.append(result.next_step)
            del used[result.next_step :]
    assert len(back) == client.rollbacks == 1
    assert client.generation > generation
    assert sorted(used) == sorted([list(range(4 * run, 4 * run + 4)) for run in range(15)] * 2)
    client.done()
    client.leave()
    assert restartable.wait() == [0] * shards


def test_runs_that_are_taken_one_by_one_are_counted_anew(restartable: Restartable) -> None:
    """Without Batches: take_run raises, and pull joins again."""
    client = join(restartable.start(1, "--budget=job", every="1000000"))
    weights = arrays(0)
    result = client.start(arrays(1), weights)
    for number in (1, 2):
        assert client.take_run(number, number - 1, samples=12, batch_size=4, runs=3) == number - 1
        client.use_runs(number)
        result = client.push_pull(result.next_step, arrays(1), weights, version=result.version)
    restartable.kill()
    restartable.start_again()
    with pytest.raises(psgrad.RolledBack):
        client.take_run(3, 2, samples=12, batch_size=4, runs=3)
    assert client.rolled_back_to is None
    assert client.pull(weights).version == client.rolled_back_to == 0
    assert client._used_runs == 0  # A push that comes before use_runs() is made with none of this generation's.
    assert client.take_run(1, 0, samples=12, batch_size=4, runs=3) == 0


def test_a_push_of_a_step_that_is_not_made_now_is_an_error(restartable: Restartable) -> None:
    client = join(restartable.start(1))
    weights = arrays(0)
    client.start(arrays(1), weights)
    for step in range(15):
        client.push_pull(step, arrays(1), weights, version=step)
    restartable.kill()
    restartable.start_again()
    back = client.push(15, arrays(1), version=15)  # Without weights to pull.
    assert not back.answers
    assert back.next_step < 15
    with pytest.raises(ValueError, match=rf"a push of step 16, .* rolled back to step {back.next_step}"):
        client.push(16, arrays(1), version=16)
    assert client.pull(weights).version == back.version
    assert client.push(back.next_step, arrays(1), version=back.version).answers == ["applied"]


def test_done_says_that_steps_are_to_be_made_again(restartable: Restartable) -> None:
    """One of two workers is done when the server dies."""
    address = restartable.start(2, every="1000000")
    ended: list[str] = []

    def work(rank: int) -> None:
        client = join(address, rank=rank)
        at = {12: lambda: (restartable.kill(), restartable.start_again())} if rank == 0 else {}
        weights = arrays(0)
        result = client.start(arrays(1), weights)
        steps = 15 if rank == 0 else 10
        while True:
            while result.next_step < steps:
                step = result.next_step
                if step in at:
                    at.pop(step)()
                result = client.push_pull(step, arrays(1), weights, version=result.version)
            try:
                client.done(counts_as_empty=True)
                break
            except psgrad.RolledBack as error:
                ended.append(str(error))
                result = client.pull(weights)
                assert client.rolled_back_to == 0
                result = client.push_pull(0, arrays(1), weights, version=0)
        client.leave()

    workers = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert ended == [
        "rank 1: the job was rolled back to step 0, and this worker had made 10 steps and was done: it has to make the "
        "others again from there"
    ]


def test_without_checkpoints_a_killed_server_is_the_end(restartable: Restartable) -> None:
    client = join(restartable.start(1, keeps=False), connect_timeout=1.0)
    assert client.server_timeout == 0
    with pytest.raises(psgrad.Unavailable, match=r"--connect_timeout"):
        train(client, {5: restartable.kill})
    assert client.rollbacks == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_server_that_does_not_come_back_is_given_up_by_name(restartable: Restartable, shards: int) -> None:
    client = join(restartable.start(1, "--server_timeout=2s", shards=shards), connect_timeout=5.0)
    started = time.monotonic()
    with pytest.raises(psgrad.Error, match=r"--server_timeout") as error:
        train(client, {5: lambda: restartable.kill(shards - 1)})
    assert restartable.addresses[-1] in str(error.value) or f"shard {shards - 1}" in str(error.value)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("shards", [1, 2])
def test_ctrl_c_ends_the_wait_for_a_server(restartable: Restartable, shards: int) -> None:
    """On one server it is the exchange that waits; on two, whose chief lives, the join."""
    client = join(restartable.start(1, shards=shards), notice_every=0.2)

    def kill() -> None:
        restartable.kill(shards - 1)
        threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(client, {5: kill})
    assert 3.5 < time.monotonic() - started < 15
    with pytest.raises(psgrad.Cancelled):
        client.push(5, arrays(1))
    client.close()


def test_another_job_in_its_place_refuses_the_worker(restartable: Restartable) -> None:
    client = join(restartable.start(1))

    def replace() -> None:
        restartable.kill()
        restartable.start_again(0, "--restore=none", "--optimizer=adam")

    with pytest.raises(psgrad.Refused, match="optimizer"):
        train(client, {5: replace})
