"""torch.amp.GradScaler, with float32 models on the CPU: an overflow is a loss that is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_support import Jobs, largest_difference, loss_of, mlp, weights_of

pytest_plugins = ["torch_fixtures"]

STEPS = 8
OVERFLOWS = (0, 3)

pytestmark = pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="this PyTorch has no torch.amp.GradScaler")


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def scaled_loss(model: torch.nn.Module, scaler: torch.amp.GradScaler, step: int, rank: int, overflows: bool) -> Any:
    return scaler.scale(loss_of(model, step, rank) * (float("inf") if overflows else 1.0))


def train(model: torch.nn.Module, optimizer: Any, way: str) -> list[float]:
    """The scale after each step."""
    scaler = new_scaler()
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaled_loss(model, scaler, step, 0, step in OVERFLOWS).backward()
        if way != "plain":
            scaler.unscale_(optimizer)
        if way == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if way == "repair":  # What was found counts, whatever gradients are by then.
            for parameter in model.parameters():
                torch.nan_to_num_(parameter.grad, 0.5, 0.5, 0.5)  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("overlap", ["auto", "none"])
@pytest.mark.parametrize("way", ["plain", "unscale", "clip", "repair"])
def test_one_worker_has_the_weights_and_scales_of_plain_pytorch(
    jobs: Jobs, way: str, overlap: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, model = mlp(), mlp()
    scales = train(expected, momentum(expected), way)
    assert len(set(scales)) > 2
    with jobs(1, mode).wrap(momentum(model), model, overlap=overlap) as optimizer:
        assert train(model, optimizer, way) == scales
        assert optimizer.skipped == len(OVERFLOWS)
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6
    assert caplog.text.count("GradScaler has found gradients that are not finite") == len(OVERFLOWS)
    assert caplog.text.count("from now on gradients are sent in step()") == (overlap == "auto")


def test_a_worker_whose_gradients_overflow_leaves_the_step_to_the_other(jobs: Jobs) -> None:
    """Its scale backs off, and the other's is its own: gradients are sent without them."""
    overflows = {1: 0, 4: 1}  # The rank, by step.
    expected = mlp()
    reference = momentum(expected)
    for step in range(STEPS):
        reference.zero_grad()
        counting = [rank for rank in range(2) if overflows.get(step) != rank]
        (sum(loss_of(expected, step, rank) for rank in counting) / len(counting)).backward()
        reference.step()
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        scaler = new_scaler()
        with job.wrap(momentum(model), model) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                overflow = overflows.get(step) == optimizer.rank
                scaled_loss(model, scaler, step, optimizer.rank, overflow).backward()
                scaler.step(optimizer)
                scaler.update()
            assert (optimizer.skipped, optimizer.version) == (1, STEPS)
            return optimizer.rank, scaler.get_scale(), weights_of(model)

    (_, scale0, weights0), (_, scale1, weights1) = sorted(job.run(work), key=lambda result: result[0])
    assert (scale0, scale1) == (2.0**12, 2.0**12)
    assert largest_difference(weights0, weights1) == 0
    assert largest_difference(weights0, weights_of(expected)) < 1e-6


@pytest.mark.parametrize("flags", [("local_sgd", "--local_steps=2"), ("easgd", "--easgd_alpha=0.3")])
@pytest.mark.parametrize("way", ["plain", "clip", "repair"])
def test_steps_of_the_workers_own_have_the_scales_of_plain_pytorch(
    reals: Jobs, flags: tuple[str, ...], way: str
) -> None:
    expected, model = mlp(), mlp()
    scales = train(expected, momentum(expected), way)
    with reals(1, *flags).wrap(momentum(model), model) as optimizer:
        assert train(model, optimizer, way) == scales
        assert optimizer.skipped == len(OVERFLOWS)
        if flags[0] == "local_sgd":
            assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_a_closure_and_a_scaler_are_refused_together(fakes: Jobs) -> None:
    model = mlp()
    optimizer = fakes().wrap(momentum(model), model)
    scaler = new_scaler()
    scaled_loss(model, scaler, 0, 0, False).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler takes no closure"):
        scaler.step(optimizer, lambda: 0.0)
    scaler.step(optimizer)
    assert optimizer.version == 1


def test_a_step_that_is_made_again_after_an_error_is_unscaled_once(jobs: Jobs) -> None:
    expected, model = mlp(), mlp()
    train_one(expected, momentum(expected))
    with jobs(1, "bsp").wrap(momentum(model), model) as optimizer:
        train_one(model, optimizer, spoils=True)
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def train_one(model: torch.nn.Module, optimizer: Any, *, spoils: bool = False) -> None:
    """spoils: weights are written to, so that step() raises; they are brought back, and it is called again."""
    scaler = new_scaler()
    optimizer.zero_grad()
    scaled_loss(model, scaler, 0, 0, overflows=False).backward()
    if spoils:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(RuntimeError, match="was written to since the last step"):
            scaler.step(optimizer)
        optimizer.pull()
    scaler.step(optimizer)
    scaler.update()
