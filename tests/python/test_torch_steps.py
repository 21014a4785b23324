"""What a step makes of gradients and weights, with the models and loops that users of DDP and Horovod write."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from torch_support import Job, Jobs, largest_difference, loss_of, mlp, seeded, weights_of

pytest_plugins = ["torch_fixtures"]

SGD = torch.optim.SGD


def train(job: Job, model: torch.nn.Module, steps: int = 3, **options: Any) -> Any:
    """One worker."""
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    return optimizer


def test_weights_land_in_the_parameters_own_memory(jobs: Jobs) -> None:
    model = mlp()
    before = list(model.parameters())
    job = jobs()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    memory = optimizer._memory.weights
    assert addresses == [memory[index].data_ptr() for index in range(4)]
    optimizer.finish()


def test_initial_weights_are_rank_0s(jobs: Jobs) -> None:
    job = jobs(2)
    seeds = iter([1, 2])

    def work() -> Any:
        seed = next(seeds)
        model = mlp(seed)
        own = weights_of(model)
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            return optimizer.rank, own, weights_of(model)

    results = sorted(job.run(work), key=lambda result: result[0])
    for _, _, got in results:
        assert largest_difference(got, results[0][1]) == 0


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_no_weight_changes_before_step(jobs: Jobs, mode: str) -> None:
    """Even when every gradient is final, and another worker has pushed its own."""
    job = jobs(2, mode)

    def work() -> Any:
        model = mlp()
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            for step in range(5):
                optimizer.zero_grad()
                before = weights_of(model)
                loss_of(model, step, optimizer.rank).backward()
                assert largest_difference(before, weights_of(model)) == 0
                optimizer.step()
                assert largest_difference(before, weights_of(model)) > 0

    job.run(work)


def test_a_stale_graph_raises(jobs: Jobs) -> None:
    model = mlp()
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    loss = loss_of(model, 0, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()
    optimizer.empty_step()
    optimizer.finish()


class Branches(torch.nn.Module):
    """Two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 4)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.body(x))


def test_unused_parameters_are_skipped_and_named_once(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Branches)
    before = weights_of(model)
    optimizer = train(jobs(), model, 3)
    after = weights_of(model)
    assert torch.equal(before["heads.1.weight"], after["heads.1.weight"])
    assert not torch.equal(before["heads.0.weight"], after["heads.0.weight"])
    named = [record.message for record in caplog.records if "no gradient reached" in record.message]
    assert len(named) == 1
    assert "heads.1.weight, heads.1.bias" in named[0]
    optimizer.finish()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.bfloat16), ({"accumulate": 2}, torch.float32), ({"overlap": "none", "clip_norm": 0.1}, torch.float32)],
)
def test_a_parameter_without_a_gradient_is_left_where_it_is(
    jobs: Jobs, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Neither its decay nor its momentum moves it, whichever way gradients go."""
    model = seeded(Branches).to(dtype)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), model, **options)
    moved = []
    for step in range(4):
        before = model.heads[1].weight.detach().clone()
        optimizer.zero_grad()
        for _ in range(options.get("accumulate", 1)):
            model(torch.ones(2, 6, dtype=dtype), int(step == 1)).sum().backward()
        if step == 2:
            with optimizer.no_sync():
                pass
        optimizer.step()
        moved.append(not torch.equal(before, model.heads[1].weight))
    optimizer.finish()
    assert moved == [False, True, False, False]


def test_a_parameter_that_one_rank_uses_gets_half_its_gradient(jobs: Jobs) -> None:
    job = jobs(2)

    def work() -> Any:
        model = seeded(Branches)
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            x = torch.ones(2, 6)
            model(x, optimizer.rank).sum().backward()
            gradient = model.heads[optimizer.rank].bias.grad
            before = model.heads[optimizer.rank].bias.detach().clone()
            optimizer.step()
            moved = before - model.heads[optimizer.rank].bias.detach()
            assert torch.allclose(moved, 0.05 * gradient, atol=1e-6)

    job.run(work)


def test_unused_parameters_are_an_error_if_asked(fakes: Jobs) -> None:
    model = seeded(Branches)
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, unused="error")
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"no gradient reached heads.1.weight, heads.1.bias"):
        optimizer.step()


@pytest.mark.parametrize("way", ["accumulate", "no_sync"])
def test_gradients_add_up(jobs: Jobs, way: str) -> None:
    expected = mlp()
    reference = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        reference.zero_grad()
        for rank in range(2):
            for part in range(3):
                (loss_of(expected, 3 * step + part, rank) / 6).backward()
        reference.step()
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        options = {"accumulate": 3} if way == "accumulate" else {}
        with job.wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model, **options) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                for part in range(2):
                    if way == "accumulate":
                        (loss_of(model, 3 * step + part, optimizer.rank) / 3).backward()
                    else:
                        with optimizer.no_sync():
                            (loss_of(model, 3 * step + part, optimizer.rank) / 3).backward()
                (loss_of(model, 3 * step + 2, optimizer.rank) / 3).backward()
                optimizer.step()
        return weights_of(model)

    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected)) < 1e-6


def test_a_shorter_accumulation_is_sent_by_step(fakes: Jobs) -> None:
    model, expected = mlp(), mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, accumulate=4)
    reference = SGD(expected.parameters(), lr=0.1)
    for one, other in ((model, optimizer), (expected, reference)):
        for part in range(2):
            loss_of(one, part, 0).backward()
        other.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(jobs: Jobs, set_to_none: bool) -> None:
    expected, model = mlp(), mlp()
    reference = SGD(expected.parameters(), lr=0.1)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    for one, other in ((expected, reference), (model, optimizer)):
        for step in range(4):
            other.zero_grad(set_to_none=set_to_none)
            loss_of(one, step, 0).backward()
            other.step()
    optimizer.finish()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_gradients_that_are_never_zeroed_go_on_adding_up(fakes: Jobs) -> None:
    expected, model = mlp(), mlp()
    reference = SGD(expected.parameters(), lr=0.1)
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    for one, other in ((expected, reference), (model, optimizer)):
        for step in range(3):
            loss_of(one, step, 0).backward()
            other.step()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_frozen_weights_come_from_rank_0_and_stay(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job = jobs(2)
    seeds = iter([1, 2])

    def work() -> Any:
        model = mlp(next(seeds))
        model[0].weight.requires_grad_(False)
        own = weights_of(model)
        optimizer = SGD([model[0].bias, model[2].weight], lr=0.1, weight_decay=0.1)  # Not 2.bias.
        with job.wrap(optimizer, model) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
            return optimizer.rank, own, weights_of(model)

    results = sorted(job.run(work), key=lambda result: result[0])
    for _, _, got in results:
        for name in ("0.weight", "2.bias"):
            assert torch.equal(got[name], results[0][1][name])
        assert not torch.equal(got["2.weight"], results[0][1]["2.weight"])
    assert "in no parameter group, so they stay as they are: 2.bias" in caplog.text


def with_batch_norm() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))


@pytest.mark.parametrize("buffers", ["rank0", "average", "local"])
def test_batch_norms_buffers(jobs: Jobs, buffers: str) -> None:
    job = jobs(2)

    def work() -> Any:
        model = seeded(with_batch_norm)
        with job.wrap(SGD(model.parameters(), lr=0.1), model, buffers=buffers) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                own = model[1].running_mean.clone()
                optimizer.step()
            assert int(model[1].num_batches_tracked) == 3
            return optimizer.rank, own, model[1].running_mean.clone()

    (_, own0, got0), (_, own1, got1) = sorted(job.run(work), key=lambda result: result[0])
    if buffers == "local":
        assert torch.equal(got0, own0)
        assert torch.equal(got1, own1)
        assert not torch.equal(got0, got1)
        return
    expected = own0 if buffers == "rank0" else (own0 + own1) / 2
    assert torch.allclose(got0, expected, atol=1e-7)
    assert torch.equal(got0, got1)


@pytest.mark.parametrize("buffers", ["rank0", "average", "local"])
def test_batch_norms_counter_is_the_jobs(jobs: Jobs, buffers: str) -> None:
    job = jobs(2)

    def work() -> Any:
        model = seeded(with_batch_norm)
        with job.wrap(SGD(model.parameters(), lr=0.1), model, buffers=buffers) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                for _ in range(1 + optimizer.rank):  # Rank 1 counts twice.
                    loss = loss_of(model, step, optimizer.rank)
                loss.backward()
                optimizer.step()
            return optimizer.rank, int(model[1].num_batches_tracked), model[1].num_batches_tracked.dtype

    counted = {rank: (count, kind) for rank, count, kind in job.run(work)}
    assert counted == {0: (3, torch.int64), 1: (6 if buffers == "local" else 3, torch.int64)}


def test_a_counter_is_on_the_servers(fakes: Jobs) -> None:
    model = seeded(with_batch_norm)
    job = fakes()
    optimizer = train(job, model, 3)
    assert job.server is not None
    index = [entry.name for entry in optimizer._entries].index("1.num_batches_tracked")
    assert job.server.weights[index] == 3


class Counting(torch.nn.Module):
    """Assigns its buffer anew instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.average = 0.5 * self.average + 0.5 * y.detach().mean(0)
        return y


def test_a_buffer_that_is_assigned_anew(fakes: Jobs) -> None:
    model = Counting()
    job = fakes()
    optimizer = train(job, model, 3)
    assert job.server is not None
    index = [entry.name for entry in optimizer._entries].index("average")
    assert torch.equal(torch.from_numpy(job.server.weights[index]), model.average)
    assert float(model.average.abs().sum()) > 0


def test_buffers_that_need_not_be_sent_are_not(fakes: Jobs) -> None:
    model = mlp()
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    optimizer = train(fakes(), model, 1)
    kinds = {entry.name: entry.kind for entry in optimizer._entries}
    assert kinds["mask"] == "constant"
    assert "cache" not in kinds
    assert model.mask.dtype is torch.bool
    assert bool(model.mask.all())
    optimizer.finish()
    model.register_buffer("ids", torch.tensor([2**24 + 1]))
    with pytest.raises(ValueError, match=r"ids holds whole numbers above 16777216"):
        fakes().wrap(SGD(model.parameters(), lr=0.1), model)


def test_tied_parameters_appear_once(jobs: Jobs) -> None:
    def tied() -> torch.nn.Sequential:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 3)
        )
        model[1].weight = model[0].weight
        return model

    expected, model = tied(), tied()
    reference = SGD(expected.parameters(), lr=0.1)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    for one, other in ((expected, reference), (model, optimizer)):
        for step in range(3):
            other.zero_grad()
            loss_of(one, step, 0).backward()
            other.step()
    optimizer.finish()
    assert model[0].weight is model[1].weight
    assert [entry.name for entry in optimizer._entries] == ["0.weight", "2.weight", "2.bias"]
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_float32_masters(jobs: Jobs, dtype: torch.dtype) -> None:
    """Steps that are too small to show in the parameter add up in the master."""
    model = torch.nn.Linear(6, 3).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=1e-4), model)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(1, 6, dtype=dtype)).sum().backward()
        optimizer.step()
    optimizer.finish()
    assert model.weight.dtype is dtype
    assert torch.allclose(optimizer._memory.weights[0], torch.full((3, 6), 0.99), atol=1e-5)
    assert torch.equal(model.weight, optimizer._memory.weights[0].to(dtype))


def test_channels_last_keeps_its_strides(jobs: Jobs) -> None:
    def convolution() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    expected, model = convolution(), convolution()
    reference = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for one, other in ((expected, reference), (model, optimizer)):
        for _ in range(3):
            other.zero_grad()
            one(x).square().mean().backward()
            other.step()
    optimizer.finish()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


def test_sparse_gradients_are_made_dense(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    def embedding() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2))

    expected, model = embedding(), embedding()
    reference = SGD(expected.parameters(), lr=0.1)
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    for one, other in ((expected, reference), (model, optimizer)):
        for _ in range(2):
            other.zero_grad()
            one(torch.tensor([1, 2, 2])).square().mean().backward()
            other.step()
    optimizer.finish()
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6
    # 40 floats instead of 3 whole numbers of 8 bytes and 3 rows of 4 floats.
    said = "0.weight: its sparse gradient is made dense to be sent: 160 bytes in each step instead of 72 in this one"
    assert caplog.text.count(said) == caplog.text.count("sparse") == 1


def test_a_gradient_that_is_not_finite_skips_the_step(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job = jobs(2)
    steps = 4

    def work() -> Any:
        model = mlp()
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            for step in range(steps):
                optimizer.zero_grad()
                scale = float("nan") if step == 1 and optimizer.rank == 1 else 1.0
                (loss_of(model, step, optimizer.rank) * scale).backward()
                optimizer.step()
            return optimizer.rank, optimizer.skipped, weights_of(model)

    (_, skipped0, weights0), (_, skipped1, weights1) = sorted(job.run(work), key=lambda result: result[0])
    assert (skipped0, skipped1) == (0, 1)
    assert "step 1: the gradient of" in caplog.text
    assert "is not finite" in caplog.text
    expected = mlp()
    reference = SGD(expected.parameters(), lr=0.1)
    for step in range(steps):
        reference.zero_grad()
        ranks = [0] if step == 1 else [0, 1]
        (sum(loss_of(expected, step, rank) for rank in ranks) / len(ranks)).backward()
        reference.step()
    assert largest_difference(weights0, weights1) == 0
    assert largest_difference(weights0, weights_of(expected)) < 1e-6


def test_empty_step_leaves_it_to_the_others(jobs: Jobs) -> None:
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                if optimizer.rank == 1 and step == 1:
                    optimizer.empty_step()
                    continue
                loss_of(model, step, optimizer.rank).backward()
                if optimizer.rank == 1 and step == 2:
                    optimizer.empty_step()  # Drops what was sent.
                else:
                    optimizer.step()
            assert optimizer.version == 3
        return weights_of(model)

    expected = mlp()
    reference = SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        reference.zero_grad()
        ranks = [0, 1] if step == 0 else [0]
        (sum(loss_of(expected, step, rank) for rank in ranks) / len(ranks)).backward()
        reference.step()
    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected)) < 1e-6


def test_in_asp_workers_do_not_wait(jobs: Jobs) -> None:
    job = jobs(2, "asp")

    def work() -> Any:
        model = mlp()
        with job.wrap(SGD(model.parameters(), lr=0.05), model) as optimizer:
            for step in range(20 if optimizer.rank else 5):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
            optimizer.pull()
            optimizer.finish()
            return optimizer.version, weights_of(model)

    (version, one), (other_version, other) = job.run(work)
    assert version == other_version == 25
    assert largest_difference(one, other) == 0


def test_a_stale_answer_is_counted_and_training_goes_on(fakes: Jobs) -> None:
    job = fakes(1, "asp")
    assert job.server is not None
    job.server.stale = {2}
    optimizer = train(job, mlp(), 3)
    assert (optimizer.dropped, optimizer.version, optimizer.step_number) == (1, 2, 3)


def test_a_rate_is_told_when_it_changes(fakes: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job = fakes()
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model, overlap="backward")
    rates = [0.1, 0.1, 0.05, 0.05, 0.0]
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert job.server is not None
    assert [push.learning_rate for push in job.server.pushes] == [None, None, 0.05, None, 0.0]
    loss_of(model, 9, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert "lr was changed between backward() and step(), when the push was under way: it is told" in caplog.text


def test_what_groups_have_is_told_when_it_changes(fakes: Jobs) -> None:
    job = fakes()
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = job.wrap(SGD(groups, lr=0.1, momentum=0.9), model, overlap="backward")
    # Scaled alike; apart; with a momentum of its own; and back.
    for step, (first, second, momentum) in enumerate(
        [(0.1, 0.2, 0.9), (0.05, 0.1, 0.9), (0.05, 0.2, 0.9), (0.05, 0.2, 0.5), (0.05, 0.2, 0.5), (0.05, 0.1, 0.9)]
    ):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = first, second
        optimizer.param_groups[1]["momentum"] = momentum
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert job.server is not None
    assert [spec.group for spec in job.server.layout] == [1, 1, 2, 2]
    assert [push.learning_rate for push in job.server.pushes] == [None, 0.05, None, None, None, None]
    told = [push.groups for push in job.server.pushes]
    assert told == [
        None,
        None,
        [{}, {}, {"learning_rate": 0.1}],  # Times the factor of its tensors, 2.
        [{}, {}, {"learning_rate": 0.1, "momentum": 0.5}],
        None,
        [{}, {}, {}],
    ]


def test_what_a_single_group_has_is_told_for_all_as_far_as_it_moves(fakes: Jobs) -> None:
    job = fakes()
    model = mlp()
    optimizer = job.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    for step, beta in enumerate([0.9, 0.8, 0.8, 0.7]):
        optimizer.param_groups[0]["betas"] = (beta, 0.999)
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert job.server is not None
    assert [spec.group for spec in job.server.layout] == [0] * 4
    assert [push.groups for push in job.server.pushes] == [None, [{"beta1": 0.8}], None, [{"beta1": 0.7}]]


def test_a_worker_of_a_running_job_tells_all_that_has_moved_since_its_own_join(fakes: Jobs) -> None:
    job = fakes(version=7)
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step, momentum in enumerate([0.9, 0.8, 0.8]):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    assert job.server is not None
    told = [push.groups for push in job.server.pushes]
    assert told == [None, [{"weight_decay": 0.0, "momentum": 0.8}], None]


def test_a_worker_of_a_running_job_tells_its_rate_and_where_it_continues(
    fakes: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    job = fakes(version=7)
    optimizer = train(job, mlp(), 2)
    assert caplog.text.count("rank 0: the job runs already: this worker continues at step 7") == 1
    assert job.server is not None
    assert [push.learning_rate for push in job.server.pushes] == [0.1, None]
    assert optimizer.version == 9


def test_gradients_leave_while_backward_goes_on(fakes: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the one that is held back until step()."""
    import fake_client

    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    sent: list[int] = []
    plain = fake_client.FakeExchange.ready_at
    monkeypatch.setattr(
        fake_client.FakeExchange, "ready_at", lambda self, i, address: (sent.append(i), plain(self, i, address))[1]
    )
    loss_of(model, 0, 0).backward()
    assert len(sent) == 3
    assert set(sent[:2]) == {2, 3}
    optimizer.step()
    assert sorted(sent) == [0, 1, 2, 3]
    optimizer.zero_grad()
    addresses = {parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None}
    assert not addresses


def test_samples_add_up_over_an_accumulation(fakes: Jobs) -> None:
    job = fakes()
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model, accumulate=2)
    for samples in ((4, 3), (2, 1)):
        for part in samples:
            optimizer.set_samples(part)
            loss_of(model, part, 0).backward()
        optimizer.step()
    assert job.server is not None
    assert [push.samples for push in job.server.pushes] == [7, 3]


def test_samples_that_were_left_out_are_told_after_a_push_that_could_not_begin(fakes: Jobs) -> None:
    job = fakes()
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model, samples=4)
    optimizer.add_passed(8)
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match="momentum has changed"):
        loss_of(model, 0, 0).backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.empty_step()
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    optimizer.step()
    assert job.server is not None
    assert [(push.samples, push.passed) for push in job.server.pushes] == [(0, None), (4, 12)]


@pytest.mark.parametrize("way", ["given_up", "skipped"])
def test_samples_that_were_left_out_are_told_after_a_push_that_was_none(fakes: Jobs, way: str) -> None:
    job = fakes(1, "asp")
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model, samples=4)
    optimizer.add_passed(8)
    loss_of(model, 0, 0).backward()
    if way == "skipped":
        optimizer.empty_step()
    else:
        loss_of(model, 0, 0).backward()
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    optimizer.step()
    assert job.server is not None
    pushes = [(push.samples, push.passed) for push in job.server.pushes]
    assert pushes == [(4, 16 if way == "skipped" else 12)]


def test_samples_add_up_over_no_sync(fakes: Jobs) -> None:
    job = fakes()
    model = mlp()
    optimizer = job.wrap(SGD(model.parameters(), lr=0.1), model)
    for samples in ((4, 3), (2, 1)):
        optimizer.set_samples(samples[0])
        with optimizer.no_sync():
            loss_of(model, 0, 0).backward()
        optimizer.set_samples(samples[1])
        loss_of(model, 1, 0).backward()
        optimizer.step()
    optimizer.set_samples(5)
    optimizer.set_samples(6)
    loss_of(model, 2, 0).backward()
    optimizer.step()
    assert job.server is not None
    assert [push.samples for push in job.server.pushes] == [7, 3, 6]


def test_psgrad_data_with_accumulation_loses_no_batch(jobs: Jobs) -> None:
    """Ten samples, two workers with batches of 4: rank 0 has two batches an epoch and rank 1 one."""
    from psgrad.data import Batches

    x, y = torch.randn(10, 6), torch.randn(10, 3)
    job = jobs(2)

    def work() -> tuple[int, int]:
        model = mlp()
        backwards = 0
        with job.wrap(SGD(model.parameters(), lr=0.1), model, accumulate=2) as optimizer:
            optimizer.zero_grad()
            for inputs, targets in Batches(torch.utils.data.TensorDataset(x, y), optimizer, batch_size=4, epochs=4):
                (torch.nn.functional.mse_loss(model(inputs), targets) / 2).backward()
                backwards += 1
                if backwards % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            steps = optimizer.step_number
        return steps, backwards

    assert sorted(job.run(work)) == [(2, 4), (4, 8)]


def test_psgrad_data_divides_the_samples(jobs: Jobs) -> None:
    """Ten samples, two workers with batches of 4: the second global batch is of two samples, and all are rank 0's."""
    from psgrad.data import Batches

    x, y = torch.randn(10, 6), torch.randn(10, 3)
    job = jobs(2)

    def work() -> int:
        model = mlp()
        seen = 0
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            for inputs, targets in Batches(torch.utils.data.TensorDataset(x, y), optimizer, batch_size=4, epochs=2):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                seen += len(inputs)
            assert optimizer.version == 4
        return seen

    assert sorted(job.run(work)) == [8, 12]


@pytest.mark.parametrize("overlap", ["auto", "backward", "none"])
def test_a_closure_is_called_once_with_gradients_and_its_loss_returned(jobs: Jobs, overlap: str) -> None:
    """As training loops of frameworks do: it zeroes, computes the loss and calls backward()."""

    def train(model: torch.nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = loss_of(model, step, 0)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(float(optimizer.step(closure)))
        return losses

    expected, model = mlp(), mlp()
    with jobs().wrap(SGD(model.parameters(), lr=0.1), model, overlap=overlap) as optimizer:
        assert train(model, optimizer) == pytest.approx(train(expected, SGD(expected.parameters(), lr=0.1)), abs=1e-6)
        assert optimizer.version == 3
        loss_of(model, 3, 0).backward()
        assert optimizer.step() is None
    assert largest_difference(weights_of(model), weights_of(expected)) > 0
