"""torch.compile: models and training steps that are compiled train as eager ones do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

from torch_support import Job, Jobs, batch, loss_of, mlp, seeded

pytest_plugins = ["torch_fixtures"]

STEPS = 10  # Beyond dynamo's limit for compiling anew.


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch.compiler.reset()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(forward: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(forward, step, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def eager_losses() -> list[float]:
    model = mlp()
    return train(model, adamw(model))


def train_compiled(job: Job, way: str, backend: str) -> None:
    model = mlp()
    forward: Any = model
    if way == "before":
        forward = torch.compile(model, backend=backend)
        loss_of(forward, 0, 0)  # Compiled code exists before the weights get the client's memory.
    elif way == "in_place":
        model.compile(backend=backend)
    elif way == "submodule":
        model[0] = torch.compile(model[0], backend=backend)
    with job.wrap(adamw(model), forward) as optimizer:
        if way == "after":
            forward = torch.compile(model, backend=backend)
        assert [entry.name for entry in optimizer._entries] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        losses = train(forward, optimizer)
        assert optimizer._steps._sends, "hooks do not run"
    assert losses == pytest.approx(eager_losses(), abs=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["before", "after", "in_place", "submodule"])
def test_a_compiled_model_has_the_losses_of_an_eager_one(jobs: Jobs, way: str, backend: str) -> None:
    train_compiled(jobs(), way, backend)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductors_code_has_the_losses_of_an_eager_model(fakes: Jobs) -> None:
    train_compiled(fakes(), "before", "inductor")


def test_compiled_and_eager_workers_train_one_model(jobs: Jobs) -> None:
    def with_buffers() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    job = jobs(2)
    compiles = iter([True, False])

    def work() -> Any:
        model = seeded(with_buffers)
        if next(compiles):
            model[1] = torch.compile(model[1], backend="eager")
        with job.wrap(adamw(model), model) as optimizer:
            train(model, optimizer)
        return [value.clone() for value in model.state_dict().values()]

    one, other = job.run(work)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("overlap", ["auto", "none"])
@pytest.mark.parametrize("whole", ["backward", "step", "compiled_autograd"])
def test_a_training_step_may_be_compiled(jobs: Jobs, whole: str, overlap: str) -> None:
    """Gradients are sent, and steps made, outside of what is compiled."""
    model = mlp()
    compiled_autograd = torch._dynamo.config.patch(compiled_autograd=whole == "compiled_autograd")
    with compiled_autograd, jobs().wrap(adamw(model), model, overlap=overlap) as optimizer:

        def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            if whole == "step":
                optimizer.step()
            return loss

        compiled: Callable[..., torch.Tensor] = torch.compile(backward, backend="aot_eager")
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(compiled(*batch(step, 0)).detach()))
            if whole != "step":
                optimizer.step()
        assert optimizer.version == STEPS
        assert optimizer._steps._sends == (overlap == "auto")
    assert losses == pytest.approx(eager_losses(), abs=1e-5)


def test_a_compiled_step_is_made_as_it_is(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(adamw(model), model)
    loss_of(model, 0, 0).backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"DistributedOptimizer\.step"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.version == 1
