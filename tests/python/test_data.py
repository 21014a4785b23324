"""The division of a data set among workers: the same as the C++ worker's, and exact in every mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import psgrad
from psgrad.data import Batches, Drained, Plan, Sampler, budget_of, permutation


@dataclass
class Optimizer:
    """What Batches asks of one, and what it was told."""

    rank: int = 0
    num_workers: int = 1
    step_number: int = 0
    empty_contributions: bool = True
    told: list[Any] = field(default_factory=list)

    def set_samples(self, samples: int) -> None:
        self.told.append(samples)

    def empty_step(self) -> None:
        self.told.append("empty")
        self.step_number += 1


@dataclass
class BackupOptimizer(Optimizer):
    """A job that goes on without a worker that is late."""

    synchronous: bool = True
    exact_versions: bool = False
    passed: int = 0

    def add_passed(self, samples: int) -> None:
        self.passed += samples


class WaitAgain(Exception):
    pass


@pytest.fixture(autouse=True)
def wait_again(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """psgrad.WaitAgain, also where the C++ module is not built."""
    monkeypatch.setattr(psgrad, "WaitAgain", WaitAgain, raising=False)
    return WaitAgain


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def without_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are not about torch do not depend on whether another one has imported it."""
    if "torch" not in request.fixturenames:
        monkeypatch.delitem(sys.modules, "torch", raising=False)


def samples(count: int) -> list[int]:
    return list(range(100, 100 + count))


# ---- The permutation


def fnv(values: Any) -> int:
    found = 1469598103934665603
    for value in values:
        found = ((found ^ value) * 1099511628211) % 2**64
    return found


@pytest.mark.parametrize(
    ("count", "seed", "epoch", "first", "fingerprint"),
    [
        (10, 1, 0, [9, 7, 6, 0, 3, 1, 8, 5, 2, 4], 11509417804528592076),
        (10, 1, 1, [6, 0, 3, 4, 7, 1, 9, 5, 2, 8], 4279776463486680726),
        (17, 2**64 - 1, 3, [3, 7, 0, 12, 1, 16, 11, 10, 2, 4], 7015314407026229139),
        (1, 7, 0, [0], 4953163356653287321),
        (1000, 42, 5, [275, 419, 64, 584, 852, 590, 242, 73, 609, 658], 6901235892683131819),
        (60000, 1, 2, [5350, 722, 55450, 37550, 6161, 12755, 45031, 13070, 3890, 45029], 15426343611575894107),
    ],
)
def test_an_epoch_has_the_permutation_of_the_cpp_worker(
    count: int, seed: int, epoch: int, first: list[int], fingerprint: int
) -> None:
    # Made by MakeRandom(seed, epoch) of common/random.h and PermuteInPlace of worker/data/permute.h.
    order = permutation(count, seed, epoch)
    assert list(order[:10]) == first
    assert fnv(order) == fingerprint


# ---- Shares


def test_ranks_divide_each_global_batch_and_use_every_sample_once() -> None:
    ranks = [Sampler(10, num_workers=2, rank=rank, batch_size=3) for rank in range(2)]
    alone = Sampler(10, num_workers=1, rank=0, batch_size=6)
    assert ranks[0].steps_per_epoch == alone.steps_per_epoch == 2
    for step in range(4):
        shares = [rank.plan(step) for rank in ranks]
        assert shares[0].indices + shares[1].indices == alone.plan(step).indices
        assert shares[0].epoch == step // 2
    assert [len(rank.plan(1).indices) for rank in ranks] == [3, 1]
    assert [rank.samples_of(1) for rank in ranks] == [3, 1]
    assert sorted(alone.plan(0).indices + alone.plan(1).indices) == list(range(10))


def test_steps_may_come_in_any_order() -> None:
    sampler = Sampler(10, num_workers=1, rank=0, batch_size=5)
    plans = [sampler.plan(step) for step in range(6)]
    assert [sampler.plan(step) for step in reversed(range(6))] == plans[::-1]


def test_full_is_a_part_of_all_samples_and_file_order_can_be_kept() -> None:
    sampler = Sampler(10, num_workers=3, rank=2, batch_size="full", shuffle=False)
    assert sampler.batch_size == 4
    assert sampler.plan(5) == Plan(epoch=5, epoch_step=0, indices=[8, 9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "the data set has 0 samples"),
        ({"batch_size": 0}, "batch_size is 0; expected 1 to"),
        ({"rank": 2}, "rank is 2 of 2"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_share_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**{"samples": 10, "num_workers": 2, "rank": 0, "batch_size": 2, **options})  # type: ignore[arg-type]


def test_a_budget_has_the_nearest_number_of_batches_and_at_least_one() -> None:
    assert [budget_of(epochs, 10) for epochs in (0.01, 0.25, 0.251, 1, 2.5)] == [1, 3, 3, 10, 25]


# ---- Loops


def test_a_loop_gets_its_rank_s_batches_and_tells_their_samples_first() -> None:
    opt = Optimizer(rank=1, num_workers=2)
    batches = Batches(samples(10), opt, batch_size=3, epochs=2)
    sampler = Sampler(10, num_workers=2, rank=1, batch_size=3)
    assert len(batches) == 4
    for step, batch in enumerate(batches):
        assert batch == [100 + index for index in sampler.plan(step).indices]
        assert opt.told[-1] == len(batch)
        assert batches.plan == sampler.plan(step)
    assert opt.told == [3, 1, 3, 1]


def test_a_rank_without_samples_makes_an_empty_step_and_its_loop_no_batch() -> None:
    opt = Optimizer(rank=1, num_workers=2)
    batches = Batches(samples(8), opt, batch_size=3, epochs=2)
    assert [len(batch) for batch in batches] == [3, 3]
    assert len(batches) == 2
    assert opt.told == [3, "empty", 3, "empty"]


def test_no_empty_step_is_made_where_the_mode_has_none() -> None:
    opt = Optimizer(rank=1, num_workers=2, empty_contributions=False)
    assert [len(batch) for batch in Batches(samples(8), opt, batch_size=3)] == [3]
    assert opt.told == [3]


def test_a_client_needs_an_empty_step_where_there_may_be_one() -> None:
    class Client:
        rank, num_workers, start_step = 1, 2, 0

    assert len(Batches(samples(10), Client(), batch_size=3)) == 2
    with pytest.raises(ValueError, match="empty_step: this worker needs one"):
        Batches(samples(8), Client(), batch_size=3)
    empty: list[str] = []
    list(Batches(samples(8), Client(), batch_size=3, empty_step=lambda: empty.append("step")))
    assert empty == ["step"]


def test_each_epoch_can_be_a_loop_of_its_own() -> None:
    batches = Batches(samples(5), Optimizer(), batch_size=2, epochs=2.5)
    assert [(epoch, [len(batch) for batch in part]) for epoch, part in batches.by_epoch()] == [
        (0, [2, 2, 1]),
        (1, [2, 2, 1]),
        (2, [2, 2]),
    ]


def test_a_loop_goes_on_where_it_was_left_and_an_empty_one_is_an_error() -> None:
    batches = Batches(samples(6), Optimizer(), batch_size=2, shuffle=False)
    for batch in batches:
        assert batch == [100, 101]
        break
    assert list(batches) == [[102, 103], [104, 105]]
    with pytest.raises(RuntimeError, match="all batches have been used"):
        list(batches)


def test_a_worker_that_joins_later_begins_at_the_job_s_step(caplog: pytest.LogCaptureFixture) -> None:
    assert list(Batches(samples(6), Optimizer(step_number=2), batch_size=2, shuffle=False)) == [[104, 105]]
    assert not caplog.records
    Batches(samples(6), Optimizer(step_number=3), batch_size=2)
    assert "the job has made 3 of 3 steps already" in caplog.text


def test_a_worker_that_was_left_behind_skips_what_others_have_passed() -> None:
    opt = BackupOptimizer()
    seen = []
    for batch in Batches(samples(10), opt, batch_size=2, shuffle=False):
        seen.append(batch[0])
        opt.step_number += 3 if len(seen) == 2 else 1
    assert seen == [100, 102, 108]
    assert opt.passed == 4


@pytest.mark.parametrize(("exchange", "first"), [("average_weights", 6), ("elastic", 6), ("average_gradients", 5)])
def test_with_local_steps_a_worker_begins_after_as_many_batches_as_its_exchanges_have(
    exchange: str, first: int
) -> None:
    @dataclass
    class LocalSteps:
        exchange: str
        steps: int = 3
        average_every_steps: int = 5
        average_every_epochs: float = 0

    @dataclass
    class LocalOptimizer(Optimizer):
        local_steps: LocalSteps | None = None

    # Gradients are averaged after batches 3, 6, …; weights after 5, 10, …
    opt = LocalOptimizer(step_number=2, local_steps=LocalSteps(exchange))
    assert next(iter(Batches(samples(20), opt, batch_size=1, shuffle=False))) == [100 + first]


def test_samples_that_are_tuples_make_a_tuple_of_lists() -> None:
    data = [(index, str(index)) for index in range(4)]
    assert list(Batches(data, Optimizer(), batch_size=2, shuffle=False)) == [([0, 1], ["0", "1"]), ([2, 3], ["2", "3"])]
    sums = Batches(samples(4), Optimizer(), batch_size=2, shuffle=False, collate=sum)
    assert list(sums) == [201, 205]


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no rank; expected a psgrad optimizer or client"):
        Batches(samples(4), object(), batch_size=2)
    with pytest.raises(ValueError, match="epochs is 0"):
        Batches(samples(4), Optimizer(), batch_size=2, epochs=0)


# ---- torch


class Squares:
    """A map-style data set."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def test_torch_makes_tensors_of_the_batches(torch: Any) -> None:
    (x, y), *_ = Batches(Squares(4), Optimizer(), batch_size=4, shuffle=False)
    assert torch.equal(x, torch.arange(4))
    assert torch.equal(y, torch.arange(4) ** 2)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_data_loader_brings_the_same_batches(processes: int, torch: Any) -> None:
    opts = [Optimizer(rank=1, num_workers=2) for _ in range(2)]
    plain = list(Batches(Squares(8), opts[0], batch_size=3, epochs=3))
    loaded = list(Batches(Squares(8), opts[1], batch_size=3, epochs=3, loader={"num_workers": processes}))
    assert len(plain) == len(loaded) == 3
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain, loaded, strict=True))
    assert opts[0].told == opts[1].told == [3, "empty"] * 3


def test_a_data_loader_of_one_s_own_takes_the_sampler(torch: Any) -> None:
    batches = Batches(Squares(10), Optimizer(rank=0, num_workers=2), batch_size=3, epochs=2)
    for epoch in range(2):
        ours = [x.tolist() for x, _ in torch.utils.data.DataLoader(Squares(10), 3, sampler=batches.sampler(epoch))]
        assert ours == batches.batch_sampler(epoch)
        assert ours == [
            Sampler(10, num_workers=2, rank=0, batch_size=3).plan(2 * epoch + step).indices for step in (0, 1)
        ]


# ---- Runs that the chief hands out


class Chief:
    """Answers take_run from a list: a run, None for done, or "wait"."""

    hands_out_runs = True

    def __init__(self, answers: list[Any], *, fills: bool = False, open_batches: int = 0, accumulate: int = 1) -> None:
        self.rank, self.num_workers = 0, 2
        self.accumulate = accumulate
        self.empty_contributions = fills
        self.open_batches = open_batches
        self.rollbacks = 0
        self.asked: list[tuple[Any, ...]] = []
        self.empty_steps = 0
        self.asked_to_leave = False
        self.settled = False
        self.left_because = ""
        self.ahead: set[int] = set()
        self.used = 0
        self._answers = answers

    def take_run(
        self, number: int, finished: int, samples: int, batch: int, runs: int, wait: float | None = None, ahead: int = 0
    ) -> Any:
        self.asked.append((number, finished, samples, batch, runs, wait))
        self.ahead.add(ahead)
        answer = self._answers.pop(0)
        if answer == "wait":
            raise WaitAgain
        return answer

    def use_runs(self, count: int) -> None:
        self.used = count

    def settle(self) -> None:
        self.open_batches = 0
        self.settled = True

    def leave(self, reason: str) -> None:
        self.left_because = reason

    def empty_step(self) -> None:
        self.empty_steps += 1


def test_runs_are_batches_of_a_single_worker_s_permutation() -> None:
    chief = Chief([1, 3, 4, None])
    alone = Sampler(10, num_workers=1, rank=0, batch_size=4)
    batches = Batches(list(range(10)), chief, batch_size=4, epochs=2)
    assert (batches.steps_per_epoch, batches.total) == (3, 6)
    assert list(batches) == [alone.plan(run).indices for run in (1, 3, 4)]
    # Each run is finished when the next is asked for.
    assert chief.asked == [(number, number - 1, 10, 4, 6, None) for number in (1, 2, 3, 4)]
    with pytest.raises(TypeError, match="not known"):
        len(batches)


def test_runs_are_the_same_for_a_rank_beyond_those_that_the_job_began_with() -> None:
    chief = Chief([1, None])
    chief.rank = 3  # Where workers come and go.
    alone = Sampler(10, num_workers=1, rank=0, batch_size=4)
    assert list(Batches(list(range(10)), chief, batch_size=4)) == [alone.plan(1).indices]


def test_a_worker_without_a_run_fills_the_steps_of_others() -> None:
    chief = Chief([0, "wait", "wait", 2, None], fills=True)
    assert len(list(Batches(samples(10), chief, batch_size=4))) == 2
    assert chief.empty_steps == 2
    assert [(number, finished) for number, finished, *_ in chief.asked] == [(1, 0), (2, 1), (2, 1), (2, 1), (3, 2)]
    assert chief.asked[0][-1] == pytest.approx(0.02)


def test_a_late_run_of_an_epoch_belongs_to_the_loop_of_the_next() -> None:
    chief = Chief([0, 3, 2, 4, None])
    parts = [(epoch, len(list(part))) for epoch, part in Batches(samples(10), chief, batch_size=4, epochs=2).by_epoch()]
    assert parts == [(0, 1), (1, 3)]


def test_what_is_not_pushed_yet_is_not_finished_and_is_pushed_before_a_wait() -> None:
    chief = Chief([0, "wait", 1, None], open_batches=1)
    list(Batches(samples(10), chief, batch_size=4))
    assert [(number, finished, wait) for number, finished, _, _, _, wait in chief.asked] == [
        (1, 0, None),
        (2, 0, 0.0),
        (2, 1, None),
        (3, 2, None),
    ]


@pytest.mark.parametrize(
    ("answers", "message"),
    [([7], "the chief handed out run 7 of 3"), (["wait"], "waiting for a run of samples while 0 of this worker's")],
)
def test_an_answer_that_cannot_be_is_an_error(answers: list[Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        list(Batches(samples(10), Chief(answers), batch_size=4))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_reads_runs_ahead_and_which_are_used_is_told(torch: Any, workers: int) -> None:
    answers = [*range(12), "wait", "wait", 12, "wait", 13, None, None, None]
    chief = Chief(list(answers), fills=True)
    loader = {"num_workers": workers, **({"prefetch_factor": 3} if workers else {})}
    batches = Batches(Squares(56), chief, batch_size=4, loader=loader)
    alone = Sampler(56, num_workers=1, rank=0, batch_size=4)
    got = []
    for number, (x, y) in enumerate(batches, 1):
        assert chief.used == number
        assert torch.equal(x**2, y)
        taken = sum(isinstance(answer, int) for answer in answers[: len(chief.asked)])
        assert taken - number <= 3 * workers
        # What is finished are those that the loop is through with, whatever was taken.
        assert chief.asked[-1][1] <= number - 1
        got.append(x.tolist())
    assert got == [alone.plan(run).indices for run in range(14)]
    assert chief.ahead == {3 * workers}
    assert chief.empty_steps > 0


def test_a_rollback_drops_what_was_read_ahead(torch: Any) -> None:
    chief = Chief([0, 1, 2, 3, "wait", 0, 1, 2, 3, None, None, None])

    batches = Batches(Squares(16), chief, batch_size=4, loader={"num_workers": 1, "prefetch_factor": 3})
    alone = Sampler(16, num_workers=1, rank=0, batch_size=4)
    got = []
    for x, _ in batches:
        got.append(x.tolist())
        if len(got) == 2:
            chief.rollbacks = 1
    assert got == [alone.plan(run).indices for run in (0, 1, 0, 1, 2, 3)]
    assert chief.used == 4


def test_a_run_is_used_when_the_loop_gets_it_and_not_before() -> None:
    """At the end of an epoch the next one's first run has been taken: a push that is made then is not made with it."""
    chief = Chief([0, 1, 2, 3, None])
    batches = Batches(samples(10), chief, batch_size=4, epochs=2)
    for epoch, part in batches.by_epoch():
        assert len(list(part)) == (3, 1)[epoch]
        assert chief.used == (3, 4)[epoch]


@pytest.mark.parametrize("fills", [True, False])
def test_a_worker_that_is_asked_to_leave_ends_its_round_and_its_last_push_first(fills: bool) -> None:
    chief = Chief([0, 1, 2, None], fills=fills)
    chief.local_step = 0
    got: list[Any] = []

    def train() -> None:
        for batch in Batches(samples(10), chief, batch_size=4):
            got.append(batch)
            chief.asked_to_leave = True
            chief.local_step = len(got) % 2  # A round has two steps.

    with pytest.raises(Drained) as drained:
        train()
    assert len(got) == 2
    assert (chief.left_because, drained.value.code) == ("asked to", 0)
    assert chief.settled or fills  # Where nobody waits for it, its push may still be under way.


def test_more_than_the_chief_lets_a_worker_take_is_not_read_ahead(torch: Any) -> None:
    with pytest.raises(ValueError, match=r"num_workers times prefetch_factor is 72; .*64 runs"):
        Batches(samples(10), Chief([]), batch_size=4, loader={"num_workers": 36})


def test_nothing_knows_or_adds_up_what_the_chief_hands_out() -> None:
    refusals: list[Callable[[], object]] = [
        lambda: Batches(samples(10), Chief([]), batch_size=4).sampler(0),
        lambda: Batches(samples(10), Chief([], accumulate=2), batch_size=4),
    ]
    for refused in refusals:
        with pytest.raises(ValueError, match="--budget=job"):
            refused()
