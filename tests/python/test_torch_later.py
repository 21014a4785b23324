"""start="later": what is loaded after the optimizer is wrapped, and before the first forward pass, begins the job."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from torch_support import Jobs, largest_difference, loss_of, mlp, weights_of

pytest_plugins = ["torch_fixtures"]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_loaded_after_the_wrap_begins_the_job(reals: Jobs, shards: int) -> None:
    expected = mlp()
    reference = adam(expected)
    train(expected, reference, range(5))
    saved = copy.deepcopy({"model": expected.state_dict(), "opt": reference.state_dict()})
    saved["opt"]["param_groups"][0]["lr"] = reference.param_groups[0]["lr"] = 0.02
    train(expected, reference, range(5, 10))
    job = reals(2, shards=shards)
    seeds = iter([3, 4])

    def work() -> dict[str, torch.Tensor]:
        model = mlp(next(seeds))
        with job.wrap(adam(model), model, start="later") as optimizer:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["opt"]))
            train(model, optimizer, range(5, 10))
            return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected)) < 1e-6


def test_the_first_forward_pass_of_a_module_brings_the_jobs_weights(reals: Jobs) -> None:
    job = reals(2)
    seeds = iter([1, 2])

    def work() -> Any:
        model = mlp(next(seeds))
        own = weights_of(model)
        with job.wrap(adam(model), model, start="later") as optimizer:
            before = weights_of(model)
            model[0](torch.zeros(1, 6))
            return optimizer.rank, own, before, weights_of(model)

    results = sorted(job.run(work), key=lambda result: result[0])
    for _, own, before, after in results:
        assert largest_difference(before, own) == 0
        assert largest_difference(after, results[0][3]) == 0
    assert largest_difference(results[0][1], results[1][1]) > 0


def test_a_gradient_from_before_the_start_is_refused(reals: Jobs) -> None:
    model = mlp()
    optimizer = reals(1).wrap(adam(model), model, start="later")
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight.* had a gradient before the job was started"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.start()
    train(model, optimizer, range(1))
    assert optimizer.step_number == 1
    optimizer.finish()


def test_a_compiled_function_needs_the_start_before_it(reals: Jobs) -> None:
    expected, model = mlp(), mlp()
    reference = adam(expected)
    with reals(1).wrap(adam(model), model, start="later") as optimizer:
        optimizer.start()
        compiled = torch.compile(lambda step: loss_of(model, step, 0), backend="eager")
        for step in range(3):
            for each, kind, loss in ((expected, reference, None), (model, optimizer, compiled)):
                kind.zero_grad()
                (loss_of(each, step, 0) if loss is None else loss(step)).backward()
                kind.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


@pytest.mark.parametrize("end", ["finish", "leave"])
def test_a_script_that_never_uses_it_ends_in_order(reals: Jobs, end: str) -> None:
    model = mlp()
    optimizer = reals(1).wrap(adam(model), model, start="later")
    if end == "finish":
        optimizer.finish()
    else:
        optimizer.leave("no data")
    model(torch.zeros(1, 6))  # It is the user's again.
    with pytest.raises(RuntimeError, match="has left the job"):
        optimizer.step()


def test_state_after_the_start_is_refused(reals: Jobs) -> None:
    model = mlp()
    with reals(1).wrap(adam(model), model, start="later") as optimizer:
        train(model, optimizer, range(1))
        with pytest.raises(ValueError, match="which the servers hold"):
            optimizer.load_state_dict(optimizer.state_dict(full=True))


def test_local_modes_begin_with_it_too(reals: Jobs) -> None:
    expected = mlp()
    reference = torch.optim.Adadelta(expected.parameters())
    train(expected, reference, range(3))
    saved = copy.deepcopy({"model": expected.state_dict(), "opt": reference.state_dict()})
    train(expected, reference, range(3, 7))
    flags = ("--local_steps=2", "--outer_lr=1", "--outer_momentum=0")
    model = mlp(5)
    inner = torch.optim.Adadelta(model.parameters())
    with reals(1, "diloco", *flags).wrap(inner, model, start="later") as optimizer:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
        train(model, optimizer, range(3, 7))
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-5


def test_other_words_are_refused(fakes: Jobs) -> None:
    model = mlp()
    with pytest.raises(ValueError, match="start='never': one of 'now', 'later' is expected"):
        fakes().wrap(adam(model), model, start="never")
