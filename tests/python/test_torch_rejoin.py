"""DistributedOptimizer goes on with a job whose servers were killed and came back with a checkpoint."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.data import Batches
from server_processes import Restartable
from torch_support import REAL_CLIENT, Job, largest_difference, loss_of, mlp, ps_server, psgrad, weights_of

pytestmark = pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")

WORKERS = 2
SAMPLES = 150  # The last batch of an epoch leaves rank 1 none of them.
EPOCHS = 4


class Data(torch.utils.data.Dataset[Any]):
    """Noise that depends on the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


class At:
    """Runs actions when a worker's loop is at certain numbers of batches, each once. The first worker to come does."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self._actions = dict(actions)
        self._lock = threading.Lock()

    def __call__(self, number: int) -> None:
        with self._lock:
            action = self._actions.pop(number, None)
        if action is not None:
            action()


def kill_and_start(servers: Restartable, *shards: int) -> Callable[[], None]:
    def act() -> None:
        for shard in shards:
            servers.kill(shard)
        for shard in sorted(shards):
            servers.start_again(shard)

    return act


def run(
    address: str,
    at: At,
    *,
    loader: Any = None,
    optimizer: Any = torch.optim.Adam,
    groups: Callable[[torch.nn.Module], Any] = torch.nn.Module.parameters,
    schedule: Callable[[Any], None] = lambda opt: None,
    **options: Any,
) -> list[tuple[str, dict[str, torch.Tensor], int]]:
    """Each worker's (hash if it is the lead, weights, rollbacks), with batches of Batches."""

    def work() -> Any:
        model = mlp()
        opt = Job(address, WORKERS).wrap(optimizer(groups(model), lr=0.01), model, **options)
        batches = Batches(Data(), opt, batch_size=8, epochs=EPOCHS, loader=loader)
        weights_hash = ""
        for number, (x, y) in enumerate(batches):
            at(number)
            schedule(opt)
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            before = opt.rollbacks
            opt.step()
            assert (opt.rolled_back_to is not None) == (opt.rollbacks > before)
            assert opt.rolled_back_to is None or opt.rolled_back_to == opt.step_number
        if opt.lead:
            weights_hash = opt.client.weights_hash()
        opt.finish()
        return weights_hash, weights_of(model), opt.rollbacks

    return Job(address, WORKERS).run(work)


@pytest.fixture(autouse=True)
def real_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment names no job, and workers that a failed test leaves behind end with it."""
    for name in ("RANK", "PS_RANK", "PS_SERVER", "PS_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(psgrad, "Client", REAL_CLIENT)
    yield
    for worker in psgrad.torch.optimizer.life.live():
        worker.leave("the test has ended")


def undisturbed(folder: Path, shards: int = 1, **options: Any) -> list[tuple[str, dict[str, torch.Tensor], int]]:
    servers = Restartable(folder)
    try:
        return run(servers.start(WORKERS, shards=shards, keeps=False), At({}), **options)
    finally:
        servers.end()


def the_hash(results: list[tuple[str, dict[str, torch.Tensor], int]]) -> str:
    (found,) = (weights_hash for weights_hash, _, _ in results if weights_hash)
    return found


@pytest.mark.parametrize(("shards", "killed"), [(1, [0]), (2, [0]), (2, [1])])
def test_batches_rewind_and_the_hash_is_the_undisturbed_one(
    restartable: Restartable, tmp_path: Path, shards: int, killed: list[int]
) -> None:
    """Also over the end of an epoch, and where rank 1 has empty steps."""
    address = restartable.start(WORKERS, shards=shards, every="7")
    act = kill_and_start(restartable, *killed)
    disturbed = run(address, At({11: act, 24: act}))
    assert [rollbacks for _, _, rollbacks in disturbed] == [2, 2]
    assert restartable.wait() == [0] * shards
    assert the_hash(disturbed) == the_hash(undisturbed(tmp_path))
    assert largest_difference(disturbed[0][1], disturbed[1][1]) == 0


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": [each for each in model.parameters() if each.dim() == ways]} for ways in (1, 2)]


def cycle(opt: Any) -> None:
    """Moves each group by itself, as the step says."""
    first, second = opt.param_groups
    step = opt.step_number
    first["betas"] = (0.95 - 0.1 * (step // 3 % 4), 0.999)
    second["lr"] = 0.01 / (1 + step % 5)
    second["weight_decay"] = 0.01 if step > 20 else 0.0


@pytest.mark.parametrize("shards", [1, 2])
def test_groups_that_move_by_themselves_are_told_again(restartable: Restartable, tmp_path: Path, shards: int) -> None:
    moves: dict[str, Any] = {"groups": two_groups, "schedule": cycle}
    address = restartable.start(WORKERS, shards=shards, every="7")
    act = kill_and_start(restartable, *range(shards))
    disturbed = run(address, At({11: act, 24: act}), **moves)
    assert [rollbacks for _, _, rollbacks in disturbed] == [2, 2]
    assert the_hash(disturbed) == the_hash(undisturbed(tmp_path, **moves))


def test_batches_that_a_loader_loads_ahead_rewind(restartable: Restartable, tmp_path: Path) -> None:
    address = restartable.start(WORKERS, every="7")
    disturbed = run(address, At({24: kill_and_start(restartable, 0)}), loader={})
    assert the_hash(disturbed) == the_hash(undisturbed(tmp_path))


def test_a_job_without_a_checkpoint_but_the_first_begins_anew(restartable: Restartable, tmp_path: Path) -> None:
    address = restartable.start(WORKERS, every="1000000")
    disturbed = run(address, At({11: kill_and_start(restartable, 0)}))
    assert the_hash(disturbed) == the_hash(undisturbed(tmp_path))


def test_batches_by_epoch_come_again_from_the_epoch_that_the_job_is_back_in(restartable: Restartable) -> None:
    address = restartable.start(1, every="1000000")
    model = mlp()
    opt = Job(address, 1).wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    at = At({30: kill_and_start(restartable, 0)})
    seen: list[tuple[int, int]] = []
    number = 0
    for epoch, part in Batches(Data(), opt, batch_size=8, epochs=2).by_epoch():
        batches = 0
        for x, y in part:
            at(number)
            number += 1
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            batches += 1
        seen.append((epoch, batches))
    opt.finish()
    assert seen == [(0, 19), (1, 12), (0, 19), (1, 19)]


@pytest.mark.parametrize(
    ("mode", "flags", "shards"),
    [
        ("asp", [], 2),
        ("ssp", ["--staleness=2"], 1),
        ("backup", ["--backup_workers=1"], 2),
        ("local_sgd", ["--local_steps=4"], 2),
        ("local_sgd", ["--local_steps=4", "--local_sync=gradients", "--average_every=16"], 1),
        ("diloco", ["--local_steps=4", "--optimizer=local"], 2),
        ("diloco", ["--local_steps=4", "--outer_sync=async"], 1),
        ("easgd", ["--local_steps=4"], 2),
    ],
)
def test_other_modes_go_on(restartable: Restartable, mode: str, flags: list[str], shards: int) -> None:
    address = restartable.start(WORKERS, *flags, shards=shards, mode=mode, every="7")
    optimizer = torch.optim.SGD
    results = run(address, At({30: kill_and_start(restartable, shards - 1)}), optimizer=optimizer)
    assert [rollbacks for _, _, rollbacks in results] == [1, 1]
    assert all(torch.isfinite(value).all() for _, weights, _ in results for value in weights.values())
    assert restartable.wait() == [0] * shards


@pytest.mark.parametrize(
    ("mode", "flags", "shards"), [("bsp", [], 1), ("asp", [], 2), ("local_sgd", ["--local_steps=4"], 1)]
)
def test_samples_that_are_handed_out_are_handed_out_again(
    restartable: Restartable, tmp_path: Path, mode: str, flags: list[str], shards: int
) -> None:
    """With --budget=job the chief knows which ones the checkpoint has; no sample is lost."""
    address = restartable.start(WORKERS, "--budget=job", *flags, shards=shards, mode=mode, every="7")
    kill = kill_and_start(restartable, 0)
    results = run(address, At({9: kill, 20: kill}), optimizer=torch.optim.SGD)
    assert [rollbacks for _, _, rollbacks in results] == [2, 2]
    assert restartable.wait() == [0] * shards
    (newest,) = [
        manifest
        for path in (restartable.folder / "checkpoints").glob("checkpoint-*/manifest.json")
        if (manifest := json.loads(path.read_text(encoding="utf-8")))["finished"]
    ]
    runs = -(-SAMPLES // 8) * EPOCHS
    assert (newest["state"]["runs"]["next"], newest["state"]["runs"]["returned"]) == (runs, [])


def test_batches_go_back_over_rounds_that_ended_early(restartable: Restartable, tmp_path: Path) -> None:
    """The weights are those of a run without the rollback: SGD without momentum has no state that would be lost."""

    def train(servers: Restartable, at: At) -> tuple[str, int]:
        address = servers.start(1, "--local_steps=20", "--optimizer=local", mode="diloco", every="4")
        model = mlp()
        opt = Job(address, 1).wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
        taken = again = 0
        for x, y in Batches(Data(), opt, batch_size=8, epochs=EPOCHS):
            at(taken)
            taken += 1
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            if opt.local_step == 3:
                opt.sync_now()
            if opt.rolled_back_to is not None:
                again = taken - 3 * opt.rolled_back_to
        weights_hash: str = opt.client.weights_hash()
        opt.finish()
        assert servers.wait() == [0]
        return weights_hash, taken - again

    (tmp_path / "alone").mkdir()
    alone = Restartable(tmp_path / "alone")
    try:
        expected, batches = train(alone, At({}))
        assert batches == -(-SAMPLES // 8) * EPOCHS
    finally:
        alone.end()
    assert train(restartable, At({40: kill_and_start(restartable, 0)})) == (expected, batches)


def test_a_plain_loop_goes_on_and_is_told_once_that_it_is_not_exact(
    restartable: Restartable, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "psgrad")
    address = restartable.start(1, every="10")
    model = mlp()
    metrics = tmp_path / "metrics.jsonl"
    opt = Job(address, 1).wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, metrics_file=metrics)
    at = At({14: kill_and_start(restartable, 0), 29: kill_and_start(restartable, 0)})
    back: list[int] = []
    for number in range(40):
        at(number)
        opt.zero_grad()
        loss_of(model, number, 0).backward()
        opt.step()
        if opt.rolled_back_to is not None:
            back.append(opt.rolled_back_to)
    assert len(back) == opt.rollbacks == 2
    assert opt.step_number < 40
    opt.finish()
    assert caplog.text.count("not exactly that of a run without the rollback") == 1
    assert caplog.text.count("goes on with the loop's next batch") == 2
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "rollback"] == back


def test_a_loop_of_ones_own_can_go_back_itself(restartable: Restartable, tmp_path: Path) -> None:
    """By rolled_back_to."""

    def train(address: str, at: At) -> str:
        model = mlp()
        opt = Job(address, 1).wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
        while opt.step_number < 40:
            at(opt.step_number)
            opt.zero_grad()
            loss_of(model, opt.step_number, 0).backward()
            opt.step()
        weights_hash: str = opt.client.weights_hash()
        opt.finish()
        return weights_hash

    disturbed = train(restartable.start(1, every="10"), At({25: kill_and_start(restartable, 0)}))
    plain = Restartable(tmp_path)
    try:
        assert disturbed == train(plain.start(1, keeps=False), At({}))
    finally:
        plain.end()


def test_a_push_that_is_given_up_when_the_server_has_died(restartable: Restartable) -> None:
    """The step that takes changed gradients goes back, too."""
    address = restartable.start(1, every="1")
    model, expected = mlp(), mlp()
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    steps = 8
    for step in range(steps):
        reference.zero_grad()
        loss_of(expected, step, 0).backward()
        if step >= 5:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        reference.step()
    at = At({5: kill_and_start(restartable, 0)})
    with Job(address, 1).wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model) as opt:
        while opt.step_number < steps:
            step = opt.step_number
            opt.zero_grad()
            loss_of(model, step, 0).backward()
            if step >= 5:
                at(step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
        assert opt.rollbacks == 1
    assert largest_difference(weights_of(model), weights_of(expected)) < 1e-6


@pytest.mark.parametrize("every", ["1000000", "7"])
def test_a_worker_that_was_finishing_makes_the_steps_again(restartable: Restartable, every: str) -> None:
    """finish() says so, and Batches goes on."""
    address = restartable.start(1, every=every)
    model = mlp()
    opt = Job(address, 1).wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    batches = Batches(Data(), opt, batch_size=16, epochs=2)
    told: list[str] = []
    made = 0
    kill: list[Callable[[], None]] = [kill_and_start(restartable, 0)]
    while True:
        for x, y in batches:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            made += 1
            time.sleep(0.02)  # For checkpoints to be written in.
        if kill:
            kill.pop()()
        try:
            opt.finish()
            break
        except psgrad.RolledBack as error:
            told.append(str(error))
    assert len(told) == 1
    back = re.search(r"rolled back to step (\d+), and this worker was finishing at step 20", told[0])
    assert back is not None
    assert made == 40 - int(back[1])
    assert restartable.wait() == [0]


def test_a_server_that_does_not_come_back_is_named(restartable: Restartable) -> None:
    address = restartable.start(1, "--server_timeout=2s")
    model = mlp()
    opt = Job(address, 1).wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loss_of(model, 0, 0).backward()
    opt.step()
    restartable.kill()
    opt.zero_grad()
    loss_of(model, 1, 0).backward()
    with pytest.raises(psgrad.Unavailable, match="server_timeout"):
        opt.step()
    opt.leave("the test has ended")
