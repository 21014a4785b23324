"""Models on cards train as those in the host's memory do, whatever the cards' streams do late (fake_card.py)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fake_client
from fake_card import POISON, Cards, Stream, on_cards, watch
from fake_client import LocalSteps
from server_processes import Restartable
from torch_support import JOIN_S, Job, Jobs, largest_difference, loss_of, mlp, ps_server, seeded, weights_of

from psgrad.torch import staging  # isort: skip

pytest_plugins = ["torch_fixtures"]

SEEDS = range(4)
STEPS = 6


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def deep(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Two tensors are large enough to be copied by themselves, and six are not."""

    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(
            *(torch.nn.Linear(6, 520), torch.nn.Tanh(), torch.nn.Linear(520, 520), torch.nn.Tanh()),
            *(torch.nn.Linear(520, 520), torch.nn.BatchNorm1d(520), torch.nn.Linear(520, 3)),
        )

    model = seeded(make).to(dtype)
    assert isinstance(model, torch.nn.Sequential)
    return model


def train(
    job: Job,
    make: Callable[[], torch.nn.Module],
    cards: Cards | None = None,
    steps: int = STEPS,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = momentum,
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    """What the workers have in the end."""

    def work() -> dict[str, torch.Tensor]:
        model = make()
        if cards is not None:
            watch(model, cards)
        dtype = next(model.parameters()).dtype
        with job.wrap(optimizer(model), model, **options) as opt:
            for step in range(steps):
                opt.zero_grad()
                for part in range(options.get("accumulate", 1)):
                    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * opt.rank + part))
                    model(x.to(dtype)).float().square().mean().backward()
                opt.step()
        return weights_of(model)

    return job.run(work)


def equal(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in itertools.product(one, other) for name in a if "running" not in name
    )


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., contextlib.AbstractContextManager[Cards]]:
    """Makes cards: `with cards(seed, where) as made`."""

    @contextlib.contextmanager
    def make(seed: int = 0, where: Callable[[torch.Tensor], int | None] = lambda _: 0) -> Iterator[Cards]:
        with monkeypatch.context() as patch, on_cards(patch, Cards(seed), where) as made:
            yield made

    return make


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bsp_has_equal_bits(jobs: Jobs, cards: Any, dtype: torch.dtype, workers: int) -> None:
    expected = train(jobs(workers), lambda: mlp().to(dtype))
    for seed in SEEDS:
        with cards(seed) as made:
            assert equal(train(jobs(workers), lambda: mlp().to(dtype), made), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": "none"}, {"accumulate": 2}, {"buffers": "average"}, {"buffers": "local"}],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_every_way_of_sending_has_equal_bits(jobs: Jobs, cards: Any, options: dict[str, Any]) -> None:
    """Also of a model with BatchNorm, and some tensors of which are copied by themselves."""
    expected = train(jobs(2), deep, steps=3, **options)
    with cards(7) as made:
        assert equal(train(jobs(2), deep, made, steps=3, **options), expected)


@pytest.mark.parametrize("mode", ["asp", "ssp", "backup"])
def test_modes_whose_weights_come_all_at_once(reals: Jobs, cards: Any, mode: str) -> None:
    """One worker: with several, their order is chance."""
    flags = {"ssp": ["--staleness=1"], "backup": ["--backup_workers=0"]}.get(mode, [])
    expected = train(reals(1, mode, *flags), mlp)
    for seed in SEEDS:
        with cards(seed) as made:
            assert equal(train(reals(1, mode, *flags), mlp, made), expected)


LOCAL: dict[str, tuple[str, LocalSteps, tuple[str, ...]]] = {
    "local_sgd": ("local_sgd", LocalSteps("average_weights", steps=2, optimizer="momentum"), ("--local_steps=2",)),
    "gradients": (
        "local_sgd",
        LocalSteps("average_gradients", steps=2, average_every_steps=3, optimizer="momentum"),
        ("--local_sync=gradients", "--local_steps=2", "--average_every=3"),
    ),
    "easgd": (
        "easgd",
        LocalSteps("elastic", steps=2, alpha=0.3, optimizer="momentum"),
        ("--local_steps=2", "--easgd_alpha=0.3"),
    ),
}


@pytest.mark.parametrize("way", LOCAL)
def test_local_steps_have_equal_bits(fakes: Jobs, cards: Any, way: str) -> None:
    mode, local, _ = LOCAL[way]
    expected = train(fakes(1, mode, local=local), deep)
    for seed in SEEDS:
        with cards(seed) as made:
            assert equal(train(fakes(1, mode, local=local), deep, made), expected)


@pytest.mark.parametrize(
    "flags",
    [("--local_steps=2",), ("--local_steps=4", "--fragments=2", "--overlap=1", "--mix=0.5")],
    ids=["whole", "fragments"],
)
def test_diloco_has_equal_bits(reals: Jobs, cards: Any, flags: tuple[str, ...]) -> None:
    flags = ("--optimizer=local", *flags)
    expected = train(reals(2, "diloco", *flags), deep)
    with cards(5) as made:
        assert equal(train(reals(2, "diloco", *flags), deep, made), expected)


def test_a_model_on_two_cards_and_the_host(jobs: Jobs, cards: Any) -> None:
    """The first layer is the host's."""
    places: dict[tuple[int, ...], int | None] = {(5, 6): None, (3, 5): 1}
    expected = train(jobs(2), mlp)
    for seed in SEEDS:
        with cards(seed, lambda tensor: places.get(tuple(tensor.shape), 0)) as made:
            assert equal(train(jobs(2), mlp, made), expected)
            assert {str(card) for card in made.cards} == {"cuda:0", "cuda:1"}


def test_global_weights_show_the_servers(fakes: Jobs, cards: Any) -> None:
    mode, local, _ = LOCAL["local_sgd"]
    with cards(3) as made:
        model = mlp()
        watch(model, made)
        with fakes(1, mode, local=local).wrap(momentum(model), model) as optimizer:
            initial = weights_of(model)
            loss_of(model, 0, 0).backward()
            optimizer.step()
            own = weights_of(model)
            with optimizer.global_weights():
                assert largest_difference(weights_of(model), initial) == 0
            assert largest_difference(weights_of(model), own) == 0


def test_a_step_that_is_dropped_leaves_the_weights(jobs: Jobs, cards: Any) -> None:
    with cards(2) as made:
        model = mlp()
        watch(model, made)
        with jobs().wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
            before = weights_of(model)
            loss_of(model, 0, 0).backward()
            optimizer.empty_step()
            optimizer.empty_step()
            assert largest_difference(weights_of(model), before) == 0
            optimizer.zero_grad()
            loss_of(model, 1, 0).backward()
            optimizer.step()
            assert largest_difference(weights_of(model), before) > 0
            optimizer.pull()


def test_a_gradient_that_is_not_finite_skips_the_step(jobs: Jobs, cards: Any) -> None:
    with cards() as made:
        model = mlp()
        watch(model, made)
        with jobs().wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
            before = weights_of(model)
            (loss_of(model, 0, 0) * float("nan")).backward()
            optimizer.step()
            assert optimizer.skipped == 1
            assert largest_difference(weights_of(model), before) == 0


def test_sparse_gradients(fakes: Jobs, cards: Any) -> None:
    def make() -> torch.nn.Module:
        return seeded(lambda: torch.nn.Embedding(9, 4, sparse=True))  # type: ignore[no-any-return]

    def run(made: Cards | None) -> dict[str, torch.Tensor]:
        model = make()
        if made is not None:
            watch(model, made)
        with fakes().wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                model(torch.tensor([step, 3, 3])).square().sum().backward()
                optimizer.step()
        return weights_of(model)

    expected = run(None)
    with cards(1) as made:
        assert largest_difference(run(made), expected) == 0


def test_small_gradients_are_copied_together(fakes: Jobs, cards: Any) -> None:
    """Backward begins with the last layer."""
    with cards() as made:
        model = seeded(
            lambda: torch.nn.Sequential(torch.nn.Linear(6, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 3))
        )
        watch(model, made)
        with fakes().wrap(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
            (card,) = made.cards
            card.batches.clear()
            model(torch.ones(2, 6)).sum().backward()
            sent = list(card.batches)
            optimizer.step()
        # The last layer's two and the middle one's bias with its weight, which is large; the rest in step().
        assert sent == [4]
        assert card.batches == [4, 2]


def test_gradients_of_another_stream_are_copied_after_that(cards: Any) -> None:
    """Those before are not copied with them: the copies would wait for one of the streams alone."""
    with cards() as made:
        stage = staging.Staging("rank 0")
        sent: list[tuple[int, float]] = []
        hosts = [torch.zeros(3) for _ in range(4)]
        stage.begin("step 0", lambda index, _: sent.append((index, float(hosts[index][0]))))
        stage.put([(torch.zeros(1), torch.zeros(1))])  # Makes the card.
        (card,) = made.cards
        other, own = Stream(), card.computation
        for index, stream in enumerate((own, other, other, own)):
            card.computation = stream
            made.computes()
            stage.send(index, torch.full((3,), index + 1.0), hosts[index])
        stage.drain()
        assert card.batches == [1, 2, 1]
        assert sent == [(index, index + 1.0) for index in range(4)]
        stage.close()


def test_what_a_failed_step_leaves_is_not_sent_with_the_next(cards: Any) -> None:
    with cards():
        stage = staging.Staging("rank 0")
        sent: list[str] = []
        host = torch.zeros(3)
        stage.begin("step 0", lambda index, _: sent.append(f"step 0: {index}"))
        stage.send(0, torch.ones(3), host)
        stage.begin("step 1", lambda index, _: sent.append(f"step 1: {index}"))
        stage.send(1, torch.ones(3), host)
        stage.drain()
        assert sent == ["step 1: 1"]
        stage.close()


def test_what_a_failed_step_leaves_is_not_sent_as_buffers_are_copied(
    fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied before the next push begins."""

    def fail(self: Any, index: int, address: int) -> None:
        raise ValueError("this push can send nothing")

    with cards() as made:
        model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)))
        watch(model, made)
        with fakes().wrap(momentum(model), model, overlap="none") as optimizer:
            model(torch.ones(4, 6)).square().sum().backward()
            with monkeypatch.context() as patch:
                patch.setattr(fake_client.FakeExchange, "ready_at", fail)
                with pytest.raises(ValueError, match="this push can send nothing"):
                    optimizer.step()
            optimizer.step()


def test_what_is_given_up_is_copied_to_its_end_and_not_sent(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what was on its way."""
    with cards() as made:
        made.eager = 0
        stage = staging.Staging("rank 0")
        at_work, drained = threading.Event(), threading.Event()
        sent: list[int] = []

        def ready_at(index: int, _: int) -> None:
            at_work.set()
            assert drained.wait(JOIN_S)
            sent.append(index)

        def drain(self: Any, what: str) -> None:
            drained.set()
            plain(self, what)

        plain = staging._Sender.drain
        monkeypatch.setattr(staging._Sender, "drain", drain)
        large = [torch.full((1 << 18,), index + 1.0) for index in range(3)]
        hosts = [torch.zeros(1 << 18) for _ in large]
        stage.begin("step 0", ready_at)
        for index, gradient in enumerate(large):
            stage.send(index, gradient, hosts[index])
        stage.send(3, torch.ones(3), torch.zeros(3))
        assert at_work.wait(JOIN_S)
        stage.give_up()
        assert sent == [0]
        (card,) = made.cards
        assert not card.copies.copies
        stage.fetch([(torch.ones(3), torch.zeros(3))])
        assert card.batches == [1, 1, 1, 1]
        stage.begin("step 0", ready_at)
        stage.send(3, torch.ones(3), torch.zeros(3))
        stage.drain()
        assert sent == [0, 3]
        stage.close()


def clip(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, step, optimizer.rank).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def twice(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, step, optimizer.rank).backward()
    loss_of(model, step + 100, optimizer.rank).backward()
    optimizer.step()


def scaled(model: torch.nn.Module, optimizer: Any, step: int, unscale: bool = False) -> None:
    """Rank 0 overflows in step 1, and both do in step 3."""
    overflows = step == 3 or (step, optimizer.rank) == (1, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model, step, optimizer.rank) * (float("inf") if overflows else 1.0)).backward()
    if unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)


def scaled_and_clipped(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    scaled(model, optimizer, step, unscale=True)


needs_scaler = pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="no torch.amp.GradScaler")
GIVES_UP = [clip, twice, *(pytest.param(each, marks=needs_scaler) for each in (scaled, scaled_and_clipped))]


@pytest.mark.parametrize("act", GIVES_UP, ids=lambda act: act.__name__)
@pytest.mark.parametrize("make", [mlp, deep])
def test_a_push_is_given_up_and_begun_again_with_equal_bits(
    jobs: Jobs, cards: Any, make: Any, act: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In each step."""

    def run(made: Cards | None) -> list[dict[str, torch.Tensor]]:
        job = jobs(2)

        def work() -> dict[str, torch.Tensor]:
            model = make()
            if made is not None:
                watch(model, made)
            with job.wrap(momentum(model), model, overlap="auto") as optimizer:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    optimizer._steps._sends = True  # Once more.
                    act(model, optimizer, step)
                assert optimizer.skipped == (
                    (2 if optimizer.rank == 0 else 1) if act in (scaled, scaled_and_clipped) else 0
                )
            return weights_of(model)

        return job.run(work)

    expected = run(None)
    for seed in SEEDS if make is mlp else (2,):
        caplog.clear()
        with cards(seed) as made:
            assert equal(run(made), expected)
        assert caplog.text.count("from now on gradients are sent in step()") == 2 * STEPS


@pytest.mark.parametrize("act", GIVES_UP, ids=lambda act: act.__name__)
def test_nothing_is_sent_of_a_push_after_it_was_given_up(
    fakes: Jobs, cards: Any, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the card has copied is late: it is to be sent when the push has to be over."""
    late = threading.Event()
    send, end_copies, give_up = staging._Sending.send, staging._Sender.give_up, fake_client.FakeExchange.give_up
    given_up: list[int] = []

    def send_late(self: Any) -> None:
        assert late.wait(JOIN_S)
        send(self)

    def end_copies_late(self: Any, what: str) -> Any:
        late.set()
        return end_copies(self, what)

    def give_up_first(self: Any, tensor: int) -> None:
        given_up.append(tensor)
        give_up(self, tensor)
        late.set()

    expected, model = deep(), deep()
    with fakes().wrap(momentum(expected), expected, overlap="none") as optimizer:
        act(expected, optimizer, 0)
    with cards() as made:
        watch(model, made)
        with fakes().wrap(momentum(model), model) as optimizer:
            monkeypatch.setattr(staging._Sending, "send", send_late)
            monkeypatch.setattr(staging._Sender, "give_up", end_copies_late)
            monkeypatch.setattr(fake_client.FakeExchange, "give_up", give_up_first)
            act(model, optimizer, 0)
            assert len(given_up) == 1
    assert equal([weights_of(model)], [weights_of(expected)])


def test_weights_are_on_the_card_when_a_push_is_given_up(
    fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the servers went back, the end of the push writes others to the host's memory."""
    give_up = fake_client.FakeExchange.give_up
    read: list[bool] = []

    def look(self: Any, tensor: int) -> None:
        read.extend(bool(card.reading) for card in made.cards)
        give_up(self, tensor)

    with cards() as made:
        model = mlp()
        watch(model, made)
        with fakes().wrap(momentum(model), model) as optimizer:
            assert made.cards[0].reading
            monkeypatch.setattr(fake_client.FakeExchange, "give_up", look)
            clip(model, optimizer, 0)
    assert read == [False]


def test_values_of_gradients_on_a_card_are_not_looked_at(
    fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for them in backward()."""

    def fail(*_: Any) -> Any:
        raise AssertionError("a card's gradient was looked at")

    monkeypatch.setattr("psgrad.torch.watch.Watch._look", fail)
    with cards() as made:
        train(fakes(), mlp, made)


def test_weights_are_not_written_while_they_may_be_read(fakes: Jobs, cards: Any) -> None:
    """As by an evaluation between backward() and step()."""
    with cards() as made:
        model = mlp()
        watch(model, made)
        with fakes().wrap(momentum(model), model) as optimizer:
            loss_of(model, 0, 0).backward()
            model(torch.ones(2, 6))
            optimizer.step()
            model(torch.ones(2, 6))
            optimizer.pull()
            model(torch.ones(2, 6))
            optimizer.empty_step()


class Half(torch.nn.Module):
    """A head that not every worker uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 4)
        self.head = torch.nn.Linear(4, 3)


def test_a_worker_that_copies_no_gradient_gets_new_weights(jobs: Jobs, cards: Any) -> None:
    """The body is in the host's memory. Rank 1 does not use the head."""

    def run(made: Cards | None) -> list[dict[str, torch.Tensor]]:
        job = jobs(2)

        def work() -> dict[str, torch.Tensor]:
            model = seeded(Half)
            if made is not None:
                watch(model, made)
            with job.wrap(momentum(model), model) as optimizer:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    body = model.body(torch.full((2, 6), step + 1.0))
                    (model.head(body) if optimizer.rank == 0 else body).square().mean().backward()
                    optimizer.step()
            return weights_of(model)

        return job.run(work)

    expected = run(None)
    for seed in SEEDS:
        with cards(seed, lambda tensor: 0 if tensor.shape[0] == 3 else None) as made:
            assert equal(run(made), expected)


def test_hooks_of_several_cards_come_one_after_the_other(
    fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd has a thread for each card."""
    both = threading.Barrier(2)
    begun: list[int] = []
    plain = fake_client.FakeClient.begin

    def begin(self: Any, *arguments: Any, **options: Any) -> Any:
        begun.append(threading.get_ident())
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # Two that come here at the same time go on at once.
        return plain(self, *arguments, **options)

    with cards(0, lambda tensor: 0 if tensor.shape[0] == 3 else 1):
        model = mlp()
        optimizer = fakes().wrap(momentum(model), model)
        monkeypatch.setattr(fake_client.FakeClient, "begin", begin)
        losses = [model[0](torch.ones(2, 6)).sum(), model[2](torch.ones(2, 5)).sum()]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        assert len(begun) == 1
        optimizer.step()
        optimizer.finish()


def test_no_hook_waits_for_the_card(fakes: Jobs, cards: Any) -> None:
    with cards() as made:
        model = deep()
        watch(model, made)
        with fakes().wrap(momentum(model), model) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                made.asked.clear()
                model(torch.ones(4, 6) + step).square().mean().backward()
                assert threading.get_ident() not in made.asked
                optimizer.step()


def test_memory_is_pinned_until_the_worker_has_left(fakes: Jobs, cards: Any) -> None:
    with cards() as made:
        model = mlp()
        optimizer = fakes().wrap(momentum(model), model)
        assert len(made.pinned) == 8
        loss_of(model, 0, 0).backward()
        optimizer.step()
        names = [thread.name for thread in threading.enumerate()]
        assert "psgrad: gradients of rank 0" in names
        optimizer.finish()
        assert not made.pinned
        assert "psgrad: gradients of rank 0" not in [thread.name for thread in threading.enumerate()]


def test_memory_that_is_let_go_of_is_not_pinned(fakes: Jobs, cards: Any) -> None:
    mode, local, _ = LOCAL["local_sgd"]
    with cards() as made:
        model = mlp()
        optimizer = fakes(1, mode, local=local).wrap(momentum(model), model)
        assert len(made.pinned) == 4
        optimizer._memory.staging.close = lambda: None
        optimizer.finish()
        del optimizer
        gc.collect()
        assert not made.pinned


def test_memory_that_cannot_be_pinned(fakes: Jobs, cards: Any, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error 1")

    expected = train(fakes(), mlp)
    with cards() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fake_card.Card.pin", refuse)
        assert equal(train(fakes(), mlp, made), expected)
    assert caplog.text.count("more slowly: CUDA error 1") == 1


def test_what_the_sending_raises_is_raised_in_step(fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such tensor")

    with cards():
        model = mlp()
        optimizer = fakes().wrap(momentum(model), model)
        monkeypatch.setattr(fake_client.FakeExchange, "ready_at", refuse)
        loss_of(model, 0, 0).backward()
        with pytest.raises(ValueError, match="no such tensor"):
            optimizer.step()
        optimizer.leave("the test has ended")


def test_a_card_that_hangs_is_given_up(fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with cards() as made:
        model = mlp()
        optimizer = fakes().wrap(momentum(model), model)
        loss_of(model, 0, 0).backward()
        optimizer.step()
        monkeypatch.setattr(staging, "_CARD_S", 0.05)
        monkeypatch.setattr(staging, "_CLOSE_S", 0.05)
        made.stuck = True
        optimizer.zero_grad()
        loss_of(model, 1, 0).backward()
        with pytest.raises(TimeoutError, match=r"cuda:0 has not done so within 0"):
            optimizer.step()
        optimizer.leave("the card hangs")
        assert "rank 0: memory of gradients and weights is not freed: the last copies are to end" in caplog.text
        assert made.pinned
        staging._stuck.clear()


def test_a_card_that_is_broken_does_not_keep_a_worker_from_leaving(
    fakes: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = fakes()
    with cards():
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        loss_of(model, 0, 0).backward()
        monkeypatch.setattr("fake_card.Card.record", fail)
        with pytest.raises(RuntimeError, match="device-side assert"):
            optimizer.step()
        optimizer.leave("the card is broken")
        assert job.server is not None
        assert job.server.left == {0: "the card is broken"}
        assert "not freed: CUDA error: device-side assert triggered" in caplog.text
        staging._stuck.clear()


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
def test_a_rollback_brings_the_checkpoints_weights(
    restartable: Restartable, reals: Jobs, cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes back to the step that the servers went back to, so the end is that of a run without it."""

    def run(job: Job, made: Cards | None, act: Callable[[int], None]) -> dict[str, torch.Tensor]:
        model = mlp()
        if made is not None:
            watch(model, made)
        with job.wrap(momentum(model), model) as optimizer:
            while optimizer.step_number < 12:
                act(optimizer.step_number)
                optimizer.zero_grad()
                loss_of(model, optimizer.step_number, 0).backward()
                optimizer.step()
        return weights_of(model)

    acted: list[int] = []

    def kill(step: int) -> None:
        if step == 7 and not acted:
            acted.append(step)
            restartable.kill(0)
            restartable.start_again(0)

    expected = run(reals(1), None, lambda _: None)
    address = restartable.start(1, every="3")
    with cards(4) as made:
        assert largest_difference(run(Job(address, 1), made, kill), expected) == 0
    assert acted


def test_tensors_that_are_nowhere_or_elsewhere_are_refused(fakes: Jobs) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3, device="meta"))
    with pytest.raises(ValueError, match=r"0.weight has no values \(it is on meta\).*to_empty"):
        fakes().wrap(momentum(model), model)
    for kind in ("mps", "xpu", "xla"):
        with pytest.raises(ValueError, match=rf"0.weight is on {kind}:0.*the host's memory and on CUDA cards"):
            staging.check_device("0.weight", SimpleNamespace(device=torch.device(kind, 0)))  # type: ignore[arg-type]


def test_a_model_that_is_moved_is_noticed(fakes: Jobs, cards: Any) -> None:
    place = [0]
    with cards(0, lambda _: place[0]):
        model = mlp()
        optimizer = fakes().wrap(momentum(model), model)
        loss_of(model, 0, 0).backward()
        place[0] = 1
        with pytest.raises(RuntimeError, match=r"0.weight is on cuda:1, and was on cuda:0 when"):
            optimizer.step()
        optimizer.leave("the test has ended")


def test_pages_are_pinned_once() -> None:
    page = 4096
    memory = torch.zeros(5 * page)
    first = memory.data_ptr() // 4 * 4
    begin = (-first // 4) % (page // 4)  # The first element of a whole page.
    spans = [(0, 10), (10, 20), (1030, 2050), (4 * 1024, 5 * 1024), (0, 0)]
    tensors = [memory[begin + start : begin + end] for start, end in spans]
    base = memory.data_ptr() + 4 * begin
    assert staging.page_ranges(tensors, page) == [
        (base, base + page),
        (base + page, base + 3 * page),
        (base + 4 * page, base + 5 * page),
    ]


def test_the_fake_notices_a_wait_that_is_missing() -> None:
    """A card whose copies nobody waits for shows what it would do."""
    made = Cards(eager=0)
    card = made.make(torch.device("cuda", 0))
    made.computes()
    host = torch.zeros(3)
    card.copy_out([(torch.ones(3), host)])  # Neither after the computation nor waited for.
    assert (host == POISON).all()
    event = card.record(card.copies)
    while not card.happened(event):
        pass
    assert (host == POISON).all()
    card.wait(card.copies, card.record(card.computation))
    card.copy_out([(torch.ones(3), host)])
    event = card.record(card.copies)
    while not card.happened(event):
        pass
    assert (host == 1).all()
    weights, parameter = torch.ones(3), torch.zeros(3)
    card.copy_in([(parameter, weights)])
    assert (parameter == POISON).all()
    card.wait(card.computation, card.record(card.copies))
    assert (parameter == 1).all()
    weights.fill_(2)
    with pytest.raises(AssertionError, match="memory was written before"):
        made.check()


class FakeCudart:
    """Registers at most `most` pieces."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        assert flags == 1
        if len(self.registered) >= self.most:
            return 2
        self.registered.append((begin, size))
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        self.registered = [each for each in self.registered if each[0] != begin]
        return 0


class FakeTorchCuda:
    """The calls of torch.cuda that Cuda makes."""

    def __init__(self, most: int = 100) -> None:
        self.runtime = FakeCudart(most)
        self.calls: list[str] = []
        fake = self

        class Event:
            def record(self, stream: Any) -> None:
                fake.calls.append(f"record {stream}")

            def query(self) -> bool:
                return True

        self.Event = Event

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.calls.append("wait"))

    def current_stream(self, device: torch.device) -> Any:
        return "current"

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def cudart(self) -> FakeCudart:
        return self.runtime


def test_cuda_copies_and_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host's tensors, as there is no card; tests/gpu/test_torch_cuda.py is for those who have one."""
    from psgrad.torch import cuda

    fake = FakeTorchCuda()
    monkeypatch.setattr(cuda, "_cuda", fake)
    card = cuda.Cuda(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
        host = torch.zeros(3, 2)
        card.copy_out([(tensor, host)])
        assert torch.equal(host, tensor.float())
        card.copy_in([(tensor, host + 1)])
        assert torch.equal(tensor.float(), host + 1)
    event = card.record(card.current())
    card.wait(card.copies, event)
    assert card.happened(event)
    assert fake.calls == ["record current", "wait"]


def test_cuda_pins_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgrad.torch import cuda

    memory = [torch.zeros(100_000) for _ in range(3)]
    fake = FakeTorchCuda()
    monkeypatch.setattr(cuda, "_cuda", fake)
    unpin = cuda.Cuda(torch.device("cpu")).pin(memory)
    pinned = fake.runtime.registered
    for each in memory:
        assert any(begin <= each.data_ptr() and each.data_ptr() + 400_000 <= begin + size for begin, size in pinned)
    unpin()
    assert not fake.runtime.registered
    fake.runtime.most = 0
    with pytest.raises(RuntimeError, match=r"cudaHostRegister of \d+ bytes: CUDA error 2"):
        cuda.Cuda(torch.device("cpu")).pin(memory)
    assert not fake.runtime.registered
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release="5.4.0-42-generic"))
    with pytest.raises(RuntimeError, match=r"Linux 5.4.0-42-generic, and before 5.9"):
        cuda.Cuda(torch.device("cpu")).pin(memory)
