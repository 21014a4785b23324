"""The client on real servers: arrays, errors, Ctrl-C, forks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import psgrad
from psgrad._supervisor import find_program
from server_processes import ServerProcesses

LAYOUT = [psgrad.Tensor("w", (3, 4)), psgrad.Tensor("b", (4,))]
SGD = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5})


def arrays(value: float) -> list[Any]:
    """One for each tensor of LAYOUT."""
    return [np.full(tensor.shape, value, np.float32) for tensor in LAYOUT]


def join(address: str, **options: Any) -> psgrad.Client:
    """A member of the job whose optimizer is SGD."""
    return psgrad.Client.join(address, LAYOUT, **{"optimizer": SGD, **options})


def test_a_push_pull_brings_weights_that_the_gradient_has_stepped(servers: ServerProcesses) -> None:
    """Into arrays of the caller's, and into the client's."""
    client = join(servers.start(1, shards=2))
    weights = arrays(0)
    result = client.start(arrays(1), weights)
    assert result.version == 0
    result = client.push_pull(result.next_step, arrays(2), weights, version=result.version)
    assert result.version == 1
    assert result.answers == ["applied", "applied"]
    assert all((array == 0).all() for array in weights)
    own = client.weight_buffers()
    client.pull(own)
    assert all((np.from_dlpack(array) == 0).all() for array in own)
    client.done()
    client.leave()
    assert servers.wait() == [0, 0]


def test_the_clients_memory_outlives_the_client(servers: ServerProcesses) -> None:
    """It lives as long as any array of it."""
    client = join(servers.start(1))
    kept = np.from_dlpack(client.weight_buffers()[1])
    client.start(arrays(7), client.weight_buffers())
    client.done()
    client.leave()
    del client
    assert kept.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((3, 4), np.float64), "float64"),
        (np.zeros((4, 3), np.float32).T, "C-contiguous"),
        ([[0.0] * 4] * 3, "list"),
    ],
)
def test_an_array_that_would_have_to_be_copied_is_refused_by_its_tensor(
    servers: ServerProcesses, array: Any, problem: str
) -> None:
    """Never a silent copy."""
    with join(servers.start(1)) as client:
        weights = arrays(0)
        client.start(arrays(0), weights)
        with pytest.raises(TypeError, match=rf"gradients of tensor w \[3, 4\].*{problem}"):
            client.push_pull(0, [array, weights[1]], weights)
        client.done()


def test_weights_that_cannot_be_written_are_refused(servers: ServerProcesses) -> None:
    """A read-only array is no place for weights."""
    with join(servers.start(1)) as client:
        weights = arrays(0)
        weights[1].flags.writeable = False
        with pytest.raises(TypeError, match=r"weights of tensor b \[4\]: expected a writable"):
            client.start(arrays(0), weights)
        client.start(arrays(0), arrays(0))
        client.done()


def test_an_array_of_another_size_is_refused(servers: ServerProcesses) -> None:
    """Also one that is named when it is ready."""
    with join(servers.start(1)) as client:
        weights = arrays(0)
        client.start(arrays(0), weights)
        with pytest.raises(ValueError, match=r"gradients of tensor b \[4\]: the array has the shape \(3\)"):
            client.push_pull(0, [weights[0], np.zeros(3, np.float32)], weights)
        exchange = client.begin(0, [None, None], weights, deferred=True)
        with pytest.raises(ValueError, match=r"tensor b \[4\]: the array has the shape \(5\)"):
            exchange.ready(1, np.zeros(5, np.float32))
        exchange.ready(1, weights[1])
        exchange.ready(0, weights[0])
        assert exchange.wait().version == 1
        client.done()


def test_no_weight_is_written_before_the_last_gradient_is_ready(servers: ServerProcesses) -> None:
    """Whatever another worker does meanwhile."""
    address = servers.start(2, shards=2, mode="asp")
    first, second = join(address), join(address)
    begin = threading.Thread(target=second.start, args=(arrays(1), arrays(0)))
    begin.start()
    weights = arrays(0)
    first.start(arrays(1), weights)
    begin.join()
    exchange = first.begin(0, arrays(2), weights, deferred=True)
    exchange.ready(0)
    second.push(0, arrays(2))
    with pytest.raises(TimeoutError, match=r"rank 0, step 0: the exchange: not within 0.3 s"):
        exchange.wait(0.3)
    assert all((array == 1).all() for array in weights)
    exchange.ready(1)
    exchange.wait()
    assert all((array == -1).all() for array in weights)
    leaving = threading.Thread(target=lambda: (second.done(), second.leave()))
    leaving.start()
    first.done()
    first.leave()
    leaving.join()


def test_a_tensor_without_a_gradient_is_absent(servers: ServerProcesses) -> None:
    """It stays as it is, where a gradient of zeros would decay it; what cannot be absent is refused by its number."""
    address = servers.start(1, "--optimizer=sgd", "--learning_rate=1", "--weight_decay=0.5")
    with join(address, optimizer=None) as client:
        weights = arrays(0)
        client.start(arrays(2), weights)
        exchange = client.begin(0, [None, None], weights, deferred=True)
        with pytest.raises(IndexError, match=r"there is no tensor 2"):
            exchange.absent(2)
        exchange.absent(0)
        exchange.ready(1, np.zeros(4, np.float32))
        assert exchange.wait().version == 1
        assert (weights[0] == 2).all()
        assert (weights[1] == 1).all()
        exchange = client.begin(1, arrays(0), weights, version=1, deferred=True)
        exchange.ready(0)
        exchange.absent(0)
        with pytest.raises(ValueError, match=r"TensorAbsent for tensor 0, which is ready already"):
            exchange.wait()
        client.done()


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("ready", [True, False])
def test_a_push_that_is_given_up_leaves_its_step_to_the_next(servers: ServerProcesses, mode: str, ready: bool) -> None:
    """Nothing of it counts, on any server."""
    with join(servers.start(1, shards=2, mode=mode)) as client:
        weights, first = arrays(0), arrays(100)
        client.start(arrays(1), weights)
        exchange = client.begin(0, first, weights, deferred=True)
        if ready:
            exchange.ready(0)
        exchange.give_up(0)
        first[0][...] = 200  # It is the caller's again.
        result = client.push_pull(0, arrays(2), weights)
        assert (result.version, result.answers) == (1, ["applied", "applied"])
        assert all((array == 0).all() for array in weights)
        client.done()


def test_a_step_that_is_not_finite_changes_nothing_where_it_may_be_skipped(servers: ServerProcesses) -> None:
    """The result names the tensor."""
    with join(servers.start(1)) as client:
        weights, bad = arrays(0), arrays(1)
        bad[1][2] = np.inf
        result = client.start(arrays(3), weights)
        result = client.push_pull(0, bad, weights, version=result.version, skip_not_finite=True)
        assert result.skipped == "b"
        assert result.version == 1
        assert all((array == 3).all() for array in weights)
        with pytest.raises(ValueError, match="the gradient of tensor b is not finite"):
            client.push_pull(1, bad, weights, version=1)
        client.done()


def test_a_rank_that_is_done_counts_as_empty_and_the_other_goes_on(servers: ServerProcesses) -> None:
    """Two and five steps: nobody is stuck."""
    address = servers.start(2)
    clients = [join(address, rank=rank) for rank in range(2)]
    final: list[Any] = [None, None]

    def train(rank: int) -> None:
        weights = arrays(0)
        result = clients[rank].start(arrays(0), weights)
        for _ in range((2, 5)[rank]):
            result = clients[rank].push_pull(result.next_step, arrays(1), weights, version=result.version)
        clients[rank].done(counts_as_empty=True)
        assert clients[rank].pull(weights).version == 5
        clients[rank].leave()
        final[rank] = weights[1][0]

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert final == [-2.5, -2.5]
    assert servers.wait() == [0]


def test_a_model_that_is_not_the_jobs_is_refused_by_what_differs(servers: ServerProcesses) -> None:
    """Refused, and not a wait."""
    address = servers.start(2)
    client = join(address)
    with pytest.raises(psgrad.Refused, match=r"tensor 1 of the worker's model is c \[4\], but the job's is b \[4\]"):
        psgrad.Client.join(address, [LAYOUT[0], psgrad.Tensor("c", (4,))], optimizer=SGD)
    with pytest.raises(psgrad.Refused, match="learning_rate"):
        join(address, optimizer=psgrad.OptimizerSettings("sgd", {"learning_rate": 0.25}))
    client.close()


def test_another_optimizer_than_the_servers_is_refused_with_what_takes_the_workers(servers: ServerProcesses) -> None:
    """But only servers that were started with one: a job that has taken another worker's keeps it."""
    hint = r"; servers that are started with --optimizer=from_worker do what the worker's optimizer says$"
    with pytest.raises(psgrad.Refused, match=r"differs from the servers': .*" + hint):
        join(servers.start(1, "--optimizer=adam"))
    address = servers.start(2)
    client = join(address)
    with pytest.raises(psgrad.Refused) as refused:
        join(address, optimizer=psgrad.OptimizerSettings("sgd", {"learning_rate": 0.25}))
    assert "from_worker" not in str(refused.value)
    client.close()


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_as_many_groups_as_there_may_be_are_told_beside_many_slices(
    servers: ServerProcesses, shared_memory: str
) -> None:
    """What a message may hold beside its payload is bounded."""
    tensors, groups = 6000, 1024
    layout = [psgrad.Tensor(f"w{i}", (1,), group=1 + i % groups) for i in range(tensors)]
    own = [{}, *({"learning_rate": float(number)} for number in range(groups))]
    address = servers.start(1, shards=2)
    with psgrad.Client.join(address, layout, optimizer=SGD, shared_memory=shared_memory) as client:
        weights = [np.zeros(1, np.float32) for _ in layout]
        ones = [np.ones(1, np.float32) for _ in layout]
        client.start(weights, weights)
        for step, told in enumerate([None, own, None]):
            client.push_pull(step, ones, weights, version=step, groups=told)
        assert all(array[0] == -0.5 - 2 * (i % groups) for i, array in enumerate(weights))
        too_long = [{}, *({"learning_rate": 1.0, "weight_decay": 0.5} for _ in range(groups))]
        with pytest.raises(ValueError, match=r"PushInfo\.groups: \d+ bytes; at most 32768"):
            client.push_pull(3, ones, weights, version=3, groups=too_long)
        client.done()


def test_what_is_set_holds_for_all_groups_until_one_is_told_again(servers: ServerProcesses) -> None:
    """ps_ctl set beside what a worker tells."""
    layout = [psgrad.Tensor("w", (1,), group=1), psgrad.Tensor("b", (1,), learning_rate_factor=0.5)]
    settings = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5}, groups=[{"learning_rate": 4.0}])
    address = servers.start(1)
    with psgrad.Client.join(address, layout, optimizer=settings) as client:
        weights = [np.zeros(1, np.float32) for _ in layout]
        ones = [np.ones(1, np.float32) for _ in layout]
        client.start(weights, weights)

        def step(**push: Any) -> list[float]:
            before = [float(array[0]) for array in weights]
            client.push_pull(client.next_step, ones, weights, version=client.next_step, **push)
            return [old - float(array[0]) for old, array in zip(before, weights, strict=True)]

        assert step() == [4.0, 0.25]
        ctl = [find_program("ps_ctl"), f"--server={address}", "set", "learning_rate=2"]
        done = subprocess.run(ctl, check=True, capture_output=True, text=True, timeout=30).stdout
        first = int(done.split(" from version ")[1].split()[0])
        while client.next_step + 1 < first:
            assert step() == [4.0, 0.25]
        assert step() == [2.0, 1.0]
        assert step(groups=[{}, {"learning_rate": 8.0}]) == [8.0, 1.0]
        assert step() == [8.0, 1.0]
        with pytest.raises(ValueError, match=r"groups: group 1: momentum=0\.5: not used by --optimizer=sgd"):
            step(groups=[{}, {"momentum": 0.5}])
        client.done()


def test_servers_that_are_not_there_are_unavailable_by_their_address() -> None:
    """After connect_timeout."""
    with pytest.raises(psgrad.Unavailable, match=r"127\.0\.0\.1:1.*refused"):
        join("127.0.0.1:1", connect_timeout=0.3)


def test_a_client_that_has_left_says_so(servers: ServerProcesses) -> None:
    """And not that the servers are gone."""
    client = join(servers.start(1))
    client.start(arrays(0), arrays(0))
    client.done()
    client.leave()
    with pytest.raises(psgrad.Cancelled, match="rank 0 has left the job"):
        client.pull(arrays(0))


@pytest.mark.parametrize("what", ["pull", "begin", "take_run", "weights_hash", "done"])
def test_what_would_wait_for_this_worker_s_own_start_is_an_error(servers: ServerProcesses, what: str) -> None:
    """And not a wait that ends with a time-out."""
    client = join(servers.start(1))
    uses = {
        "pull": lambda: client.pull(arrays(0)),
        "begin": lambda: client.push_pull(0, arrays(1), arrays(0)),
        "take_run": lambda: client.take_run(1, 0, samples=4, batch_size=4, runs=1),
        "weights_hash": client.weights_hash,
        "done": client.done,
    }
    with pytest.raises(RuntimeError, match=rf"^rank 0: {what}\(\) before start\(\)"):
        uses[what]()
    assert client.start(arrays(1), arrays(0)).next_step == 0  # Nothing is lost by it.
    client.close()


WAITING_THREAD = """
import sys, threading
import psgrad

def work():
    layout, weights = [psgrad.Tensor("w", (3,))], [numpy.zeros(3, numpy.float32)]
    sgd = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5})
    psgrad.Client.join(sys.argv[1], layout, optimizer=sgd).start(weights, weights)

def work_with_torch():
    model = torch.nn.Linear(2, 1)
    psgrad.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, server=sys.argv[1])

def start(*arguments, start=psgrad.Client.start):
    threading.Timer(0.5, joined.set).start()
    start(*arguments)

psgrad.Client.start = start
joined = threading.Event()
threading.Thread(target=work if "numpy" in globals() else work_with_torch, daemon=True).start()
assert joined.wait(20)
"""


@pytest.mark.parametrize("libraries", ["numpy", "torch, psgrad.torch"])
def test_the_interpreters_exit_does_not_wait_for_a_daemon_thread(servers: ServerProcesses, libraries: str) -> None:
    """It waits for the job's start, and so for a worker that does not come."""
    pytest.importorskip(libraries.split(",")[0])
    command = [sys.executable, "-c", f"import {libraries}{WAITING_THREAD}", servers.start(2)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "AttributeError" not in ended.stderr


def test_a_process_may_join_one_job_after_another(servers: ServerProcesses) -> None:
    """As a notebook does."""
    for value in (1, 2):
        with join(servers.start(1)) as client:
            weights = arrays(0)
            client.start(arrays(value), weights)
            assert weights[1][0] == value
            client.done()
    assert servers.wait() == [0, 0]


def test_a_forked_process_cannot_use_the_client_and_does_not_end_it(servers: ServerProcesses) -> None:
    """A forked loader has a copy of it."""
    client = join(servers.start(1))
    client.start(arrays(0), arrays(0))
    exchange = client.begin(0, arrays(1), arrays(0), deferred=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for use in (lambda: client.pull(arrays(0)), exchange.wait, lambda: exchange.ready(0)):
            try:
                use()
            except psgrad.Error as error:
                os.write(writer, str(error).encode())
        del client, exchange
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    said = os.read(reader, 10_000).decode()
    os.close(reader)
    assert said.count(f"belongs to process {os.getpid()}") == 3
    for tensor in range(2):
        exchange.ready(tensor)
    assert exchange.wait().version == 1
    client.done()
    client.leave()


def test_who_is_waited_for_and_what_it_does_is_told(servers: ServerProcesses, caplog: pytest.LogCaptureFixture) -> None:
    """In the log of the worker that waits."""
    address = servers.start(2, "--lease=1500ms")
    clients = [join(address, rank=rank, notice_every=0.5) for rank in range(2)]
    weights = [arrays(0), arrays(0)]
    starts = [threading.Thread(target=clients[rank].start, args=(arrays(1), weights[rank])) for rank in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(30)
    clients[1].set_busy("evaluating")
    exchange = clients[0].begin(0, arrays(1), weights[0])
    with caplog.at_level("WARNING"):
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                exchange.wait(0.2)
            if "waiting for rank 1 (evaluating, " in caplog.text:
                break
    assert "waiting for rank 1 (evaluating, " in caplog.text
    clients[1].set_busy("")
    clients[1].push_pull(0, arrays(1), weights[1])
    assert exchange.wait().version == 1
    for client in clients:
        client.close()


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_worker_that_is_killed_fails_a_job_that_needs_it_and_no_other(servers: ServerProcesses, mode: str) -> None:
    """With the rank in the text; where nobody waits for it, the other one trains to its end."""
    address = servers.start(2, "--reconnect_grace=500ms", mode=mode)
    script = pathlib.Path(__file__).with_name("waiting_worker.py")
    layout = LAYOUT[:1]
    with subprocess.Popen([sys.executable, script, "tensor", address], stdout=subprocess.PIPE, text=True) as worker:
        client = psgrad.Client.join(address, layout, optimizer=SGD)
        weights = arrays(0)[:1]
        result = client.start(arrays(0)[:1], weights)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "waiting\n"
        worker.kill()
        assert worker.wait(10) == -signal.SIGKILL
    if mode == "bsp":
        with pytest.raises(psgrad.JobFailed, match=r"rank [01].* was lost: its connection broke"):
            client.push_pull(result.next_step, arrays(1)[:1], weights)
        client.close()
        return
    for _ in range(3):
        result = client.push_pull(result.next_step, arrays(1)[:1], weights, version=result.version)
    assert result.version == 3
    client.done()
    client.leave()
    assert servers.wait() == [0]


def test_a_job_that_is_shut_down_says_so_and_not_that_it_failed(servers: ServerProcesses) -> None:
    """A script can tell an operator's wish from something that is wrong."""
    address = servers.start(1, shards=2)
    client = join(address)
    weights = arrays(0)
    result = client.start(arrays(0), weights)
    result = client.push_pull(result.next_step, arrays(1), weights)
    subprocess.run([find_program("ps_ctl"), f"--server={address}", "shutdown"], check=True, timeout=30)
    with pytest.raises(psgrad.ShutDown, match="ps_ctl shutdown"):
        client.push_pull(result.next_step, arrays(1), weights)
    assert issubclass(psgrad.ShutDown, psgrad.JobFailed)
    client.close()
    assert servers.wait() == [0, 0]


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_rank_0_brings_the_initial_weights_whoever_comes_first(servers: ServerProcesses, mode: str) -> None:
    """Workers may have values of their own, and which of them count is not by chance."""
    address = servers.start(2, mode=mode, shards=2)
    first = join(address, rank=1)
    weights = [arrays(0), arrays(0)]
    start = threading.Thread(target=first.start, args=(arrays(2), weights[1]))
    start.start()
    second = join(address, rank=0)
    second.start(arrays(1), weights[0])
    start.join(30)
    for each in weights:
        assert all((array == 1).all() for array in each)
    for client in (first, second):
        client.close()


def test_a_rank_or_array_that_cannot_be_is_refused_by_name(servers: ServerProcesses) -> None:
    """In one sentence, without the names of our functions."""
    address = servers.start(1)
    for rank in (-1, 2**32, "0", 1.0):
        with pytest.raises(ValueError, match=f"rank={rank!r}: a whole number from 0"):
            join(address, rank=rank)
    with pytest.raises(TypeError, match="server=None: HOST:PORT"):
        join(None)  # type: ignore[arg-type]
    client = join(address)
    client.start(arrays(1), arrays(0))
    for shape in ((4, 3), (12,), (1, 3, 4)):
        bad = [np.zeros(shape, np.float32), np.zeros(4, np.float32)]
        with pytest.raises(ValueError, match=r"tensor w \[3, 4\]: the array has the shape"):
            client.push_pull(0, bad, arrays(0))
    client.done()
    client.leave()


def test_a_worker_that_takes_a_live_ones_name_fences_it(servers: ServerProcesses) -> None:
    """The one that was replaced is told so, as an error of its own."""
    address = servers.start(1, mode="asp")
    first = join(address, name="w")
    result = first.start(arrays(1), arrays(0))
    second = join(address, name="w")
    weights = arrays(0)
    taken_over = second.start(arrays(1), weights)
    with pytest.raises(psgrad.Fenced, match="rank 0"):
        first.push_pull(result.next_step, arrays(1), arrays(0), version=result.version)
    first.close()
    assert second.push_pull(taken_over.next_step, arrays(2), weights, version=taken_over.version).version == 1
    assert all((array == 0).all() for array in weights)
    second.done()
    second.leave()


WAITS = ("join", "start", "exchange", "tensor", "pull", "done", "run", "reduction", "weights_hash")


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_at_once(servers: ServerProcesses, wait: str) -> None:
    """What is waited for never comes: another shard, another worker, a gradient, a run, an answer."""
    if wait == "join":
        address = servers.start(1, "--num_shards=2")
    elif wait == "run":
        address = servers.start(2, "--budget=job", mode="asp")
    else:
        address = servers.start(2 if wait in ("start", "done", "reduction") else 1)
    other = psgrad.Client.join(address, LAYOUT[:1], optimizer=SGD) if wait in ("done", "run", "reduction") else None
    script = pathlib.Path(__file__).with_name("waiting_worker.py")
    command = [sys.executable, script, wait, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        if other is not None:
            other.start(arrays(0)[:1], arrays(0)[:1])
        if wait == "run":
            assert other is not None
            assert other.take_run(1, 0, samples=4, batch_size=4, runs=1) == 0
        if wait == "weights_hash":
            assert worker.stdout.readline() == "ready\n"
            servers.processes[0].send_signal(signal.SIGSTOP)
            worker.stdin.write("\n")
            worker.stdin.flush()
        assert worker.stdout.readline() == "waiting\n"
        worker.send_signal(signal.SIGINT)
        assert worker.stdout.readline() == "interrupted\n"
        if wait == "weights_hash":
            servers.processes[0].send_signal(signal.SIGCONT)
        assert worker.wait(10) == 0
    if other is not None:
        other.close()


def test_a_job_that_asks_for_what_this_client_does_not_do_is_refused_by_its_flags(servers: ServerProcesses) -> None:
    address = servers.start(1, "--optimizer=sgd", "--local_steps=4", "--fragments=2", "--overlap=1", mode="diloco")
    with pytest.raises(RuntimeError, match=r"--fragments=2 --overlap=1 --mix=0: the worker's client cannot do that"):
        psgrad.Client.join(address, LAYOUT)
