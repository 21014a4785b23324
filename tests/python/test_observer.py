"""A process that looks on at a job of real servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psgrad
from psgrad._supervisor import find_program
from server_processes import Restartable, ServerProcesses

LAYOUT = [psgrad.Tensor("w", (300, 400)), psgrad.Tensor("b", (4,)), psgrad.Tensor("c", (2,), kind="constant")]
SGD = psgrad.OptimizerSettings("sgd", {"learning_rate": 1.0})


def arrays(value: float) -> list[Any]:
    """One for each tensor of LAYOUT."""
    return [np.full(tensor.shape, value, np.float32) for tensor in LAYOUT]


def join(address: str, **options: Any) -> psgrad.Client:
    return psgrad.Client.join(address, LAYOUT, optimizer=SGD, **options)


def started(address: str) -> tuple[psgrad.Client, list[Any], psgrad.Result]:
    """One worker whose weights are 1."""
    client = join(address)
    weights = arrays(0)
    return client, weights, client.start(arrays(1), weights)


def values_of(seen: psgrad.Observed) -> dict[str, float]:
    """The one value of each tensor."""
    assert all((array == array.flat[0]).all() for array in seen.weights.values())
    return {name: float(array.flat[0]) for name, array in seen.weights.items()}


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_it_brings_the_newest_weights_of_a_job_that_trains(servers: ServerProcesses, mode: str) -> None:
    """By name; in bsp of one version of all shards."""
    address = servers.start(1, shards=3, mode=mode)
    client, weights, result = started(address)
    with psgrad.Observer(address) as observer:
        assert observer.layout == tuple(LAYOUT)
        assert values_of(observer.pull()) == {"w": 1, "b": 1, "c": 1}
        for _ in range(3):
            result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
        seen = observer.pull()
        assert values_of(seen) == {"w": 4, "b": 4, "c": 1}
        assert seen.version == 3
        assert seen.versions == (3, 3, 3)
        assert seen.generation == client.generation
        status = observer.status()
        assert (status.job, status.phase, status.workers) == ("default", "running", 1)
    client.done()
    client.leave()


def test_several_look_on_while_steps_are_made_and_none_sees_a_torn_version(servers: ServerProcesses) -> None:
    """In bsp each version has one value."""
    address = servers.start(1, shards=2)
    client, weights, result = started(address)
    seen: list[list[int]] = []
    errors: list[BaseException] = []
    trained = threading.Event()

    def look_on() -> None:
        try:
            versions = []
            observer = psgrad.Observer(address)
            while len(versions) < 5 or not trained.is_set():
                pulled = observer.pull()
                assert len(set(pulled.versions)) == 1
                assert values_of(pulled) == {"w": 1 + pulled.version, "b": 1 + pulled.version, "c": 1}
                versions.append(pulled.version)
            seen.append(versions)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look_on, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    trained.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors
    assert all(versions == sorted(versions) and versions[-1] == 60 for versions in seen)
    client.done()
    client.leave()


def test_a_version_that_is_named_is_waited_for_or_gone(servers: ServerProcesses) -> None:
    address = servers.start(1)
    client, weights, result = started(address)
    observer = psgrad.Observer(address, timeout=20)
    coming: list[psgrad.Observed] = []
    waiting = threading.Thread(target=lambda: coming.append(observer.pull(version=2)), daemon=True)
    waiting.start()
    for _ in range(2):
        result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    waiting.join(30)
    assert values_of(coming[0])["w"] == 3
    for _ in range(3):
        result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    with pytest.raises(psgrad.Refused, match=r"shard 0 at .*version 0"):
        observer.pull(version=0)
    with pytest.raises(psgrad.Unavailable):
        psgrad.Observer(address, timeout=0.5).pull(version=99)
    client.done()
    client.leave()


def test_it_writes_to_arrays_of_the_callers(servers: ServerProcesses) -> None:
    """Those that are named; the others are new."""
    address = servers.start(1)
    client, _, _ = started(address)
    observer = psgrad.Observer(address)
    mine = np.zeros(4, np.float32)
    seen = observer.pull({"b": mine})
    assert seen.weights["b"] is mine
    assert mine.tolist() == [1, 1, 1, 1]
    assert (seen.weights["w"] == 1).all()
    with pytest.raises(ValueError, match="no tensor x"):
        observer.pull({"x": mine})
    with pytest.raises(ValueError, match=r"weights of tensor c \[2\]"):
        observer.pull({"c": mine})
    with pytest.raises(TypeError, match=r"weights of tensor b \[4\]"):
        observer.pull({"b": np.zeros(4)})
    mine.flags.writeable = False
    with pytest.raises(TypeError, match=r"weights of tensor b \[4\]: expected a writable"):
        observer.pull({"b": mine})
    client.done()
    client.leave()


def test_before_there_are_weights_it_waits_and_says_for_what(servers: ServerProcesses) -> None:
    address = servers.start(2)
    with pytest.raises(psgrad.Unavailable, match="the job has no weights yet: waiting for 2 of 2 workers to join"):
        _ = psgrad.Observer(address, timeout=0.3).layout
    observer = psgrad.Observer(address)
    assert observer.status().phase == "gathering"
    seen: list[psgrad.Observed] = []
    waiting = threading.Thread(target=lambda: seen.append(observer.pull()), daemon=True)
    waiting.start()
    clients = [join(address)]  # The model is there now, but no weights.
    with pytest.raises(psgrad.Unavailable):
        psgrad.Observer(address, timeout=0.5).pull()
    clients.append(join(address))
    starts = [threading.Thread(target=client.start, args=(arrays(1), arrays(0)), daemon=True) for client in clients]
    for thread in [*starts, waiting]:
        if thread is not waiting:
            thread.start()
    for thread in [*starts, waiting]:
        thread.join(30)
    assert values_of(seen[0])["w"] == 1
    for client in clients:
        client.close()


def test_after_the_end_there_are_the_last_weights_or_nobody_to_ask(servers: ServerProcesses) -> None:
    address = servers.start(1, "--keep_running", shards=2)
    client, weights, result = started(address)
    client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    client.done()
    client.leave()
    observer = psgrad.Observer(address, timeout=10)
    seen = observer.pull()
    assert seen.version == 1
    assert values_of(seen)["w"] == 2
    assert observer.status().phase == "finished"
    servers.end()
    with pytest.raises(psgrad.Unavailable, match=f"the chief at {address}: connection refused"):
        psgrad.Observer(address, timeout=0.5).pull()


def test_a_job_that_was_shut_down_without_weights_says_so(servers: ServerProcesses) -> None:
    address = servers.start(1, "--keep_running")
    subprocess.run([find_program("ps_ctl"), f"--server={address}", "shutdown"], check=False, timeout=30)
    with pytest.raises(psgrad.Error):
        psgrad.Observer(address, timeout=1).pull()


def test_it_follows_a_job_over_a_restart_of_its_servers(restartable: Restartable) -> None:
    """Another generation, and for shard 1 another address."""
    address = restartable.start(1, shards=2, every="1")
    client, weights, result = started(address)
    result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    observer = psgrad.Observer(address, timeout=30)
    before = observer.pull()
    restartable.kill(0)
    restartable.kill(1)
    failed: list[BaseException] = []
    seen: list[psgrad.Observed] = []

    def look_on() -> None:
        try:
            seen.append(observer.pull())
        except BaseException as error:
            failed.append(error)

    looking = threading.Thread(target=look_on, daemon=True)
    looking.start()
    restartable.start_again(0)
    restartable.start_again(1, "--listen=127.0.0.1:0")
    result = client.push_pull(result.next_step, [*arrays(-1)[:2], None], weights, version=result.version)
    looking.join(60)
    assert not failed, failed
    assert seen[0].generation > before.generation
    after = observer.pull()
    assert values_of(after)["w"] == 1 + after.version
    client.done()
    client.leave()


def test_another_model_at_the_same_address_is_refused_by_its_tensor(servers: ServerProcesses) -> None:
    address = servers.start(1)
    client, _, _ = started(address)
    observer = psgrad.Observer(address)
    observer.pull()
    client.close()
    servers.kill()
    servers.start_again()
    other = psgrad.Client.join(address, [psgrad.Tensor("w", (2, 2))], optimizer=SGD)
    other.start([np.zeros((2, 2), np.float32)], [np.zeros((2, 2), np.float32)])
    with pytest.raises(psgrad.Refused, match=r"another model now: its tensor 0 is w \[2, 2\], and was w \[300, 400\]"):
        observer.pull()
    other.done()
    other.leave()


def test_ctrl_c_ends_a_wait_at_once(servers: ServerProcesses, tmp_path: Path) -> None:
    """For a job that never has weights."""
    address = servers.start(1)
    script = tmp_path / "look_on.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, threading, psgrad
            observer = psgrad.Observer(sys.argv[1], timeout=600)
            threading.Timer(0.1, lambda: print("waiting", flush=True)).start()
            try:
                observer.pull()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        ),
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, script, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0


def test_in_a_forked_process_it_says_whose_it_is(servers: ServerProcesses) -> None:
    """And the process can end."""
    client, _, _ = started(servers.start(1))
    observer = psgrad.Observer(servers.addresses[0])
    observer.pull()
    child = os.fork()
    if child == 0:
        try:
            observer.pull()
        except psgrad.Error as error:
            del observer
            os._exit(0 if f"belongs to process {os.getppid()}" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    observer.pull()
    client.done()
    client.leave()


def test_what_is_no_address_or_time_is_refused() -> None:
    with pytest.raises(TypeError, match="HOST:PORT"):
        psgrad.Observer(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 0 s"):
        psgrad.Observer("127.0.0.1:1", timeout=0)
    closed = psgrad.Observer("127.0.0.1:1")
    closed.close()
    with pytest.raises(psgrad.Cancelled):
        closed.pull()
