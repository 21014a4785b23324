"""overlap="auto": gradients leave in backward, until the script does more with them: then nothing is wrong or lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from psgrad.torch.watch import Watch
from torch_support import Jobs, largest_difference, loss_of, mlp, seeded, weights_of

pytest_plugins = ["torch_fixtures"]

STEPS = 6
FIRST = 2  # The first step that is unlike the others.


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()


def twice(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    loss_of(model, step + 100, rank).backward()


def anew(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step + 100, rank)
    plain(model, optimizer, step, rank)


def anew_in_place(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step + 100, rank)
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, step, rank).backward()


def assigned(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss_of(model, step, rank), parameters), strict=True
    ):
        parameter.grad = gradient


def functional(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.full((4, 6), step + rank + 0.5)
        return torch.func.functional_call(model, values, (x,)).square().mean()

    for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = gradient


def clipped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clipped_by_value(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def in_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    weight = model.get_parameter("2.weight")
    assert weight.grad is not None
    weight.grad = weight.grad * 2


def kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """The last step's gradients take another one."""


def late_rate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    optimizer.param_groups[0]["lr"] = 0.1 / step


BEHAVIOURS: dict[str, tuple[Callable[..., None], str]] = {
    "twice": (twice, r"a second backward\(\) before step\(\) reached .*accumulate="),
    "anew": (anew, r"a second backward\(\)"),
    "anew_in_place": (anew_in_place, r"a second backward\(\)"),
    "assigned": (assigned, r"step\(\) without a backward\(\)"),
    "functional": (functional, r"step\(\) without a backward\(\)"),
    "clipped": (clipped, r"\.grad of .* was changed after backward\(\) .*clip_norm="),
    "clipped_by_value": (clipped_by_value, r"\.grad of .* was changed after backward\(\)"),
    "in_part": (in_part, r"\.grad of 2\.weight was changed after backward\(\)"),
    "kept": (kept, r"step\(\) without a backward\(\)"),
    "late_rate": (late_rate, r"lr was changed between backward\(\) and step\(\)"),
}


def alone(behaviour: Callable[..., None], workers: int) -> dict[str, torch.Tensor]:
    """Plain PyTorch, with the mean of all workers' gradients."""
    model = mlp()
    optimizer = momentum(model)
    gradients: list[list[torch.Tensor]] = [[] for _ in range(workers)]
    for step in range(STEPS):
        for rank in range(workers):
            for parameter, last in zip(model.parameters(), gradients[rank], strict=False):
                parameter.grad = last.clone()  # Each worker's own.
            (behaviour if step >= FIRST else plain)(model, optimizer, step, rank)
            gradients[rank] = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(each) / workers  # type: ignore[assignment]
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("overlap", ["auto", "none"])
@pytest.mark.parametrize("name", BEHAVIOURS)
@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (2, 2)])
def test_whatever_a_script_makes_of_its_gradients_is_the_step(
    jobs: Jobs, workers: int, shards: int, name: str, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, seen = BEHAVIOURS[name]
    job = jobs(workers, shards=shards)

    def work() -> Any:
        model = mlp()
        with job.wrap(momentum(model), model, overlap=overlap) as optimizer:
            for step in range(STEPS):
                (behaviour if step >= FIRST else plain)(model, optimizer, step, optimizer.rank)
                optimizer.step()
            assert (optimizer.version, optimizer.skipped, optimizer.dropped) == (STEPS, 0, 0)
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, alone(behaviour, workers)) < 1e-6
    said = [record.message for record in caplog.records if "from now on gradients are sent in step()" in record.message]
    if overlap == "none":
        assert not said
        return
    # Once by each worker; a rate is only told by the lowest rank.
    assert len(said) == (1 if name == "late_rate" else workers)
    for line in said:
        assert re.match(rf"step {FIRST}: {seen}", line), line


def clipped_unseen(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    plain(model, optimizer, step, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def test_what_does_not_count_as_a_change_is_noticed_in_the_first_steps(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """And from then on it cannot do harm."""
    expected, model = mlp(), mlp()
    reference = momentum(expected)
    with jobs().wrap(momentum(model), model) as optimizer:
        for step in range(STEPS):
            for each, kind in ((expected, reference), (model, optimizer)):
                clipped_unseen(each, kind, step, 0)
                kind.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6
    assert caplog.text.count("was changed after backward()") == 1
    model = mlp()
    with jobs().wrap(momentum(model), model, overlap="backward") as optimizer:
        clipped_unseen(model, optimizer, 0, 0)
        with pytest.raises(RuntimeError, match=r"was changed after backward\(\)"):
            optimizer.step()
        optimizer.empty_step()


def test_what_does_not_count_as_a_change_is_noticed_later_too(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """One tensor a step is looked at, in turn."""
    model = mlp()
    with jobs().wrap(momentum(model), model) as optimizer:
        for step in range(FIRST + len(list(model.parameters()))):
            plain(model, optimizer, step, 0)
            if step >= FIRST:
                assert model[0].bias.grad is not None
                model[0].bias.grad.data.mul_(0.5)
            else:
                assert "was changed" not in caplog.text
            optimizer.step()
    assert caplog.text.count(".grad of 0.bias was changed after backward()") == 1


@pytest.mark.parametrize("first", [0, FIRST + 3])
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_weights_that_are_written_to_unseen(jobs: Jobs, how: str, first: int) -> None:
    model = mlp()
    bias = model[0].bias
    with jobs().wrap(momentum(model), model) as optimizer:
        for step in range(first):
            plain(model, optimizer, step, 0)
            optimizer.step()

        def write_and_step() -> None:
            for step in range(first, first + 1 + len(list(model.parameters()))):
                if how == "data":
                    bias.data.mul_(0.5)
                else:
                    bias.detach().numpy()[:] = 0
                plain(model, optimizer, step, 0)
                optimizer.step()

        with pytest.raises(RuntimeError, match=r"step \d+: 0\.bias was written to since the last step"):
            write_and_step()
        optimizer.empty_step()
        plain(model, optimizer, 0, 0)
        optimizer.step()


def test_large_tensors_are_watched_in_parts() -> None:
    elements = 3 << 20
    tensors = {4: torch.zeros(elements), 7: torch.zeros(2)}
    watch = Watch([4, 7])
    found: list[int] = []
    for _ in range(2 + 2 * 3):
        watch.next_step()
        for index in watch.look_at():
            watch.saw(index, tensors[index])
        if not watch.every:
            tensors[4].data[elements - 1] += 1
        found += watch.changed(tensors.__getitem__)
    assert found == [4]


def test_a_gradient_that_is_not_finite_is_no_change(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with jobs().wrap(momentum(model), model) as optimizer:
        (loss_of(model, 0, 0) * float("nan")).backward()
        optimizer.step()
        assert optimizer.skipped == 1
    assert "from now on" not in caplog.text


@pytest.mark.parametrize("mode", ["bsp", "asp", "ssp", "backup"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--shared_memory=off",), ("--wire_dtype=bfloat16", "--error_feedback")],
    ids=["shared_memory", "tcp", "bfloat16"],
)
def test_what_was_sent_and_given_up_leaves_no_trace(reals: Jobs, mode: str, flags: tuple[str, ...]) -> None:
    """Step after step, of tensors of many slices on three servers, and with what error feedback keeps of a push."""
    workers = 2 if mode == "bsp" else 1
    flags = (*flags, "--backup_workers=0") if mode == "backup" else flags
    layers = (lambda: torch.nn.Linear(6, 40_000), torch.nn.ReLU, lambda: torch.nn.Linear(40_000, 3))

    def train(overlap: str) -> dict[str, torch.Tensor]:
        job = reals(workers, mode, *flags, shards=3)

        def work() -> dict[str, torch.Tensor]:
            model = seeded(lambda: torch.nn.Sequential(*(make() for make in layers)))
            with job.wrap(torch.optim.SGD(model.parameters(), lr=1e-4), model, overlap=overlap) as optimizer:
                for step in range(12):
                    plain(model, optimizer, step + 100, optimizer.rank)
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.grad.mul_(1000)
                    plain(model, optimizer, step, optimizer.rank)
                    optimizer.step()
                    optimizer._steps._sends = overlap == "auto"  # Once more.
                assert (optimizer.version, optimizer.dropped) == (12, 0)
            return weights_of(model)

        return job.run(work)[0]  # type: ignore[no-any-return]

    given_up = train("auto")
    assert all(value.isfinite().all() for value in given_up.values())
    assert largest_difference(given_up, train("none")) == 0
