"""The servers' steps are those of torch.optim: every class that they have, one worker and two, groups and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from torch_support import Jobs, batch, largest_difference, loss_of, mlp, seeded, weights_of

pytest_plugins = ["torch_fixtures"]

STEPS = 10
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

CLASSES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, eps=1e-6),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.01),
}


def alone(make: Make, workers: int, parameters: Callable[[torch.nn.Module], Any], schedule: Any = None) -> Any:
    """What torch.optim makes of the mean loss of all workers' batches."""
    model = mlp()
    optimizer = make(parameters(model))
    scheduler = schedule(optimizer) if schedule else None
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(workers)) / workers).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return weights_of(model)


def together(
    job: Any, make: Make, parameters: Callable[[torch.nn.Module], Any], schedule: Any = None, **options: Any
) -> Any:
    def work() -> Any:
        model = mlp()
        with job.wrap(make(parameters(model)), model, **options) as optimizer:
            scheduler = schedule(optimizer) if schedule else None
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
                if scheduler:
                    scheduler.step()
        return weights_of(model)

    return job.run(work)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_each_class_steps_as_torch_optim_does(jobs: Jobs, name: str, workers: int) -> None:
    expected = alone(CLASSES[name], workers, lambda model: model.parameters())
    for weights in together(jobs(workers), CLASSES[name], lambda model: model.parameters()):
        assert largest_difference(weights, expected) < 1e-6


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_two_servers_step_as_one_does(jobs: Jobs, name: str) -> None:
    expected = alone(CLASSES[name], 2, lambda model: model.parameters())
    for weights in together(jobs(2, shards=2), CLASSES[name], lambda model: model.parameters()):
        assert largest_difference(weights, expected) < 1e-6


class Branches(torch.nn.Module):
    """Two heads, of which a batch uses one, or none but the body's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 3)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, head: int | None) -> torch.Tensor:
        body = torch.tanh(self.body(x))
        return body if head is None else self.heads[head](body)


def head_of(step: int, rank: int) -> int | None:
    """Nobody uses head 1 in steps 0, 2, 5 and 8, and nobody any head in 5; in steps 1 and 6 one rank alone uses it."""
    if step == 5:
        return None
    if step in (1, 6):
        return rank % 2
    return 1 if step in (3, 4, 7, 9) else 0


def branch_loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return torch.nn.functional.mse_loss(model(x, head_of(step, rank)), y)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["momentum", "adam_l2", "adamw", "adagrad"])
def test_what_no_rank_has_a_gradient_for_is_left_out_of_the_step(
    jobs: Jobs, name: str, workers: int, shards: int
) -> None:
    expected = seeded(Branches)
    reference = CLASSES[name](expected.parameters())
    for step in range(STEPS):
        reference.zero_grad()
        (sum(branch_loss(expected, step, rank) for rank in range(workers)) / workers).backward()
        reference.step()
    job = jobs(workers, shards=shards)

    def work() -> Any:
        model = seeded(Branches)
        with job.wrap(CLASSES[name](model.parameters()), model) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                branch_loss(model, step, optimizer.rank).backward()
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected)) < 1e-6


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_overlap_changes_no_bit(jobs: Jobs, overlap: str) -> None:
    first = together(jobs(2), CLASSES["momentum"], lambda model: model.parameters())
    second = together(jobs(2), CLASSES["momentum"], lambda model: model.parameters(), overlap=overlap)
    assert largest_difference(first[0], second[0]) == 0


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [named["0.weight"]], "weight_decay": 0.0},
        {"params": [named["0.bias"]], "lr": 0.02, "weight_decay": 0.1},
        {"params": [named["2.weight"], named["2.bias"]], "lr": 0.003, "weight_decay": 0.05},
    ]


@pytest.mark.parametrize("name", ["sgd_decay", "adamw"])
def test_groups_have_rates_and_decays_of_their_own(jobs: Jobs, name: str) -> None:
    expected = alone(CLASSES[name], 2, groups)
    for weights in together(jobs(2), CLASSES[name], groups):
        assert largest_difference(weights, expected) < 1e-6


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warmup_from_0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_move_the_servers_rate(jobs: Jobs, name: str) -> None:
    expected = alone(CLASSES["momentum"], 2, lambda model: model.parameters(), SCHEDULES[name])
    for weights in together(jobs(2), CLASSES["momentum"], lambda model: model.parameters(), SCHEDULES[name]):
        assert largest_difference(weights, expected) < 1e-6


def test_a_scheduler_scales_all_groups(jobs: Jobs) -> None:
    expected = alone(CLASSES["sgd_decay"], 1, groups, SCHEDULES["cosine"])
    (weights,) = together(jobs(1), CLASSES["sgd_decay"], groups, SCHEDULES["cosine"])
    assert largest_difference(weights, expected) < 1e-6


# Groups that differ in what servers have no factor of, by class.
OWN: dict[str, tuple[Make, list[dict[str, Any]]]] = {
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        [{}, {"betas": (0.5, 0.9), "lr": 0.02}, {"betas": (0.8, 0.999), "eps": 1e-3, "weight_decay": 0.0}],
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), [{"betas": (0.0, 0.99)}, {"eps": 1e-4}, {}]),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05), [{}, {"momentum": 0.9}, {"momentum": 0.5, "lr": 0.1}]),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), [{"momentum": 0.3}, {}, {}]),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05), [{"lr_decay": 0.5}, {}, {"eps": 0.1}]),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01), [{}, {"alpha": 0.5}, {"alpha": 0.9, "eps": 1e-3}]),
}


def split(own: list[dict[str, Any]]) -> Callable[[torch.nn.Module], list[dict[str, Any]]]:
    def parameters(model: torch.nn.Module) -> list[dict[str, Any]]:
        parts = [["0.weight"], ["0.bias", "2.bias"], ["2.weight"]]
        named = dict(model.named_parameters())
        return [{"params": [named[name] for name in part], **values} for part, values in zip(parts, own, strict=True)]

    return parameters


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", OWN)
def test_groups_have_hyperparameters_of_their_own(jobs: Jobs, name: str, shards: int) -> None:
    make, own = OWN[name]
    expected = alone(make, 2, split(own))
    for weights in together(jobs(2, shards=shards), make, split(own)):
        assert largest_difference(weights, expected) < 1e-6


def each_its_own(optimizer: torch.optim.Optimizer) -> Any:
    rates = [lambda step: 1.0, lambda step: 0.8**step, lambda step: 0.0 if step < 3 else 0.5]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


class Averaging:
    """As torch.optim.swa_utils is used: one schedule, and from some step on SWALR with a rate for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.before = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.after = torch.optim.swa_utils.SWALR(optimizer, [0.02, 0.01, 0.03], anneal_epochs=3)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        (self.before if self.steps < 5 else self.after).step()


def cycles(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05, 0.02][: len(optimizer.param_groups)], STEPS + 1)


class Moves:
    """Whatever a script changes by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.groups[1]["weight_decay"] = 0.01 * self.steps
        self.groups[2]["lr"] *= 0.9
        if "betas" in self.groups[0]:
            self.groups[0]["betas"] = (0.9 - 0.05 * self.steps, 0.999)
            self.groups[2]["eps"] = 1e-8 * 10**self.steps


EACH: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "two_lambdas": ("sgd_decay", each_its_own),
    "two_lambdas_of_adamw": ("adamw", each_its_own),
    "averaging": ("momentum", Averaging),
    "onecycle_of_sgd": ("momentum", cycles),
    "onecycle_of_adam": ("adam", cycles),
    "moves": ("sgd_decay", Moves),
    "moves_of_adamw": ("adamw", Moves),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", EACH)
def test_schedulers_move_each_group_by_itself(jobs: Jobs, name: str, shards: int) -> None:
    make, schedule = CLASSES[EACH[name][0]], EACH[name][1]
    parameters = split([{}, {"lr": 0.02, "weight_decay": 0.1}, {}])
    expected = alone(make, 2, parameters, schedule)
    for weights in together(jobs(2, shards=shards), make, parameters, schedule):
        assert largest_difference(weights, expected) < 1e-6


@pytest.mark.parametrize("name", ["momentum", "adam", "adam_l2", "adamw"])
def test_a_scheduler_cycles_the_servers_momentum(jobs: Jobs, name: str) -> None:
    """OneCycleLR as it comes (cycle_momentum=True), with one group."""
    expected = alone(CLASSES[name], 2, lambda model: model.parameters(), cycles)
    for weights in together(jobs(2), CLASSES[name], lambda model: model.parameters(), cycles):
        assert largest_difference(weights, expected) < 1e-6


def test_where_every_push_is_a_version_groups_are_told_too(jobs: Jobs) -> None:
    parameters = split([{}, {"momentum": 0.5, "lr": 0.02}, {}])
    expected = alone(CLASSES["momentum"], 1, parameters, each_its_own)
    (weights,) = together(jobs(1, "asp"), CLASSES["momentum"], parameters, each_its_own)
    assert largest_difference(weights, expected) < 1e-6


def test_a_scheduler_of_the_wrapped_optimizer_moves_the_servers_rate(
    jobs: Jobs, recwarn: pytest.WarningsRecorder
) -> None:
    expected = alone(CLASSES["sgd"], 1, lambda model: model.parameters(), SCHEDULES["step"])
    job = jobs(1)
    model = mlp()
    inner = CLASSES["sgd"](model.parameters())
    scheduler = SCHEDULES["step"](inner)
    with job.wrap(inner, model) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
            scheduler.step()
    assert largest_difference(weights_of(model), expected) < 1e-6
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_samples_weight_the_workers(jobs: Jobs) -> None:
    """Batches of 2 and 6 samples, weighted, are one batch of 8."""
    sizes = {0: 2, 1: 6}
    expected_model = mlp()
    optimizer = CLASSES["momentum"](expected_model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, size in sizes.items():
            (loss_of(expected_model, step, rank, size) * size / 8).backward()
        optimizer.step()
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        with job.wrap(CLASSES["momentum"](model.parameters()), model, samples=2) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank, sizes[optimizer.rank]).backward()
                optimizer.set_samples(sizes[optimizer.rank])
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected_model)) < 1e-6


def test_the_norm_is_clipped_after_averaging(jobs: Jobs) -> None:
    expected = mlp()
    optimizer = CLASSES["momentum"](expected.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(expected, step, rank) for rank in range(2)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
        optimizer.step()
    for weights in together(jobs(2), CLASSES["momentum"], lambda model: model.parameters(), clip_norm=0.3):
        assert largest_difference(weights, weights_of(expected)) < 1e-6
