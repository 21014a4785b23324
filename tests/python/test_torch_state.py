"""The optimizer's state goes from torch.optim to the servers, and back: nothing of it is lost on the way."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import psgrad
from server_processes import Restartable
from torch_support import Job, Jobs, largest_difference, loss_of, mlp, weights_of

pytest_plugins = ["torch_fixtures"]

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
Saved = dict[str, Any]

CLASSES: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.01),
}
WORKERS = 2


def through_a_file(saved: Saved) -> Saved:
    """What torch.load makes of it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def made(make: Make, saved: Saved | None = None, model: Callable[[], Any] = mlp) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer, as they begin or as they were saved."""
    network = model()
    optimizer = make(network.parameters())
    if saved is not None:
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["opt"]))  # It keeps the counts, and goes on with them.
    return network, optimizer


def alone(make: Make, steps: range, saved: Saved | None = None) -> Saved:
    """What torch.optim makes of the mean loss of all workers' batches."""
    model, optimizer = made(make, saved)
    for step in steps:
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(WORKERS)) / WORKERS).backward()
        optimizer.step()
    return through_a_file({"model": model.state_dict(), "opt": optimizer.state_dict()})


def together(job: Job, make: Make, steps: range, saved: Saved | None = None) -> list[Saved]:
    """The same, from a job; what each worker saves before it ends."""

    def work() -> Saved:
        model, inner = made(make, saved)
        with job.wrap(inner, model) as optimizer:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
            return through_a_file({"model": model.state_dict(), "opt": optimizer.state_dict(full=True)})

    results = job.run(work)
    return [result for result in results if isinstance(result, dict)]


def difference_of_states(one: Saved, other: Saved) -> float:
    """The largest. The keys must be the same."""
    largest = 0.0
    assert one["opt"]["state"].keys() == other["opt"]["state"].keys()
    for index, state in one["opt"]["state"].items():
        assert state.keys() == other["opt"]["state"][index].keys()
        for name, value in state.items():
            counterpart = other["opt"]["state"][index][name]
            assert value.dtype == counterpart.dtype
            assert value.shape == counterpart.shape
            largest = max(largest, float((value - counterpart).abs().max()))
    return largest


@pytest.mark.parametrize("name", CLASSES)
def test_a_job_goes_on_from_a_plain_run_of_torch_optim(reals: Jobs, name: str) -> None:
    make = CLASSES[name]
    expected = alone(make, range(10))
    for saved in together(reals(WORKERS, shards=2), make, range(5, 10), alone(make, range(5))):
        assert largest_difference(saved["model"], expected["model"]) < 1e-6
        assert difference_of_states(saved, expected) < 1e-6


@pytest.mark.parametrize("name", CLASSES)
def test_torch_optim_goes_on_from_a_job(reals: Jobs, name: str) -> None:
    make = CLASSES[name]
    expected = alone(make, range(10))
    for saved in together(reals(WORKERS, shards=2), make, range(5)):
        went_on = alone(make, range(5, 10), saved)
        assert largest_difference(went_on["model"], expected["model"]) < 1e-6
        assert difference_of_states(went_on, expected) < 1e-6


@pytest.mark.parametrize("name", CLASSES)
def test_a_job_goes_on_from_another_to_the_bit(reals: Jobs, name: str) -> None:
    make = CLASSES[name]
    whole = together(reals(WORKERS, shards=2), make, range(10))
    first, second = together(reals(WORKERS), make, range(5))
    assert difference_of_states(first, second) == 0
    for saved in together(reals(WORKERS, shards=2), make, range(5, 10), first):
        assert largest_difference(saved["model"], whole[0]["model"]) == 0
        assert difference_of_states(saved, whole[0]) == 0


@pytest.mark.parametrize("mode", ["asp", "ssp", "backup"])
def test_other_modes_have_the_state_of_the_newest_version(reals: Jobs, mode: str) -> None:
    make = CLASSES["adam"]
    for saved in together(reals(WORKERS, mode, shards=2), make, range(5)):
        steps = {float(state["step"]) for state in saved["opt"]["state"].values()}
        assert min(steps) >= 5
        assert max(steps) <= 10
        assert mode != "backup" or len(steps) == 1  # One version of both servers.
        alone(make, range(5, 6), saved)


def test_all_workers_may_fetch_it_in_each_step(reals: Jobs) -> None:
    """Servers let few read at once; the others ask again."""
    workers = 5
    job = reals(workers, shards=2)

    def work() -> list[int]:
        model, inner = made(CLASSES["adamw"])
        counts = []
        with job.wrap(inner, model) as optimizer:
            for step in range(3):
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
                state = optimizer.state_dict(full=True)["state"]
                assert {float(each["step"]) for each in state.values()} == {step + 1.0}
                counts.append(len(state))
        return counts

    assert job.run(work) == [[4, 4, 4]] * workers


def test_while_a_job_goes_on_the_newest_state_is_that_of_one_version(reals: Jobs) -> None:
    job = reals(1, shards=2)
    model, inner = made(CLASSES["momentum"])
    with job.wrap(inner, model) as optimizer, ThreadPoolExecutor(1) as other:
        pulls = other.submit(lambda: [optimizer.client.pull_state() for _ in range(5)])
        while not pulls.done():
            optimizer.zero_grad()
            loss_of(model, 0, 0).backward()
            optimizer.step()
        for state in pulls.result():
            assert len({entry[0] for entry in state}) == 1


class Partly(torch.nn.Module):
    """One layer is frozen, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.layers[0].bias.requires_grad_(False)
        self.spare = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_parameters_without_a_step_have_state_as_torch_optim_has_it(reals: Jobs, name: str) -> None:
    expected, reference = made(CLASSES[name], model=Partly)
    for step in range(4):
        reference.zero_grad()
        loss_of(expected, step, 0).backward()
        reference.step()

    def train(steps: range, saved: Saved | None) -> Saved:
        model, inner = made(CLASSES[name], saved, model=Partly)
        with reals(1).wrap(inner, model) as optimizer:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step, 0).backward()
                optimizer.step()
            return through_a_file({"model": model.state_dict(), "opt": optimizer.state_dict(full=True)})

    saved = train(range(2, 4), train(range(2), None))
    assert largest_difference(saved["model"], weights_of(expected)) < 1e-6
    assert difference_of_states(saved, {"opt": reference.state_dict()}) < 1e-6


@pytest.mark.parametrize("kind", ["channels_last", "bfloat16"])
def test_state_of_tensors_that_are_kept_as_float32_fits_torch_optim(reals: Jobs, kind: str) -> None:
    def network() -> Any:
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, 4, 2)
        return layer.to(memory_format=torch.channels_last) if kind == "channels_last" else layer.bfloat16()

    model = network()
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(model.weight.dtype)
    with reals(1).wrap(CLASSES["adam"](model.parameters()), model) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        saved = through_a_file(optimizer.state_dict(full=True))
        gradient = model.weight.grad.clone()
    state = saved["state"][0]
    assert float(state["step"]) == 2
    assert state["exp_avg"].dtype == torch.float32
    assert state["exp_avg"].stride() == model.weight.stride()
    assert state["exp_avg"].sign().equal(gradient.float().sign())  # The gradients of both steps are much the same.
    plain = network()
    loaded = CLASSES["adam"](plain.parameters())
    loaded.load_state_dict(copy.deepcopy(saved))
    plain(x).square().mean().backward()
    loaded.step()
    assert float(loaded.state[plain.weight]["step"]) == 3
    again = network()
    inner = CLASSES["adam"](again.parameters())
    inner.load_state_dict(saved)
    with reals(1).wrap(inner, again) as optimizer:
        brought = optimizer.state_dict(full=True)["state"][0]
        assert float(brought["step"]) == 2
        assert brought["exp_avg"].equal(state["exp_avg"].to(again.weight.dtype).float())


def test_servers_that_go_on_from_a_checkpoint_have_their_own_state(
    reals: Jobs, restartable: Restartable, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(restartable.start(1), 1)
    saved = alone(CLASSES["adam"], range(5))

    def train(steps: range) -> Saved:
        model, inner = made(CLASSES["adam"], saved)
        with job.wrap(inner, model) as optimizer:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step, 0).backward()
                optimizer.step()
            return through_a_file(optimizer.state_dict(full=True))

    with caplog.at_level(logging.WARNING, logger="psgrad"):
        first = train(range(2))
        assert "is not used" not in caplog.text
        assert restartable.wait() == [0]
        restartable.start_again()
        second = train(range(0))
    assert float(first["state"][0]["step"]) == 7
    assert float(second["state"][0]["step"]) == 7
    assert second["state"][3]["exp_avg"].equal(first["state"][3]["exp_avg"])
    assert "that this worker has is not used" in caplog.text


def test_servers_that_restore_a_checkpoint_keep_its_counts(reals: Jobs, restartable: Restartable) -> None:
    saved = alone(CLASSES["adam"], range(5))
    job = Job(restartable.start(1, every="1"), 1)
    expected = alone(CLASSES["adam"], range(5, 8), saved)
    model, inner = made(CLASSES["adam"], saved)
    with job.wrap(inner, model) as optimizer:
        for step in range(5, 7):
            optimizer.zero_grad()
            (sum(loss_of(model, step, rank) for rank in range(WORKERS)) / WORKERS).backward()
            optimizer.step()
        restartable.kill()
        restartable.start_again()
        state = optimizer.state_dict(full=True)
        went_back = optimizer.rolled_back_to
        for step in range(5 + optimizer.step_number, 8):
            optimizer.zero_grad()
            (sum(loss_of(model, step, rank) for rank in range(WORKERS)) / WORKERS).backward()
            optimizer.step()
        after = optimizer.state_dict(full=True)
    assert went_back is not None
    assert float(state["state"][0]["step"]) == 5 + went_back
    assert float(after["state"][0]["step"]) == 8
    assert largest_difference(weights_of(model), expected["model"]) < 1e-6


# ---- What is refused


def test_modes_with_local_steps_have_their_state_here(reals: Jobs) -> None:
    model, inner = made(CLASSES["adam"], alone(CLASSES["adam"], range(3)))
    with reals(1, "local_sgd", "--local_steps=2").wrap(inner, model) as optimizer:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        assert float(optimizer.state_dict(full=True)["state"][0]["step"]) == 4
        with pytest.raises(psgrad.Refused, match="--mode=local_sgd: the optimizers are the workers' own"):
            optimizer.client.pull_state()


def test_a_group_without_momentum_comes_first(reals: Jobs) -> None:
    def groups(model: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        rest = {"params": parameters[1:], "momentum": 0.9}
        return torch.optim.SGD([{"params": parameters[:1], "momentum": 0.0}, rest], lr=0.05)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()

    expected, model, after = mlp(), mlp(), mlp()
    reference, optimizer = groups(expected), groups(model)
    train(expected, reference, range(9))
    train(model, optimizer, range(3))
    with reals(1).wrap(optimizer, model) as wrapped:
        train(model, wrapped, range(3, 6))
        saved = wrapped.state_dict(full=True)
        after.load_state_dict(model.state_dict())
    last = groups(after)
    last.load_state_dict(saved)
    train(after, last, range(6, 9))
    assert largest_difference(weights_of(after), weights_of(expected)) < 1e-6


def test_a_worker_that_has_loaded_another_file_is_told(reals: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job = reals(2)
    seeds = iter([1, 2])

    def work() -> None:
        model = mlp(next(seeds))
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, 0, 0).backward()
        optimizer.step()
        with job.wrap(optimizer, model):
            pass

    job.run(work)
    assert caplog.text.count("the job began with other weights than this worker has loaded") == 1


@pytest.mark.parametrize(
    ("name", "value"), [("exp_avg_sq", -1.0), ("exp_avg", float("nan")), ("exp_avg_sq", float("inf"))]
)
def test_values_that_state_cannot_have_are_refused_by_name(fakes: Jobs, name: str, value: float) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.state[model[0].bias][name][0] = value
    with pytest.raises(ValueError, match=rf"0\.bias: {name} of the optimizer's state has values that cannot be"):
        fakes().wrap(optimizer, model)


def test_groups_of_another_optimizer_are_refused_by_name(fakes: Jobs) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(ValueError, match=r"param_groups\[0\] has no momentum, which SGD has"):
        fakes().wrap(optimizer, model)


def test_state_of_another_optimizer_is_refused_before_the_join(fakes: Jobs) -> None:
    model, inner = made(CLASSES["adam"])
    inner.state[model[0].weight] = {"momentum_buffer": torch.zeros(5, 6)}
    with pytest.raises(ValueError, match=r"0.weight: the optimizer's state has momentum_buffer, and Adam.* exp_avg"):
        fakes(1).wrap(inner, model)


def test_state_of_another_shape_is_refused_by_name(fakes: Jobs) -> None:
    model, inner = made(CLASSES["momentum"])
    inner.state[model[2].bias] = {"momentum_buffer": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"2.bias: momentum_buffer of the optimizer's state is \(4,\), .* \(3,\)"):
        fakes(1).wrap(inner, model)


def test_state_that_is_not_finite_is_refused_by_name(reals: Jobs) -> None:
    model, inner = made(CLASSES["momentum"])
    inner.state[model[2].bias] = {"momentum_buffer": torch.full((3,), float("nan"))}
    with pytest.raises(
        ValueError, match=r"2\.bias: momentum_buffer of the optimizer's state has values that cannot be"
    ):
        reals(1).wrap(inner, model)


def test_state_that_the_servers_optimizer_has_not_is_refused(reals: Jobs) -> None:
    """A client of one's own may bring what it likes."""
    job = reals(1)
    layout = [psgrad.Tensor("w", (4,)), psgrad.Tensor("c", (2,), kind="constant")]
    settings = psgrad.OptimizerSettings("adam", {"learning_rate": 0.1})
    with psgrad.Client.join(job.address, layout, optimizer=settings) as client:
        weights = client.weight_buffers()
        with pytest.raises(ValueError, match="1 entries for a model of 2"):
            client.start(weights, weights, state=[None])
        with pytest.raises(ValueError, match=r"tensor c.*no weight"):
            client.start(weights, weights, state=[None, (1, [torch.zeros(2)])])
        with pytest.raises(ValueError, match="has 1 tensors, and the servers' optimizer needs 2"):
            client.start(weights, weights, state=[(3, [torch.zeros(4)]), None])
        client.start(weights, weights, state=[(3, [torch.ones(4), torch.ones(4)]), None])
        state = client.pull_state()
        assert state[1] is None
        assert state[0] is not None
        assert state[0][0] == 3
        with pytest.raises(psgrad.Error, match="version 7"):
            client.pull_state(version=7)
        client.done()


def test_state_is_not_fetched_after_the_end(reals: Jobs) -> None:
    model, inner = made(CLASSES["adam"])
    optimizer = reals(1).wrap(inner, model)
    optimizer.finish()
    with pytest.raises(RuntimeError, match="finish"):
        optimizer.state_dict(full=True)
    assert optimizer.state_dict()["state"] == {}
