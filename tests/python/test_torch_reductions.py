"""Numbers of all workers, from a training loop."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from psgrad.data import Batches
from server_processes import Restartable
from torch_support import Job, Jobs, loss_of, mlp, ps_server, psgrad

pytest_plugins = ["torch_fixtures"]

needs_servers = pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_loop_reduces_losses_and_flags(jobs: Jobs, mode: str) -> None:
    job = jobs(2, mode)

    def work() -> Any:
        model = mlp()
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
            means, own = [], []
            for step in range(4):
                opt.zero_grad()
                loss = loss_of(model, step, opt.rank)
                loss.backward()
                opt.step()
                own.append(loss.item())
                means.append(opt.all_mean(loss, name="loss"))
                if opt.any(step == 2 and opt.rank == 1):
                    break
            worst = opt.all_max(torch.tensor([opt.rank, -opt.rank]))
            return own, torch.stack(means).tolist(), worst, opt.all_mean(torch.tensor([opt.rank, 1])), opt.step_number

    one, other = job.run(work)
    assert len(one[0]) == 3
    assert one[1] == other[1]
    assert one[1] == pytest.approx([(a + b) / 2 for a, b in zip(one[0], other[0], strict=True)])
    assert one[2].dtype == torch.float64
    assert one[2].tolist() == [1, 0]
    assert one[3].dtype == torch.float64
    assert one[3].tolist() == [0.5, 1.0]


def test_in_backup_who_is_late_does_not_wait_for_those_that_wait_for_it(reals: Jobs) -> None:
    job = reals(3, "backup", "--backup_workers=1", "--progress_timeout=20s")

    def work() -> Any:
        model = mlp()
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
            while opt.step_number < (8 if opt.rank == 2 else 4):
                opt.zero_grad()
                loss_of(model, opt.step_number, opt.rank).backward()
                opt.step()
            return opt.all_sum(1)

    assert job.run(work) == [3.0, 3.0, 3.0]


def test_sums_of_small_whole_numbers_do_not_wrap(jobs: Jobs) -> None:
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
            return opt.all_sum(torch.tensor([200], dtype=torch.uint8)), opt.all_sum(torch.tensor([True, False]))

    for count, flags in job.run(work):
        assert (count.tolist(), flags.tolist()) == ([400.0], [2.0, 0.0])


def test_the_result_has_the_shape_the_type_and_no_graph(jobs: Jobs) -> None:
    job = jobs(1)
    model = mlp()
    with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
        for kind in (torch.float64, torch.bfloat16, torch.float16):
            x = torch.arange(6).reshape(2, 3).to(kind)
            same = opt.all_sum(x)
            assert same.dtype == kind
            assert torch.equal(same, x)
        with pytest.raises(TypeError, match="complex numbers are not reduced"):
            opt.all_sum(torch.zeros(2, dtype=torch.complex64))
        loss = loss_of(model, 0, 0)
        mean = opt.all_mean(loss)
        assert mean.shape == ()
        assert not mean.requires_grad
        assert opt.all_mean([loss, 2]) == [loss.item(), 2.0]
        assert opt.all_max(True) == 1.0
    with pytest.raises(RuntimeError, match="has left the job"):
        opt.all_mean(1.0)


def test_a_rank_that_is_done_is_not_waited_for(jobs: Jobs) -> None:
    job = jobs(2, "bsp")

    def work() -> Any:
        model = mlp()
        with job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as opt:
            if opt.rank == 1:
                return None
            loss_of(model, 0, 0).backward()
            opt.step()
            return opt.all_sum(7)

    assert set(job.run(work)) == {None, 7.0}


class Noise(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


@needs_servers
@pytest.mark.parametrize("every", ["6", "4"])
def test_a_loop_over_batches_goes_on_after_a_rollback_in_a_reduction(restartable: Restartable, every: str) -> None:
    """An epoch has 6 steps: the checkpoint is of the epoch's end, or of a step before it, which come again."""
    job = Job(restartable.start(2, every=every), 2)
    killed = threading.Event()

    def work() -> Any:
        model = mlp()
        opt = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        ends, steps, refused = [], [], []
        for epoch, part in Batches(Noise(), opt, batch_size=8, epochs=4).by_epoch():
            for x, y in part:
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                steps.append(opt.step_number)
                opt.step()
            if epoch == 1 and opt.rank == 1 and not killed.is_set():
                killed.set()
                restartable.kill()
                restartable.start_again()
            try:
                ends.append((epoch, opt.all_sum(opt.step_number, name=f"epoch {epoch}")))
            except psgrad.RolledBack as error:
                refused.append(str(error))
        opt.finish()
        return ends, steps, refused

    one, other = job.run(work)
    assert one[:2] == other[:2]
    (text,), (same,) = one[2], other[2]
    ends, steps, _ = one
    found = re.search(r"'epoch 1': the job was rolled back to step (\d+)", text)
    assert found is not None, text
    assert found[0] in same
    to = int(found[1])
    assert steps == [*range(12), *range(to, 24)]
    # The steps since then came again, and with them the sums after them. (The checkpoint may not have been complete.)
    assert ends == [(0, 12.0), *((epoch, 12.0 * (epoch + 1)) for epoch in range(to // 6, 4))]
