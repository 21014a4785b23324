"""What servers do not have, or would silently do otherwise than torch, is refused by name with what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_support import Jobs, loss_of, mlp, weights_of

pytest_plugins = ["torch_fixtures"]

SGD = torch.optim.SGD
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "Adadelta": (lambda p: torch.optim.Adadelta(p), "Adadelta.*SGD, Adam, AdamW, Adagrad and RMSprop"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p), r"LBFGS: its step\(closure\) computes several gradients"),
    "subclass": (lambda p: type("Mine", (SGD,), {})(p, lr=0.1), "Mine"),
    "dampening": (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
    "maximize": (lambda p: SGD(p, lr=0.1, maximize=True), "maximize"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
    "centered": (lambda p: torch.optim.RMSprop(p, centered=True), "centered"),
    "rmsprop_momentum": (lambda p: torch.optim.RMSprop(p, momentum=0.9), "momentum"),
    "lr_0": (lambda p: SGD(p, lr=0.0), "lr is 0"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_the_servers_do_not_have(fakes: Jobs, name: str) -> None:
    make, text = OPTIMIZERS[name]
    model = mlp()
    with pytest.raises(ValueError, match=text):
        fakes().wrap(make(model.parameters()), model)


def test_samples_that_the_chief_has_not_handed_out(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    optimizer.client.hands_out_runs = True
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"--budget=job.*psgrad\.data\.Batches.*DistributedSampler"):
        optimizer.step()
    optimizer.client.has_taken_runs = True
    optimizer.step()


def test_groups_that_differ_in_what_is_the_same_for_all(fakes: Jobs) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "nesterov": True}]
    with pytest.raises(ValueError, match=r"param_groups\[1\] has nesterov=True and param_groups\[0\] False"):
        fakes().wrap(SGD(groups, lr=0.1, momentum=0.9), model)


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_what_was_0_in_a_group_and_comes_to_be_more(fakes: Jobs, key: str) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), key: 0.0}]
    optimizer = fakes().wrap(SGD(groups, lr=0.1, weight_decay=0.1), model)
    optimizer.param_groups[1][key] = 0.05
    with pytest.raises(ValueError, match=rf"param_groups\[1\]: {key} has changed from 0 to 0.05 after the join"):
        loss_of(model, 0, 0).backward()


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_momentum_that_comes_or_goes(fakes: Jobs, before: float, after: float) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1, momentum=before), model)
    optimizer.param_groups[0]["momentum"] = after
    with pytest.raises(ValueError, match=rf"momentum has changed from {before} to {after}"):
        loss_of(model, 0, 0).backward()


def test_what_is_fixed_at_the_join(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(ValueError, match=r"param_groups\[0\]: nesterov has changed from False to True after the join"):
        loss_of(model, 0, 0).backward()


def test_arguments(fakes: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    job = fakes()
    for options, error in [
        ({"overlap": "forward"}, ValueError),
        ({"unused": "zero"}, ValueError),
        ({"buffers": "rank1"}, ValueError),
        ({"accumulate": 0}, ValueError),
        ({"accumulate": 1.5}, TypeError),
        ({"samples": -1}, ValueError),
        ({"clip_norm": 0.0}, ValueError),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            job.wrap(optimizer, model, **options)
    job.address = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"PS_SERVER"):
        job.wrap(optimizer, model)
    for name in ("RANK", "PS_RANK"):  # The second wins.
        monkeypatch.setenv(name, "one")
        with pytest.raises(ValueError, match=rf"\${name} is 'one'"):
            fakes().wrap(optimizer, model)


def test_the_server_of_the_environment(fakes: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = fakes()
    monkeypatch.setenv("PS_SERVER", job.address)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PS_RANK", "0")
    job.address = None  # type: ignore[assignment]
    model = mlp()
    assert job.wrap(SGD(model.parameters(), lr=0.1), model).rank == 0


def test_parameters_that_the_model_does_not_have(fakes: Jobs) -> None:
    model, other = mlp(), mlp()
    with pytest.raises(ValueError, match=r"4 parameters that the model does not have"):
        fakes().wrap(SGD([*model.parameters(), *other.parameters()], lr=0.1), model)


def test_float64_is_refused_by_name(fakes: Jobs) -> None:
    model = mlp()
    model[2].double()
    with pytest.raises(ValueError, match=r"2.weight is float64"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)


def test_lazy_modules_are_refused(fakes: Jobs) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"1.weight has no shape yet"):
        fakes().wrap(SGD(model[0].parameters(), lr=0.1), model)


def test_different_tensors_in_one_memory_are_refused(fakes: Jobs) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"0.weight and 1.weight are different tensors in the same memory"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    """A process group of torch.distributed."""
    address = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_pieces_of_tensors_are_refused(fakes: Jobs, one_process: torch.distributed.device_mesh.DeviceMesh) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = mlp()
    model[0].weight = torch.nn.Parameter(distribute_tensor(model[0].weight.detach(), one_process))
    with pytest.raises(ValueError, match=r"0\.weight is a DTensor.*Give it the plain model"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    model = mlp()
    fully_shard(model[2], mesh=one_process)
    with pytest.raises(ValueError, match=r"model \(2\): FSDP has cut.*Give it the plain model"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    sharded = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model: FSDP has cut"):
        fakes().wrap(SGD(sharded.parameters(), lr=0.1), sharded)


def test_grad_scaler_is_refused_by_name_where_scaled_gradients_are_to_leave_in_backward(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, overlap="backward")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r'torch.amp.GradScaler takes this step.*overlap="none"'):
        scaler.step(optimizer)


def test_a_disabled_grad_scaler_does_nothing(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.version == 1


def test_groups_and_copies(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(RuntimeError, match=r"add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"belongs to its process"):
            copied(optimizer)
    with pytest.raises(TypeError, match=r"already"):
        fakes().wrap(optimizer, model)
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_a_model_is_trained_by_one_optimizer(fakes: Jobs) -> None:
    model = mlp()
    first = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(RuntimeError, match=r"finish\(\)"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    first.finish()
    second = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, 0, 0).backward()
    second.step()
    assert second.version == 1


@pytest.mark.parametrize("overlap", ["auto", "backward", "none"])
def test_step_without_a_gradient(fakes: Jobs, overlap: str) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, overlap=overlap)
    with pytest.raises(RuntimeError, match=r"step 0: step\(\) without a backward\(\): no parameter has a gradient"):
        optimizer.step()
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"step 1: step\(\) without a backward\(\)"):
        optimizer.step()
    loss_of(model, 1, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient" if overlap != "backward" else "was changed"):
        optimizer.step()
    optimizer.empty_step()
    assert optimizer.version == 2


def test_step_with_the_last_steps_gradients(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, overlap="backward")
    loss_of(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step 1: step\(\) without a backward\(\) since the last one"):
        optimizer.step()


def test_a_second_backward_before_step(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, overlap="backward")
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"a second backward\(\) before step\(\).*accumulate="):
        loss_of(model, 0, 0).backward()
    before = weights_of(model)
    optimizer.empty_step()  # As the sentence says, the step can be dropped.
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)


def scale(model: torch.nn.Module) -> None:
    model[2].weight.grad.mul_(2)  # type: ignore[index]


def replace(model: torch.nn.Module) -> None:
    model[2].weight.grad = model[2].weight.grad * 2  # type: ignore[index]


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("change", [scale, replace, clip])
def test_a_gradient_that_is_changed_after_it_was_sent(fakes: Jobs, change: Callable[[Any], None]) -> None:
    model = mlp()  # Biases come first in backward, and 0.weight's may be the one that waits for step().
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, overlap="backward")
    loss_of(model, 0, 0).backward()
    change(model)
    with pytest.raises(RuntimeError, match=r"(0|2)\.weight.*was changed after backward\(\).*clip_norm="):
        optimizer.step()
    optimizer.empty_step()
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    optimizer.step()
    assert optimizer.version == 2


def test_memory_that_was_changed_after_wrapping_is_noticed(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    model[2].weight.data = model[2].weight.data.clone()
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"2.weight: its memory is not the one"):
        optimizer.step()


def test_state_is_not_pretended(fakes: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"] == {}
    assert state["param_groups"][0]["lr"] == 0.1
    assert "on the servers" in caplog.text
    state["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    with pytest.raises(ValueError, match=r"which the servers hold"):
        optimizer.load_state_dict({**state, "state": {0: {"momentum_buffer": torch.zeros(1)}}})
    with pytest.raises(ValueError, match=r"groups are others"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_an_old_torch_is_refused_by_name() -> None:
    import psgrad.torch

    with pytest.raises(ImportError, match=r"needs PyTorch 2.1 or later.*this is 1.13.1"):
        psgrad.torch._check_version("1.13.1+cpu")
    for version in ("2.1.0", "2.15.0+cu132", "2.2.0a0+git1234", "3.0.0"):
        psgrad.torch._check_version(version)


def test_more_groups_than_servers_number_may_differ_in_what_factors_say(fakes: Jobs) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(1030)])
    groups = [{"params": [each], "lr": 0.1 * (1 + index % 2)} for index, each in enumerate(model)]
    optimizer = fakes().wrap(torch.optim.SGD(groups, lr=0.1), model)

    def step() -> None:
        optimizer.zero_grad()
        torch.cat(list(model)).sum().backward()
        optimizer.step()

    step()
    assert [round(each.item(), 6) for each in model[:2]] == [0.9, 0.8]
    optimizer.param_groups[1029]["lr"] = 0.05
    with pytest.raises(ValueError, match=r"there are 1030 param_groups: of more than 1024 only lr and weight_decay"):
        step()
