"""psgrad.spawn with functions of PyTorch: what they are given, what comes back, and how they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from torch_support import environment, loss_of, mlp, ps_server, psgrad, weights_of

NO_SERVER: Any = {"server": "127.0.0.1:1"}


class Threaded(torch.nn.Linear):
    """A model that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.lock = threading.Lock()


def tensor() -> torch.Tensor:
    return torch.arange(100_000.0)


def nested() -> dict[str, Any]:
    views = (torch.ones(3, 4)[1:2],)
    return {"epochs": [{"loss": torch.tensor(0.5)}], "model": mlp().state_dict(), "views": views}


def made_by_rank() -> Any:
    return [tensor, lambda: weights_of(mlp()), mlp, nested][int(os.environ["PS_RANK"])]()


def unpicklable() -> Any:
    return {"model": Threaded()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.nn.Module):
        return type(one) is type(other) and same(one.state_dict(), other.state_dict())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_has_tensors_comes_back() -> None:
    results = psgrad.spawn(made_by_rank, workers=4, **NO_SERVER)
    for result, expected in zip(results, [tensor(), weights_of(mlp()), mlp(), nested()], strict=True):
        assert same(result, expected)


def test_what_cannot_be_pickled_is_named_with_rank_and_type() -> None:
    expected = r"^worker 0 returned a builtins.dict that cannot be pickled: cannot pickle '_thread.lock' object$"
    with pytest.raises(psgrad.SpawnError, match=expected) as raised:
        psgrad.spawn(unpicklable, workers=1, **NO_SERVER)
    assert raised.value.rank == 0


def add_one(model: torch.nn.Module) -> float:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    return float(next(model.parameters()).detach().flatten()[0])


def test_each_worker_has_arguments_of_its_own() -> None:
    model = mlp()
    before = weights_of(model)
    first = float(next(model.parameters()).detach().flatten()[0])
    assert psgrad.spawn(add_one, (model,), workers=2, **NO_SERVER) == pytest.approx([first + 1] * 2)
    assert same(before, weights_of(model))


def train(steps: int, fails: bool) -> Any:
    model = mlp()
    optimizer = psgrad.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(steps):
        if fails and optimizer.rank == 1 and step == 5:
            raise ValueError("no data")
        optimizer.zero_grad()
        loss_of(model, step, optimizer.rank).backward()
        optimizer.step()
    return model  # All end with the same weights, as if the script had ended here.


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
def test_trained_models_come_back() -> None:
    one, other = psgrad.spawn(train, (3, False), workers=2)
    assert same(one, other)
    assert not same(one, mlp())


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
def test_forks_finish_too() -> None:
    """A fork ends without an interpreter's exit."""
    code = "import psgrad, test_torch_spawn as t; print(psgrad.spawn(t.forked_train, workers=2, context='fork'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert done.stdout == "[3, 3]\n", done.stderr


def forked_train() -> int:
    train(3, fails=False)
    return 3


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
def test_a_worker_that_fails_does_not_let_the_others_train_to_the_end() -> None:
    """With the example's numbers, they would not come to one."""
    with pytest.raises(psgrad.SpawnError, match="ValueError: no data") as raised:
        psgrad.spawn(train, (10**9, True), workers=2)
    assert raised.value.rank == 1
