"""Numbers of all workers, between clients of real servers."""

from __future__ import annotations

import math
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psgrad
from server_processes import Restartable, ServerProcesses

LAYOUT = [psgrad.Tensor("w", (3, 4))]
SGD = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5})
WAIT_S = 30.0


def arrays(value: float) -> list[Any]:
    """The one tensor of LAYOUT."""
    return [np.full((3, 4), value, np.float32)]


def join(address: str, **options: Any) -> psgrad.Client:
    return psgrad.Client.join(address, LAYOUT, optimizer=SGD, **options)


def members(address: str, count: int, **options: Any) -> list[psgrad.Client]:
    """By rank, of a job that runs."""
    clients = together([lambda: join(address, **options)] * count)
    together([lambda client=client: client.start(arrays(1), arrays(0)) for client in clients])
    return sorted(clients, key=lambda client: client.rank)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, or the first exception."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]
    return results


def await_true(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def leave_all(clients: list[psgrad.Client]) -> None:
    for client in clients:
        client.close()


def test_numbers_sequences_and_arrays_come_back_as_what_they_were(servers: ServerProcesses) -> None:
    clients = members(servers.start(3, mode="asp"), 3)

    def of_all(call: Callable[[psgrad.Client, float], Any]) -> Any:
        one, *others = together([lambda client=client: call(client, client.rank + 1.0) for client in clients])
        for other in others:
            np.testing.assert_equal(other, one)
        return one

    assert of_all(lambda client, x: client.all_sum(x)) == 6.0
    assert of_all(lambda client, x: client.all_mean(int(x), name="accuracy")) == 2.0
    assert of_all(lambda client, x: client.all_min(np.float32(x))) == 1.0
    assert of_all(lambda client, x: client.all_max([x, -x])) == [3.0, -1.0]
    assert of_all(lambda client, x: client.all_mean((x, 2 * x))) == [2.0, 4.0]
    array = of_all(lambda client, x: client.all_sum(np.full((2, 2), x, np.float32)))
    assert array.dtype == np.float32
    assert array.tolist() == [[6, 6], [6, 6]]
    whole = of_all(lambda client, x: client.all_max(np.array([x, 5], np.int64)))
    assert whole.dtype == np.float64
    assert of_all(lambda client, x: client.all_mean(np.array([x, 0], np.int64))).tolist() == [2.0, 0.0]
    assert of_all(lambda client, x: client.any(x == 2)) is True
    assert of_all(lambda client, x: client.any(x > 9)) is False
    assert of_all(lambda client, x: client.all(x < 9)) is True
    assert of_all(lambda client, x: client.all(x == 2)) is False
    assert math.isnan(of_all(lambda client, x: client.all_mean(math.nan if x == 2 else x)))
    assert math.isnan(of_all(lambda client, x: client.all_max(math.nan if x == 2 else x)))
    assert of_all(lambda client, x: client.all_sum([])) == []
    assert len(of_all(lambda client, x: client.all_sum([x] * 4096))) == 4096
    leave_all(clients)


def test_what_is_no_number_and_what_is_too_much_is_refused_here(servers: ServerProcesses) -> None:
    (client,) = members(servers.start(1), 1)
    with pytest.raises(ValueError, match="4097 numbers; at most 4096 can be reduced at once"):
        client.all_sum([0.0] * 4097)
    with pytest.raises(ValueError, match="the name of what is reduced"):
        client.all_sum(1, name="x" * 300)
    for wrong in ("12", None, ["1"], {"loss": 1.0}, 1j):
        with pytest.raises(TypeError):
            client.all_mean(wrong)
    assert client.all_mean(1.5) == 1.5
    client.done()
    client.leave()


def test_before_the_start_there_is_nothing_to_reduce(servers: ServerProcesses) -> None:
    client = join(servers.start(1))
    with pytest.raises(RuntimeError, match=r"a reduction\(\) before start\(\)"):
        client.any(True)
    client.close()


def test_a_worker_that_brings_something_else_is_told_whose_it_differs_from(
    servers: ServerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """It may bring the right thing afterwards."""
    first, second = members(servers.start(2, mode="asp"), 2, notice_every=0.2)
    results: list[float] = []
    waiting = threading.Thread(target=lambda: results.append(first.all_mean(1, name="loss")), daemon=True)
    waiting.start()
    await_true(lambda: "all_mean 'loss': waiting for rank 1 (" in caplog.text, "no notice")
    with pytest.raises(psgrad.Refused, match=r"rank 1 .* brings all_sum 'hits' .*, and rank 0 .* all_mean 'loss' "):
        second.all_sum(1, name="hits")
    assert second.all_mean(3, name="loss") == 2.0
    waiting.join(WAIT_S)
    assert results == [2.0]
    leave_all([first, second])


def test_workers_that_are_killed_or_done_are_not_waited_for(
    servers: ServerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """Three workers in asp: one is lost while the first waits, and one is done."""
    address = servers.start(3, "--reconnect_grace=300ms", mode="asp")
    script = pathlib.Path(__file__).with_name("waiting_worker.py")
    with subprocess.Popen([sys.executable, script, "tensor", address], stdout=subprocess.PIPE, text=True) as worker:
        first, second = members(address, 2, notice_every=0.2)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "waiting\n"
        results: list[float] = []
        waiting = threading.Thread(target=lambda: results.append(first.all_sum(5, name="x")), daemon=True)
        waiting.start()
        await_true(lambda: "all_sum 'x': waiting for rank" in caplog.text, "no notice")
        done = threading.Thread(target=second.done, daemon=True)
        done.start()
        worker.kill()
        assert worker.wait(10) == -signal.SIGKILL
        waiting.join(WAIT_S)
        assert results == [5.0]
    with pytest.raises(psgrad.Refused, match="is done, and brings nothing to a reduction"):
        second.all_sum(1)
    first.done()
    first.leave()
    done.join(WAIT_S)
    second.leave()
    assert servers.wait() == [0]


def test_a_wait_that_nobody_ends_fails_the_job_and_says_for_whom(servers: ServerProcesses) -> None:
    """A loop that calls it on one rank only, while the other rank waits for that one's gradient."""
    first, second = members(servers.start(2, "--lease=3s", "--progress_timeout=3s"), 2)
    errors: list[str] = []

    def waiting(call: Callable[[], object]) -> None:
        with pytest.raises(psgrad.JobFailed) as raised:
            call()
        errors.append(str(raised.value))

    together(
        [
            lambda: waiting(lambda: first.all_mean(1, name="loss")),
            lambda: waiting(lambda: second.push_pull(0, arrays(1), arrays(0))),
        ]
    )
    for error in errors:
        assert "no progress for" in error
        assert "all_mean 'loss': waiting for rank 1 (" in error
    leave_all([first, second])


def test_after_a_rollback_it_is_asked_again_when_the_steps_have_been_made(restartable: Restartable) -> None:
    """The waits of both end with RolledBack; pull() joins again."""
    first, second = members(restartable.start(2, every="1"), 2)
    weights = [arrays(0), arrays(0)]

    def step(client: psgrad.Client, number: int) -> int:
        return client.push_pull(number, arrays(1), weights[client.rank], version=number).next_step

    assert together([lambda: step(first, 0), lambda: step(second, 0)]) == [1, 1]
    assert together([lambda: first.all_sum(1), lambda: second.all_sum(2)]) == [3.0, 3.0]

    def wait_and_go_back() -> int:
        with pytest.raises(psgrad.RolledBack):
            first.all_sum(1)
        return first.pull(weights[0]).next_step

    def kill() -> int:
        restartable.kill()
        restartable.start_again()
        with pytest.raises(psgrad.RolledBack):
            second.all_sum(1)
        return second.pull(weights[1]).next_step

    steps = together([wait_and_go_back, kill])
    assert steps[0] == steps[1] <= 1
    assert first.rollbacks == second.rollbacks == 1
    assert together([lambda: first.all_sum(10), lambda: second.all_sum(20)]) == [30.0, 30.0]
    leave_all([first, second])
