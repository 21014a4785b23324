"""What whoever watches a job of psgrad's sees: workers' reports, through real servers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server_processes import ServerProcesses

psgrad = pytest.importorskip("psgrad")
if not hasattr(psgrad, "_core"):
    pytest.skip("psgrad._core has not been built", allow_module_level=True)

WAIT_S = 60.0


class WatchedServers(ServerProcesses):
    """The servers of one job, which it can be read at."""

    def start(self, num_workers: int, *flags: str, **options: Any) -> str:
        chief = super().start(num_workers, "--http_listen=127.0.0.1:0", *flags, **options)
        output = self.processes[0].stdout
        assert output is not None
        line = output.readline()
        assert line.startswith("page at http://"), line
        self.page = line.removeprefix("page at ").strip().rstrip("/")
        return chief

    def job_when(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job, once this holds of it."""
        end = time.monotonic() + WAIT_S
        while True:
            job: dict[str, Any] = {"workers": []}
            try:
                with urllib.request.urlopen(f"{self.page}/api/v1/job", timeout=WAIT_S) as answer:
                    job = json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503:  # It is starting.
                    raise
            if job["workers"] and holds(job):
                return job
            assert time.monotonic() < end, job
            time.sleep(0.05)


@pytest.fixture
def watched() -> Any:
    servers = WatchedServers()
    yield servers
    servers.end()


def test_a_client_that_tells_of_no_batches_is_seen_by_its_pushes(watched: WatchedServers) -> None:
    settings = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.1})
    with psgrad.Client.join(watched.start(1), [psgrad.Tensor("w", (40, 1000))], optimizer=settings) as client:
        weights = np.zeros((40, 1000), np.float32)
        client.start([np.zeros_like(weights)], [weights])
        for step in range(5):
            client.push_pull(step, [np.ones_like(weights)], [weights], version=step, samples=8)
        job = watched.job_when(lambda job: job["workers"][0]["steps"] == 5)
        assert job["workers"][0]["samples"] == 40
        assert job["workers"][0]["loss"] is None
        assert job["workers"][0]["sent_bytes"] == 5 * weights.nbytes + weights.nbytes  # And as initial values.
        client.report_device("tpu:7")
        client.report_step(8, 0.5, step=5)
        client.report_evaluation("test", 0.25, 0.875, step=5, version=5)
        job = watched.job_when(lambda job: bool(job["progress"]["evaluations"]))
        assert job["workers"][0]["steps"] == 6
        assert job["workers"][0]["loss"]["mean"] == 0.5
        assert job["workers"][0]["device"] == "tpu:7"
        assert job["progress"]["evaluations"][0]["accuracy"] == 0.875
        client.done()


def test_an_optimizer_tells_of_its_batches_by_itself_and_of_the_loss_it_is_told(watched: WatchedServers) -> None:
    torch = pytest.importorskip("torch")
    from psgrad.data import Batches
    from psgrad.torch import DistributedOptimizer

    model = torch.nn.Linear(6, 3)
    data = [(torch.zeros(6), torch.zeros(3))] * 40
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with DistributedOptimizer(sgd, model, server=watched.start(1), samples=4) as optimizer:
        for x, y in Batches(data, optimizer, batch_size=4, epochs=2):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.report(loss=loss)
            optimizer.step()
        optimizer.report(split="test", loss=0.25, accuracy=0.75)
        job = watched.job_when(lambda job: bool(job["progress"]["evaluations"]))
        worker = job["workers"][0]
        assert (worker["steps"], worker["samples"], worker["device"]) == (20, 80, "cpu")
        assert worker["loss"]["batches"] > 0
        assert worker["seconds"]["backward"] > 0
        assert (job["progress"]["step"], job["progress"]["all_steps"]) == (20, 20)
        assert job["progress"]["samples"] == 80
        assert job["progress"]["evaluations"][0]["split"] == "test"
