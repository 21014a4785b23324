"""Modes in which the worker takes steps by itself: the wrapped optimizer does, and differences are exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_client import LocalSteps
from torch_support import Jobs, largest_difference, loss_of, mlp, psgrad, seeded, weights_of

pytest_plugins = ["torch_fixtures"]

STEPS = 4
STEPS_OF_ONE_BATCH = psgrad.torch.optimizer._STEPS_OF_ONE_BATCH
LOCAL = LocalSteps("average_weights", steps=STEPS, optimizer="momentum")


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def average(models: list[torch.nn.Module]) -> None:
    with torch.no_grad():
        for together in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(together) / len(together)
            for parameter in together:
                parameter.copy_(mean)


@pytest.mark.parametrize("batches", [8, 10])
def test_local_sgd_averages_weights_after_each_round(jobs: Jobs, batches: int) -> None:
    """The last round may be shorter. State is each worker's own."""
    models = [mlp(), mlp()]
    optimizers = [momentum(model) for model in models]
    for step in range(batches):
        for rank in range(2):
            optimizers[rank].zero_grad()
            loss_of(models[rank], step, rank).backward()
            optimizers[rank].step()
        if (step + 1) % STEPS == 0 or step + 1 == batches:
            average(models)  # type: ignore[arg-type]
    job = jobs(2, "local_sgd", f"--local_steps={STEPS}", local=LOCAL)

    def work() -> Any:
        model = mlp()
        with job.wrap(momentum(model), model) as optimizer:
            for step in range(batches):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
            assert optimizer.state_dict()["state"]
        assert optimizer.version == -(-batches // STEPS)
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(models[0])) < 2e-6


def test_local_sgd_has_the_schedulers_rate(jobs: Jobs) -> None:
    def train(model: torch.nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
            scheduler.step()

    expected, model = mlp(), mlp()
    train(expected, momentum(expected))
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model) as optimizer:
        train(model, optimizer)
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_local_sgd_averages_gradients_in_between(jobs: Jobs) -> None:
    """Every 2nd batch the gradient is pushed instead of applied, and after every 6th weights are averaged."""
    local = LocalSteps("average_gradients", steps=2, average_every_steps=6, optimizer="sgd")
    flags = ("--local_sync=gradients", "--local_steps=2", "--average_every=6")
    models = [mlp(), mlp()]
    servers = mlp()  # Takes the averaged gradients, from the last averaging of weights on.
    for number in range(1, 13):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, number, rank).backward()
        with torch.no_grad():
            for place, (one, other) in enumerate(zip(models[0].parameters(), models[1].parameters(), strict=True)):
                server = list(servers.parameters())[place]
                if number % 6 and number % 2 == 0:
                    mean = (one.grad + other.grad) / 2  # type: ignore[operator]
                    for weights in (one, other, server):
                        weights.sub_(0.1 * mean)
                    continue
                one.sub_(0.1 * one.grad)  # type: ignore[operator]
                other.sub_(0.1 * other.grad)  # type: ignore[operator]
        if number % 6 == 0:
            average([models[0], models[1]])
    job = jobs(2, "local_sgd", *flags, local=local)

    def work() -> Any:
        model = mlp()
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
            for number in range(1, 13):
                optimizer.zero_grad()
                loss_of(model, number, optimizer.rank).backward()
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(models[0])) < 2e-6


def test_averaged_gradients_leave_a_parameter_that_has_none(jobs: Jobs) -> None:
    """The servers' step has no decay of it, as the worker's own steps have none."""
    local = LocalSteps("average_gradients", steps=1, average_every_steps=4, optimizer="sgd")
    flags = ("--local_sync=gradients", "--local_steps=1", "--average_every=4")
    job = jobs(2, "local_sgd", *flags, local=local)

    def work() -> Any:
        model = seeded(lambda: torch.nn.ModuleList([torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)]))
        before = weights_of(model)
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model) as optimizer:
            for number in range(8):
                optimizer.zero_grad()
                loss_of(model[0], number, optimizer.rank).backward()
                optimizer.step()
        after = weights_of(model)
        assert torch.equal(before["1.weight"], after["1.weight"])
        assert not torch.equal(before["0.weight"], after["0.weight"])

    job.run(work)


def test_easgd_draws_worker_and_centre_together(jobs: Jobs) -> None:
    alpha, rounds = 0.4, 3
    local = LocalSteps("elastic", steps=STEPS, alpha=alpha, optimizer="momentum")
    expected = mlp()
    centre = copy.deepcopy(expected)
    reference = momentum(expected)
    for step in range(rounds * STEPS):
        reference.zero_grad()
        loss_of(expected, step, 0).backward()
        reference.step()
        if (step + 1) % STEPS == 0:
            with torch.no_grad():
                for x, c in zip(expected.parameters(), centre.parameters(), strict=True):
                    difference = alpha * (x - c)
                    x.sub_(difference)
                    c.add_(difference)
    own: dict[str, torch.Tensor] = {}
    model = mlp()
    flags = (f"--local_steps={STEPS}", f"--easgd_alpha={alpha}")
    with jobs(1, "easgd", *flags, local=local).wrap(momentum(model), model) as optimizer:
        for step in range(rounds * STEPS):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
        own = weights_of(model)
    assert largest_difference(own, weights_of(expected)) < 2e-6
    assert largest_difference(weights_of(model), weights_of(centre)) < 2e-6  # At the end it has the servers'.
    assert optimizer.version == rounds


def test_buffers_and_half_precision_are_averaged_too(jobs: Jobs) -> None:
    job = jobs(2, "local_sgd", "--local_steps=2", local=LocalSteps("average_weights", steps=2, optimizer="sgd"))

    def work() -> Any:
        layers = (lambda: torch.nn.Linear(6, 5), lambda: torch.nn.BatchNorm1d(5), lambda: torch.nn.Linear(5, 3))
        model = seeded(lambda: torch.nn.Sequential(*(make() for make in layers)))
        model[2].to(torch.bfloat16)
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model, buffers="average") as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + optimizer.rank))
                model[2](model[1](model[0](x)).to(torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
        return weights_of(model)

    one, other = job.run(work)
    assert largest_difference(one, other) == 0
    assert float(one["1.running_mean"].abs().max()) > 0


def test_clipping_is_the_workers(fakes: Jobs) -> None:
    expected, model = mlp(), mlp()
    reference = momentum(expected)
    local = LocalSteps("average_weights", steps=2, optimizer="momentum", clip_norm=0.2)
    optimizer = fakes(1, "local_sgd", local=local).wrap(momentum(model), model, clip_norm=0.2)
    for step in range(4):
        reference.zero_grad()
        loss_of(expected, step, 0).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.2)
        reference.step()
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_epochs_that_a_worker_does_not_know_are_refused(fakes: Jobs) -> None:
    local = LocalSteps("average_gradients", steps=2, average_every_epochs=1.0)
    model = mlp()
    with pytest.raises(psgrad.Refused, match="--average_every=N, in steps"):
        fakes(1, "local_sgd", local=local).wrap(momentum(model), model)


def test_step_without_backward(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes(1, "local_sgd", local=LOCAL).wrap(momentum(model), model)
    with pytest.raises(RuntimeError, match=r"without a backward\(\)"):
        optimizer.step()


def test_what_is_open_can_be_settled(jobs: Jobs) -> None:
    """As psgrad.data.Batches does before it waits for others."""
    model = mlp()
    job = jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL)
    with job.wrap(momentum(model), model) as optimizer:
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
        assert (optimizer.open_batches, optimizer.version) == (2, 1)
        optimizer.settle()
        assert (optimizer.open_batches, optimizer.version) == (0, 2)


@pytest.mark.parametrize("exchange", ["average_weights", "elastic"])
def test_a_gradient_that_is_not_finite_takes_no_step_and_spoils_no_state(
    jobs: Jobs, exchange: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is left out, as if it had not been there."""
    mode = {"average_weights": "local_sgd", "elastic": "easgd"}[exchange]
    local = LocalSteps(exchange, steps=STEPS, alpha=0.4, optimizer="momentum")
    model = mlp()
    bad = 1
    flags = (f"--local_steps={STEPS}", *(("--easgd_alpha=0.4",) if mode == "easgd" else ()))
    expected = mlp()
    reference = momentum(expected)
    for step in range(STEPS - 1):
        if step != bad:
            reference.zero_grad()
            loss_of(expected, step, 0).backward()
            reference.step()
    with jobs(1, mode, *flags, local=local).wrap(momentum(model), model) as optimizer:
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            (loss_of(model, step, 0) * (float("inf") if step == bad else 1.0)).backward()
            optimizer.step()
            if step == STEPS - 2:
                assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6
        assert optimizer.skipped == 1
        assert optimizer.open_batches in (0, STEPS)
    assert optimizer.version == 2
    assert all(tensor.isfinite().all() for tensor in model.parameters())
    assert caplog.text.count("is not finite: the batch was skipped") == 1


def test_diloco_applies_nesterov_to_the_mean_difference_of_adamws_rounds(reals: Jobs) -> None:
    """v ← 0.5·v + d; w ← w + 0.7·(d + 0.5·v). AdamW's state is each worker's own, and is never reset."""

    def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    models = [mlp(), mlp()]
    optimizers = [adamw(model) for model in models]
    servers = [parameter.detach().clone() for parameter in mlp().parameters()]
    velocity = [torch.zeros_like(parameter) for parameter in servers]
    for step in range(3 * STEPS):
        for rank in range(2):
            optimizers[rank].zero_grad()
            loss_of(models[rank], step, rank).backward()
            optimizers[rank].step()
        if (step + 1) % STEPS:
            continue
        with torch.no_grad():
            for w, v, *locals_ in zip(servers, velocity, *(model.parameters() for model in models), strict=True):
                d = sum(x - w for x in locals_) / 2
                v.mul_(0.5).add_(d)
                w.add_(0.7 * (d + 0.5 * v))
                for x in locals_:
                    x.copy_(w)
    job = reals(2, "diloco", f"--local_steps={STEPS}", "--outer_momentum=0.5", shards=2)

    def work() -> Any:
        model = mlp()
        with job.wrap(adamw(model), model) as optimizer:
            for step in range(3 * STEPS):
                assert (optimizer.round, optimizer.local_step) == divmod(step, STEPS)
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        for name, expected in zip(weights, servers, strict=True):
            assert float((weights[name] - expected).abs().max()) < 2e-6


@pytest.mark.parametrize(("overlap", "mix"), [(0, 0.0), (1, 0.0), (1, 0.5)])
@pytest.mark.parametrize("sync", ["barrier", "quorum"])
def test_diloco_in_fragments_is_streaming_diloco(reals: Jobs, overlap: int, mix: float, sync: str) -> None:
    """Each is exchanged every second round of 3 steps, while both workers train on; at the end all are."""
    between, batches, rate, outer = 3, 11, 0.5, 0.5
    flags = (f"--local_steps={2 * between}", "--fragments=2", f"--overlap={overlap}", f"--mix={mix}")
    flags += (f"--outer_lr={rate}", f"--outer_momentum={outer}", f"--outer_sync={sync}")
    flags += ("--quorum=2", "--quorum_grace=10s") if sync == "quorum" else ()
    job = reals(2, "diloco", *flags)

    def work() -> Any:
        model = mlp()
        with job.wrap(momentum(model), model) as optimizer:
            fragments = [list(fragment) for fragment in optimizer._client.local_steps.fragments]
            for step in range(batches):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
                if step == between:
                    with optimizer.global_weights():
                        assert optimizer.open_batches > 0
            optimizer.sync_now()
            assert optimizer.open_batches == 0
            assert optimizer.batches_besides(optimizer.round) == batches - between * optimizer.round
        return fragments, weights_of(model)

    ended = job.run(work)
    fragments = ended[0][0]
    assert sorted(index for fragment in fragments for index in fragment) == list(range(len(list(mlp().parameters()))))
    models = [mlp(), mlp()]
    optimizers = [momentum(model) for model in models]
    servers = [parameter.detach().clone() for parameter in models[0].parameters()]
    anchors = [[w.clone() for w in servers] for _ in models]
    velocity = [torch.zeros_like(w) for w in servers]
    pushes, under_way = 0, None
    pushed_after = [0, 0]

    def push(batch: int) -> list[int]:
        """Without a batch since its last one, a push is empty: it is no update, so not one by momentum either."""
        nonlocal pushes
        fragment, last = fragments[pushes % 2], pushed_after[pushes % 2]
        pushed_after[pushes % 2] = batch
        pushes += 1
        for i in fragment if batch > last else ():
            moved = [list(model.parameters())[i] - anchor[i] for model, anchor in zip(models, anchors, strict=True)]
            d = sum(moved) / len(moved)
            velocity[i].mul_(outer).add_(d)
            servers[i].add_(rate * (d + outer * velocity[i]))
        return fragment

    def take(fragment: list[int]) -> None:
        for model, anchor in zip(models, anchors, strict=True):
            for i in fragment:
                anchor[i].copy_(servers[i])
                own = list(model.parameters())[i]
                own.copy_(mix * own + (1 - mix) * anchor[i])

    for step in range(batches):
        for rank in range(2):
            optimizers[rank].zero_grad()
            loss_of(models[rank], step, rank).backward()
            optimizers[rank].step()
        with torch.no_grad():
            if (step + 1) % between == (between - overlap) % between:
                under_way = push(step + 1)
            if (step + 1) % between == 0:
                assert under_way is not None
                take(under_way)
                under_way = None
    with torch.no_grad():
        if under_way is not None:
            take(under_way)
        for _ in fragments:
            take(push(batches))
    for _, weights in ended:
        for values, expected in zip(weights.values(), servers, strict=True):
            assert float((values - expected).abs().max()) < 2e-6


@pytest.mark.parametrize("sync", ["barrier", "async"])
def test_a_worker_whose_weights_are_not_finite_goes_on_from_the_servers_also_in_fragments(
    reals: Jobs, sync: str
) -> None:
    flags = ("--local_steps=4", "--fragments=2", "--overlap=1", "--mix=0.5", f"--outer_sync={sync}")
    model = mlp()
    with reals(1, "diloco", *flags).wrap(momentum(model), model) as optimizer:
        for step in range(12):
            if step == 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float("nan"))
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
        assert optimizer.round > 3
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert all(bool(value.isfinite().all()) for value in weights_of(model).values())


def test_diloco_without_a_barrier_goes_on_from_the_newest_weights(reals: Jobs) -> None:
    """One worker, so that the order is known: every second push is a step of the momentum."""
    model, expected = mlp(), mlp()
    reference = momentum(expected)
    servers = [parameter.detach().clone() for parameter in expected.parameters()]
    velocity = [torch.zeros_like(parameter) for parameter in servers]
    total = [torch.zeros_like(parameter) for parameter in servers]
    flags = ("--outer_sync=async", f"--local_steps={STEPS}", "--dn_buffer=2", "--outer_lr=0.5", "--outer_momentum=0.5")
    with reals(1, "diloco", *flags).wrap(momentum(model), model) as optimizer:
        for step in range(4 * STEPS):
            for each, kind in ((expected, reference), (model, optimizer)):
                kind.zero_grad()
                loss_of(each, step, 0).backward()
                kind.step()
            if (step + 1) % STEPS:
                continue
            with torch.no_grad():
                for w, v, s, x in zip(servers, velocity, total, expected.parameters(), strict=True):
                    d = x - w
                    s.add_(d)
                    moved = d / 2
                    if (step + 1) // STEPS % 2 == 0:
                        v.mul_(0.5).add_(s / 2)
                        s.zero_()
                        moved += 0.5 * v
                    w.add_(0.5 * moved)
                    x.copy_(w)
            assert largest_difference(weights_of(model), weights_of(expected)) < 2e-6
        assert optimizer.round == 4


@pytest.mark.parametrize("exchange", ["average_weights", "elastic"])
def test_global_weights_are_the_servers_and_give_the_workers_own_back(jobs: Jobs, exchange: str) -> None:
    mode = {"average_weights": "local_sgd", "elastic": "easgd"}[exchange]
    local = LocalSteps(exchange, steps=STEPS, alpha=0.4, optimizer="momentum")
    flags = (f"--local_steps={STEPS}", *(("--easgd_alpha=0.4",) if mode == "easgd" else ()))
    model = mlp()
    start = weights_of(model)
    with jobs(1, mode, *flags, local=local).wrap(momentum(model), model) as optimizer:
        for step in range(STEPS - 1):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
        own = weights_of(model)
        with optimizer.global_weights():
            assert largest_difference(weights_of(model), start) == 0
            with pytest.raises(RuntimeError, match="no step is taken"):
                optimizer.step()
        assert largest_difference(weights_of(model), own) == 0
        with pytest.raises(ZeroDivisionError), optimizer.global_weights():
            raise ZeroDivisionError
        assert largest_difference(weights_of(model), own) == 0
        optimizer.sync_now()
        assert (optimizer.round, optimizer.local_step) == (1, 0)


def test_where_each_step_is_exchanged_global_weights_are_the_models(jobs: Jobs) -> None:
    model = mlp()
    with jobs(1).wrap(momentum(model), model) as optimizer:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        before = weights_of(model)
        with optimizer.global_weights():
            assert largest_difference(weights_of(model), before) == 0
        assert (optimizer.round, optimizer.local_step) == (1, 0)


def test_a_grad_scaler_works_where_workers_take_steps_of_their_own(jobs: Jobs) -> None:
    """A gradient that overflows takes no step, and the scale halves, as without psgrad."""

    def train(model: torch.nn.Module, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS - 1):
            optimizer.zero_grad()
            loss = loss_of(model, step, 0) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    expected, model = mlp(), mlp()
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this PyTorch has no torch.amp.GradScaler")
    scale = train(expected, momentum(expected))
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model) as optimizer:
        assert train(model, optimizer) == scale == 2.0**9
        assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


class Signs(torch.optim.Optimizer):
    """One that nobody else has: steps by the sign of the gradient's running mean."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "kept": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["kept"]).add_(parameter.grad, alpha=1 - group["kept"])
                parameter.sub_(group["lr"] * mean.sign())


def test_with_optimizer_local_any_optimizer_trains_and_its_settings_may_change(reals: Jobs) -> None:
    expected, model = mlp(), mlp()
    reference = Signs(expected.parameters())
    flags = ("--optimizer=local", f"--local_steps={STEPS}", "--outer_optimizer=sgd", "--outer_lr=1")
    with reals(1, "diloco", *flags).wrap(Signs(model.parameters()), model) as optimizer:
        for step in range(2 * STEPS):
            for each, kind in ((expected, reference), (model, optimizer)):
                kind.zero_grad()
                loss_of(each, step, 0).backward()
                kind.param_groups[0]["kept"] = 0.5 if step > STEPS else 0.9
                kind.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


class Mine(torch.optim.SGD):
    """A class that is not torch.optim's."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.05),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.05),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.05),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    "subclass": lambda parameters: Mine(parameters, lr=0.05, momentum=0.9),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "fused_sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("flags", [STEPS_OF_ONE_BATCH, "--mode=local_sgd --optimizer=local --local_steps=2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_servers_do_not_know_steps_as_in_plain_pytorch(reals: Jobs, name: str, flags: str) -> None:
    """The first flags are those that the error names where it is refused."""
    mode, *others = flags.removeprefix("--mode=").split()
    expected, model = mlp(), mlp()
    reference = OPTIMIZERS[name](expected.parameters())
    with reals(1, mode, *others).wrap(OPTIMIZERS[name](model.parameters()), model) as optimizer:
        for step in range(2 * STEPS):
            for each, kind in ((expected, reference), (model, optimizer)):
                kind.zero_grad()
                loss_of(each, step, 0).backward()
                kind.step()
        assert optimizer.version == (2 * STEPS if mode == "diloco" else STEPS)
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_the_mean_of_the_steps_of_one_batch(reals: Jobs) -> None:
    """Of two workers, each with a state of its own."""
    models = [mlp(), mlp()]
    optimizers = [OPTIMIZERS["adadelta"](model.parameters()) for model in models]
    for step in range(STEPS):
        for rank in range(2):
            optimizers[rank].zero_grad()
            loss_of(models[rank], step, rank).backward()
            optimizers[rank].step()
        average(models)  # type: ignore[arg-type]
    mode, *others = STEPS_OF_ONE_BATCH.removeprefix("--mode=").split()
    job = reals(2, mode, *others)

    def work() -> Any:
        model = mlp()
        with job.wrap(OPTIMIZERS["adadelta"](model.parameters()), model) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(models[0])) < 2e-6


def test_with_optimizer_local_servers_clip_nothing(reals: Jobs) -> None:
    model = mlp()
    with pytest.raises(psgrad.Refused, match="nobody clips gradients for it"):
        reals(1, "diloco", "--optimizer=local").wrap(momentum(model), model, clip_norm=1.0)


@pytest.mark.parametrize("flags", [("bsp",), ("asp", "--optimizer=adam")])
def test_an_optimizer_that_servers_lack_is_refused_where_they_apply_gradients(
    reals: Jobs, flags: tuple[str, ...]
) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=rf"the servers have no .*Signs.*psrun {STEPS_OF_ONE_BATCH} has the mean"):
        reals(1, *flags).wrap(Signs(model.parameters()), model)


def test_servers_that_have_an_optimizer_take_no_other_for_local_steps(reals: Jobs) -> None:
    model = mlp()
    with pytest.raises(psgrad.Refused, match=r"the servers have adam.*--optimizer=from_worker"):
        reals(1, "local_sgd", "--optimizer=adam").wrap(Signs(model.parameters()), model)


def test_finish_and_idle_while_the_servers_weights_are_shown(jobs: Jobs) -> None:
    """finish() would push that nothing was learnt; idle() is for a long evaluation."""
    model = mlp()
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model) as optimizer:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        refused = pytest.raises(RuntimeError, match="no step is taken")
        with optimizer.global_weights(), optimizer.idle("evaluating"), refused:
            optimizer.finish()
        assert optimizer.local_step == 1


def test_a_grad_scaler_that_failed_leaves_nothing_for_the_next_step(jobs: Jobs) -> None:
    model = mlp()
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(model, 0, 0)).backward()
        gradient = model[0].weight.grad.clone()
        for parameter in model.parameters():
            parameter.grad, parameter.kept = None, parameter.grad  # type: ignore[attr-defined]
        optimizer.__dict__.update(grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
        with pytest.raises(RuntimeError, match=r"without a backward\(\)"):
            optimizer.step()
        assert "grad_scale" not in optimizer.__dict__
        for parameter in model.parameters():
            parameter.grad = parameter.kept  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(model[0].weight.grad, gradient)
        optimizer.sync_now()


def test_batches_know_of_rounds_that_ended_early(jobs: Jobs) -> None:
    """So that a loop that goes back to a checkpoint goes back to the batch that the checkpoint's step begins with."""
    model = mlp()
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model) as optimizer:
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
            if step == STEPS + 1:
                optimizer.sync_now()  # Two batches early.
        assert optimizer.round == 3
        assert [optimizer.batches_besides(step) for step in range(4)] == [0, 0, -2, -2]


def test_a_step_of_short_rounds_begins_with_its_own_batch_however_many_there_would_be_of_whole_ones() -> None:
    """Eighteen rounds of 7 batches in place of 20; whole ones would have been more than all that there are."""
    from psgrad.data import _first_batch

    local = LocalSteps("average_weights", steps=20)
    assert _first_batch(18, local, 1, 63, 252, besides=18 * (7 - 20)) == 126
    assert _first_batch(18, local, 1, 63, 252) == 252


def test_local_steps_of_a_model_in_two_bytes_are_warned_of(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp().to(torch.bfloat16)
    with jobs(1, "local_sgd", f"--local_steps={STEPS}", local=LOCAL).wrap(momentum(model), model):
        pass
    assert caplog.text.count("bfloat16: this worker's own optimizer steps it in that type") == 1
