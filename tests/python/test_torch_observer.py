"""load_into: a job's weights in a module of another process's, or of this one."""

from __future__ import annotations

import pytest
import torch

from torch_support import Jobs, largest_difference, loss_of, mlp, psgrad, weights_of

pytest_plugins = ["torch_fixtures"]


def test_it_brings_what_the_workers_have(reals: Jobs) -> None:
    """With buffers, in whichever type the model has, also a compiled one."""
    job = reals(1, "bsp", shards=2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
        observer = psgrad.Observer(job.address)
        other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
        half = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)).half()
        shorter = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
        compiled = torch.compile(shorter, backend="eager")
        memory = other[0].weight.data_ptr()
        for step in range(3):
            loss_of(model, step, 0).backward()
            opt.step()
            opt.zero_grad()
            seen = psgrad.torch.load_into(other, observer)
            assert seen.version == opt.version == step + 1
            wanted = weights_of(model)
            wanted["1.num_batches_tracked"] = other[1].num_batches_tracked  # Each has its own.
            assert largest_difference(weights_of(other), wanted) == 0
        assert other[0].weight.data_ptr() == memory
        psgrad.torch.load_into(half, observer)
        assert half[2].weight.dtype == torch.float16
        assert torch.equal(half[2].weight, model[2].weight.half())
        with pytest.raises(ValueError, match=r"the model has no 2.weight, 2.bias, which the job at"):
            psgrad.torch.load_into(compiled, observer)


def test_a_model_of_another_shape_is_left_as_it_is(reals: Jobs) -> None:
    job = reals(1)
    model = mlp()
    with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model):
        observer = psgrad.Observer(job.address)
        other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
        before = weights_of(other)
        with pytest.raises(ValueError, match=r"2.weight is \[4, 5\] here, and \[3, 5\] in the job"):
            psgrad.torch.load_into(other, observer)
        larger = torch.nn.Sequential(*mlp(), torch.nn.Linear(3, 3))
        with pytest.raises(ValueError, match=r"has no 3.weight, 3.bias, which the model has"):
            psgrad.torch.load_into(larger, observer)
        assert largest_difference(weights_of(other), before) == 0
