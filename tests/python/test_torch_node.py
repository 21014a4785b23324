"""Nodes of several processes, which average their gradients by DistributedDataParallel, as workers of a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import node_process
from server_processes import ServerProcesses
from torch_support import environment, largest_difference, loss_of, mlp, ps_server, psgrad, weights_of

pytestmark = [
    pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no Gloo"),
]

WAIT_S = 240.0


class Nodes:
    """Their processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[tuple[int, int], subprocess.Popen[str]] = {}

    def start(self, what: str, addresses: list[str], nodes: int = 2) -> None:
        for node in range(nodes):
            for process in range(2):
                where = [str(self._folder), str(node), str(process), "2"]
                command = [sys.executable, str(Path(node_process.__file__)), what, *where, ",".join(addresses)]
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                self.processes[node, process] = subprocess.Popen(command, text=True, env=environment(), **pipes)

    def end(self) -> dict[tuple[int, int], tuple[int, str]]:
        """Each process's status and what it wrote to stderr, once all have ended by themselves."""
        ended = {}
        for place, process in self.processes.items():
            _, errors = process.communicate(timeout=WAIT_S)
            ended[place] = (process.returncode, errors)
        return ended

    def seen(self, node: int, process: int) -> dict[str, Any]:
        seen = torch.load(self._folder / f"{node}.{process}")
        assert isinstance(seen, dict)
        return seen

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.kill()


def alone(make: Any, scheduled: bool = False, replicas: int = 4, steps: int = node_process.STEPS) -> Any:
    """What torch.optim makes of the mean of all processes' gradients."""
    model = mlp()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if scheduled else None
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, step, replica) for replica in range(replicas)) / replicas).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return weights_of(model)


def test_two_nodes_of_two_processes_step_as_torch_optim_does_on_the_mean_of_all_four(
    nodes: Nodes, servers: ServerProcesses
) -> None:
    addresses = [servers.start(2), servers.start(2, shards=2), servers.start(2, mode="asp")]
    nodes.start("trains", addresses)
    ended = nodes.end()
    assert all(status == 0 for status, _ in ended.values()), ended
    assert servers.wait() == [0, 0, 0, 0]
    seen = {place: nodes.seen(*place) for place in ended}
    first = seen[0, 0]
    for (node, process), mine in seen.items():
        assert (mine["replica"], mine["replicas"], mine["step"]) == (2 * node + process, 4, node_process.STEPS)
        assert mine["lead"] == (node == process == 0)
        assert largest_difference(mine["bsp"], alone(node_process.momentum, scheduled=True)) < 1e-6
        assert largest_difference(mine["two servers"], alone(node_process.adamw)) < 1e-6
        assert "no parameter has a gradient" in mine["raised"]
        assert ("process 0 of this node: " in mine["raised"]) == (process == 1)
        for name in ("bsp", "two servers", "asp"):  # All end with the same bits, BatchNorm's statistics included.
            assert largest_difference(mine[name], first[name]) == 0


def test_a_process_that_raises_ends_its_node_with_its_reason(
    nodes: Nodes, servers: ServerProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes.start("fails", [servers.start(2)])
    ended = nodes.end()
    assert servers.wait() == [1]
    reason = "process 1 of this node: ValueError: no data"
    assert reason in capfd.readouterr().err  # The server's.
    assert all(status == 1 for status, _ in ended.values()), ended
    assert "ValueError: no data" in ended[0, 1][1]
    for process in range(2):  # The other node is told, in all of its processes.
        assert "JobFailed: " in ended[1, process][1]
        assert reason in ended[1, process][1]


def test_a_process_that_is_killed_ends_the_wait_of_its_node(
    nodes: Nodes, servers: ServerProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes.start("killed", [servers.start(2)])
    status = nodes.processes[0, 0].wait(WAIT_S)
    assert status == 1
    assert nodes.processes[0, 1].wait(WAIT_S) == -9
    _, errors = nodes.processes[0, 0].communicate()
    assert "process 1 of this node ended" in errors
    assert servers.wait() == [1]
    assert "process 1 of this node ended" in capfd.readouterr().err


def test_a_process_waits_for_process_0_within_a_limit_and_notices_that_it_is_gone(
    nodes: Nodes, servers: ServerProcesses, tmp_path: Path
) -> None:
    nodes.start("loses_process_0", [servers.start(1, "--lease=60s")], nodes=1)
    ended = nodes.end()
    assert ended[0, 1][0] == 0, ended
    seen = torch.load(tmp_path / "seen")
    assert seen["late"] == "TimeoutError: step(): process 0 of this node has not come to it within 0.2 s"
    assert seen["gone"] == "step(): process 0 of this node is gone"
    assert seen["other"] == "RuntimeError: step(): process 0 of this node is gone"


def test_gradients_that_ddp_averages_after_they_were_sent_are_noticed(nodes: Nodes, servers: ServerProcesses) -> None:
    nodes.start("overlaps", [servers.start(1), servers.start(1)], nodes=1)
    ended = nodes.end()
    errors = ended[0, 0][1]
    assert ended[0, 0][0] == 0, ended
    seen = nodes.seen(0, 0)
    assert errors.count("DistributedDataParallel averages these gradients after they are accumulated") == 1, errors
    assert "from now on gradients are sent in step()" in errors
    assert largest_difference(seen["weights"], alone(node_process.momentum, replicas=2, steps=2)) < 1e-6
    assert "DistributedDataParallel averages these gradients" in seen["raised"]


def test_what_is_no_distributed_data_parallel_is_refused() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="DistributedDataParallel is expected, not Sequential"):
        psgrad.torch.NodeOptimizer(node_process.momentum(model.parameters()), model)
