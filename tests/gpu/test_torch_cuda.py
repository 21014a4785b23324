"""psgrad.torch on a CUDA card, next to plain PyTorch on the same card. Skipped without one.

    python3 -m pytest tests/gpu/test_torch_cuda.py      needs psgrad (with ps_server), pytest, and PyTorch for CUDA

Rates are powers of two, so that a product with one is exact, and a fused multiply-add gives the bits that two
operations give: a server on the CPU and torch.optim.SGD on the card then agree in each bit.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA card", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from torch_support import Jobs, seeded, weights_of  # noqa: E402

pytest_plugins = ["torch_fixtures"]

STEPS = 8
# About 20 ms, in which the host has long gone on: a copy that does not wait copies what is not there yet.
CYCLES = 30_000_000


def model_of(width: int = 1024) -> torch.nn.Module:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            *(torch.nn.Linear(64, width), torch.nn.Tanh()),
            *(torch.nn.Linear(width, width), torch.nn.Tanh()),
            *(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 10)),
        )

    return seeded(make).cuda()  # type: ignore[no-any-return]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def backward(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(32, 64, generator=generator).to("cuda", dtype)
    labels = torch.randint(10, (32,), generator=generator).cuda()
    torch.cuda._sleep(CYCLES)
    torch.nn.functional.cross_entropy(model(x).float(), labels).backward()


def train(model: torch.nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_equal_bits(one: torch.nn.Module, other: torch.nn.Module) -> None:
    expected = weights_of(other)
    for name, value in weights_of(one).items():
        assert value.device.type == "cuda"
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_weights_have_the_bits_of_plain_pytorch(reals: Jobs, overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = model_of()
    model = copy.deepcopy(expected)
    train(expected, sgd(expected))
    with caplog.at_level(logging.WARNING, "psgrad"), reals().wrap(sgd(model), model, overlap=overlap) as optimizer:
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        train(model, optimizer)
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert_equal_bits(model, expected)
    assert "more slowly" not in caplog.text, "memory could not be pinned"


@pytest.mark.parametrize("scales", [False, True])
def test_pushes_that_are_given_up_leave_the_bits_of_plain_pytorch(reals: Jobs, scales: bool) -> None:
    """Gradients are clipped, in some steps under a scaler that overflows, while copies of them are under way."""

    def train(model: torch.nn.Module, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scales)
        for step in range(STEPS):
            optimizer.zero_grad()
            if hasattr(optimizer, "_steps"):
                optimizer._steps._sends = True  # Once more.
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
            torch.cuda._sleep(CYCLES)
            loss = model(x).square().mean() * (float("inf") if scales and step in (0, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    expected = model_of()
    model = copy.deepcopy(expected)
    scale = train(expected, sgd(expected))
    with reals().wrap(sgd(model), model) as optimizer:
        assert train(model, optimizer) == scale
        assert optimizer.skipped == (2 if scales else 0)
    assert_equal_bits(model, expected)


def test_bfloat16_has_the_bits_of_float32_masters(reals: Jobs) -> None:
    expected = model_of().bfloat16()
    model = copy.deepcopy(expected)
    masters = [parameter.detach().float() for parameter in expected.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.125, momentum=0.5)
    for step in range(STEPS):
        expected.zero_grad()
        backward(expected, step)
        for master, parameter in zip(masters, expected.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, expected.parameters(), strict=True):
                parameter.copy_(master)
    with reals().wrap(sgd(model), model) as wrapped:
        train(model, wrapped)
    assert_equal_bits(model, expected)


def test_local_steps_have_the_bits_of_plain_pytorch(reals: Jobs) -> None:
    """One worker's average is its own weights."""
    expected = model_of(64)
    model = copy.deepcopy(expected)
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.125))
    job = reals(1, "local_sgd", "--local_steps=1")
    with job.wrap(torch.optim.SGD(model.parameters(), lr=0.125), model) as optimizer:
        train(model, optimizer)
    # What is exchanged is a difference, whose sum with the old weights is rounded.
    for name, value in weights_of(model).items():
        assert torch.allclose(value, weights_of(expected)[name], atol=1e-5), name


def test_weights_are_not_written_while_the_card_still_reads_them(reals: Jobs) -> None:
    """An evaluation is on the card's stream when the next weights come; those after step() are the new ones."""
    expected = model_of()
    model = copy.deepcopy(expected)
    x = torch.ones(8, 64, device="cuda")
    outputs: list[list[torch.Tensor]] = []
    with reals().wrap(sgd(model), model) as wrapped:
        for each, optimizer in ((expected, sgd(expected)), (model, wrapped)):
            seen: list[torch.Tensor] = []
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(each, step)
                with torch.no_grad():
                    torch.cuda._sleep(CYCLES)
                    seen.append(each(x))
                optimizer.step()
                with torch.no_grad():
                    seen.append(each(x))
            outputs.append(seen)
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_memory_of_the_card_does_not_grow(reals: Jobs) -> None:
    """A float32 model needs no more of it than the optimizer's state would, which the servers have."""
    gc.collect()  # What other tests have left.
    plain = model_of()
    torch.cuda.reset_peak_memory_stats()
    train(plain, sgd(plain))
    most_plain = torch.cuda.max_memory_allocated()
    del plain
    model = model_of()
    torch.cuda.reset_peak_memory_stats()
    with reals().wrap(sgd(model), model) as optimizer:
        train(model, optimizer, 3)
        torch.cuda.synchronize()
        after_three = torch.cuda.memory_allocated()
        train(model, optimizer)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= after_three
        assert torch.cuda.max_memory_allocated() <= most_plain


def test_a_step_does_not_wait_for_the_whole_card(reals: Jobs) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    model = model_of()
    with reals().wrap(sgd(model), model) as optimizer:
        train(model, optimizer, 2)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for step in range(3):
                optimizer.zero_grad()
                generator = torch.Generator(device="cuda").manual_seed(step)
                x = torch.randn(32, 64, device="cuda", generator=generator)
                with record_function("the step"):
                    model(x).square().mean().backward()
                    optimizer.step()
    events = profiler.events()
    # The profiler itself waits for the card when it ends, which is outside of them.
    spans = [each.time_range for each in events if each.name == "the step"]
    names = {
        each.name
        for each in events
        if any(span.start <= each.time_range.start and each.time_range.end <= span.end for span in spans)
    }
    assert "cudaMemcpyAsync" in names, "the profiler does not show calls of the CUDA runtime"
    waits = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "aten::item", "aten::_local_scalar_dense"}
    assert not names & waits
