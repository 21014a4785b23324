"""What whoever watches a job is told by a DistributedOptimizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_client import LocalSteps
from torch_support import Jobs, loss_of, mlp, psgrad  # noqa: F401  (a stub, where psgrad is not built)

from psgrad.torch.reports import Reports, waited_for  # isort: skip

pytest_plugins = ["torch_fixtures"]

SGD = torch.optim.SGD


def train(optimizer: Any, model: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, 0)
        loss.backward()
        optimizer.report(loss=loss)
        optimizer.step()


def test_each_step_is_told_with_its_loss_and_where_its_time_went(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, samples=4)
    client = optimizer.client
    assert client.device == "cpu"
    train(optimizer, model, 3)
    optimizer.zero_grad()
    loss_of(model, 3, 0).backward()
    optimizer.step()
    assert [told["step"] for told in client.reports] == [0, 1, 2, 3]
    assert [told["samples"] for told in client.reports] == [4, 4, 4, 4]
    assert client.reports[0]["loss"] == pytest.approx(loss_of(mlp(), 0, 0).item())
    assert client.reports[3]["loss"] is None  # It was not told, and that of the step before does not count twice.
    for told in client.reports:
        assert told["forward_s"] > 0
        assert told["backward_s"] > 0
        assert min(told[phase] for phase in ("push_s", "wait_s", "pull_s", "other_s")) >= 0
    optimizer.finish()


def test_a_loss_that_is_recorded_is_told_too_and_one_that_is_told_is_recorded(fakes: Jobs, tmp_path: Path) -> None:
    model = mlp()
    path = tmp_path / "worker.jsonl"
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, metrics_file=path)
    loss_of(model, 0, 0).backward()
    optimizer.record(loss=0.5, gradient_norm=2.0)
    optimizer.step()
    loss_of(model, 1, 0).backward()
    optimizer.report(0.25)
    optimizer.step()
    assert [told["loss"] for told in optimizer.client.reports] == [0.5, 0.25]
    optimizer.finish()
    steps = [json.loads(line) for line in path.read_text().splitlines()][1:3]
    assert [step["loss"] for step in steps] == [0.5, 0.25]
    assert steps[0]["gradient_norm"] == 2


def test_evaluations_are_told_by_split(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    train(optimizer, model, 2)
    optimizer.report(split="test", loss=torch.tensor(0.3), accuracy=0.75)
    optimizer.evaluated(accuracy=0.5)
    optimizer.evaluated("validation", f1=0.5)  # It has neither, so it is only for the metrics file.
    assert optimizer.client.evaluations == [
        {"split": "test", "loss": pytest.approx(0.3), "accuracy": 0.75, "step": 2, "version": 2},
        {"split": "test", "loss": None, "accuracy": 0.5, "step": 2, "version": 2},
    ]
    optimizer.finish()


def test_what_is_no_report_is_said(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"report\(split='test', loss=…, accuracy=…\)"):
        optimizer.report(accuracy=0.5)
    with pytest.raises(ValueError, match="report: the loss of a batch"):
        optimizer.report()
    with pytest.raises(TypeError, match=r"loss=tensor.*a number is expected"):
        optimizer.report(loss=torch.ones(3))
    with pytest.raises(TypeError, match="accuracy='high'"):
        optimizer.report(split="test", accuracy="high")
    loss_of(model, 0, 0).backward()
    optimizer.report(loss=math.nan)
    optimizer.step()
    assert math.isnan(optimizer.client.reports[0]["loss"])
    optimizer.finish()


def test_where_the_worker_takes_steps_of_its_own_each_batch_is_told(fakes: Jobs) -> None:
    model = mlp()
    local = LocalSteps("average_weights", steps=2)
    optimizer = fakes(mode="local_sgd", local=local).wrap(SGD(model.parameters(), lr=0.1), model)
    train(optimizer, model, 4)
    assert [told["step"] for told in optimizer.client.reports] == [0, 0, 1, 1]
    optimizer.finish()


def test_batches_say_how_many_steps_there_are(fakes: Jobs) -> None:
    model = mlp()
    data = [(torch.zeros(6), torch.zeros(3))] * 40
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, accumulate=2)
    psgrad_data = pytest.importorskip("psgrad.data")
    psgrad_data.Batches(data, optimizer, batch_size=5, epochs=3)
    assert optimizer.client.expected_steps == 12
    optimizer.finish()


def test_what_step_did_not_wait_for_of_an_exchange_came_first() -> None:
    result: Any = SimpleNamespace(push_s=1.0, wait_s=2.0, pull_s=3.0)
    assert waited_for(result, 7.0) == (1, 2, 3)
    assert waited_for(result, 5.5) == (0.5, 2, 3)
    assert waited_for(result, 4.0) == (0, 1, 3)
    assert waited_for(result, 0.0) == (0, 0, 0)


class Arriving:
    """A loss that is on its way from a card, until `there`."""

    def __init__(self, value: float) -> None:
        self.there = False
        self._value = value

    def is_there(self) -> bool:
        return self.there

    def value(self) -> float:
        return self._value


def test_no_step_waits_for_a_loss_on_a_card() -> None:
    told: list[float | None] = []
    client: Any = SimpleNamespace(report_step=lambda samples, loss, **_: told.append(loss))
    reports = Reports(client)
    losses = [Arriving(value) for value in (0.5, 0.25)]
    for number, loss in enumerate(losses):
        reports._unread.append(loss)  # type: ignore[arg-type]
        reports.step(number, 1, None, (0.1, 0.1, 0.1))
    losses[0].there = True
    reports.step(2, 1, None, (0.1, 0.1, 0.1))
    losses[1].there = True
    reports.step(3, 1, None, (0.1, 0.1, 0.1))
    assert told == [None, None, 0.5, 0.25]
