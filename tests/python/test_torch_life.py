"""How a worker ends, and what its model can be used for meanwhile and afterwards."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_support import Jobs, environment, largest_difference, loss_of, mlp, ps_server, psgrad, weights_of

pytest_plugins = ["torch_fixtures"]

SGD = torch.optim.SGD


def test_uneven_numbers_of_batches(jobs: Jobs) -> None:
    """A rank that is done counts as empty; all end with the same weights."""
    job = jobs(2)
    batches = {0: 3, 1: 7}

    def work() -> Any:
        model = mlp()
        with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            for step in range(batches[optimizer.rank]):
                optimizer.zero_grad()
                loss_of(model, step, optimizer.rank).backward()
                optimizer.step()
        return weights_of(model)

    expected = mlp()
    reference = SGD(expected.parameters(), lr=0.1)
    for step in range(7):
        reference.zero_grad()
        ranks = [rank for rank, count in batches.items() if step < count]
        (sum(loss_of(expected, step, rank) for rank in ranks) / len(ranks)).backward()
        reference.step()
    for weights in job.run(work):
        assert largest_difference(weights, weights_of(expected)) < 1e-6


def test_finish_is_the_end(jobs: Jobs) -> None:
    model = mlp()
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.finish()
    optimizer.finish()
    loss_of(model, 1, 0).backward()  # The model is the user's again.
    with pytest.raises(RuntimeError, match="has left the job"):
        optimizer.step()
    SGD(model.parameters(), lr=0.1).step()


def test_a_backward_without_step_does_not_count(fakes: Jobs) -> None:
    model = mlp()
    before = weights_of(model)
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, 0, 0).backward()
    optimizer.finish()
    assert largest_difference(weights_of(model), before) == 0


def test_an_exception_leaves_with_its_reason(jobs: Jobs) -> None:
    """The other rank is told at once, and not at a timeout."""
    job = jobs(2)
    seen: list[str] = []

    def work() -> None:
        model = mlp()
        try:
            with job.wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
                for step in range(3):
                    optimizer.zero_grad()
                    if optimizer.rank == 1 and step == 1:
                        raise KeyError("no such file")
                    loss_of(model, step, optimizer.rank).backward()
                    optimizer.step()
        except KeyError:
            seen.append("KeyError")
        except psgrad.JobFailed as error:
            seen.append(str(error))

    job.run(work)
    failure = next(text for text in seen if text != "KeyError")
    assert "KeyError: 'no such file'" in failure


SCRIPT = """
import sys
import fake_client, torch_support, torch, psgrad
server = fake_client.FakeServer()
psgrad.Client = fake_client.FakeClient
model = torch_support.mlp()
opt = psgrad.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, server=server.address)
torch_support.loss_of(model, 0, 0).backward()
opt.step()
import atexit
real = server
def leave(self, reason=""):
    print("left:", reason or "in order", sorted(server.done), flush=True)
    self.closed = True
fake_client.FakeClient.leave = leave
"""


def script(text: str, *, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + text],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_the_interpreters_exit_finishes() -> None:
    assert "left: in order [0]" in script("")


def test_an_exception_that_nobody_caught_leaves_with_its_reason() -> None:
    output = script("raise ValueError('the data\\nare gone')", status=1)
    assert "left: ValueError: the data []" in output
    assert "Traceback" in output


def test_a_ctrl_c_leaves_with_its_reason() -> None:
    assert "left: KeyboardInterrupt []" in script("raise KeyboardInterrupt", status=-2)


def test_a_child_process_does_not_train_and_does_not_leave() -> None:
    output = script(
        """
import os
child = os.fork()
if child == 0:
    for call in (lambda: torch_support.loss_of(model, 1, 0).backward(), opt.step):
        try:
            call()
        except RuntimeError as error:
            print(type(error).__name__, error, flush=True)
    with torch.no_grad():
        model(torch.ones(1, 6))
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
torch_support.loss_of(model, 1, 0).backward()
opt.step()
print("the parent is at version", opt.version)
"""
    )
    assert output.count("this process was forked from the worker's") == 2
    assert "the parent is at version 2" in output
    assert output.count("left:") == 1


TRAINS_TO_STEP_5 = """
import os, sys, torch, torch_support, psgrad.torch
model = torch_support.mlp()
opt = psgrad.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(int(sys.argv[2])):
    if opt.rank == 1 and step == 5:
        exec(sys.argv[1])
    opt.zero_grad()
    torch_support.loss_of(model, step, opt.rank).backward()
    opt.step()
"""


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("raise SystemExit('no data')", 1, "SystemExit: no data"),
        ("raise ValueError('no data')", 1, "ValueError: no data"),
    ],
)
def test_a_status_that_is_not_0_is_a_failure_that_stops_the_others(
    tmp_path: Path, ending: str, status: int, reason: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINS_TO_STEP_5)
    done = psrun("--workers=2", "--mode=bsp", str(path), ending, "1000000000")
    assert done.returncode == status, done.stderr
    assert f"worker 1 ended with status {status}" in done.stderr.splitlines()[-1], done.stderr
    assert reason in done.stderr


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(0)"])
def test_status_0_is_an_end_in_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINS_TO_STEP_5 + "\nprint('version', opt.version)\n")
    done = psrun("--workers=2", "--mode=bsp", str(path), ending, "8")
    assert done.returncode == 0, done.stderr
    assert "[worker 0] version 8\n" in done.stdout  # Or 1, where the ranks are dealt otherwise.


@pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")
def test_a_worker_that_main_has_dropped_finishes_at_the_interpreters_exit(tmp_path: Path) -> None:
    """And nothing of it is left then, of which nanobind would tell."""
    path = tmp_path / "train.py"
    lines = TRAINS_TO_STEP_5.strip().splitlines()
    path.write_text(
        "\n".join([lines[0], "def main():", *(f"    {line}" for line in lines[1:]), "main()", "print('end')"])
    )
    done = psrun("--workers=2", "--mode=bsp", str(path), "pass", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] end\n") == 2
    assert "nanobind" not in done.stderr
    assert "the job is finished" in done.stderr


def psrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "psgrad.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)


class Squares(torch.utils.data.Dataset[Any]):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return torch.full((6,), float(index)), self.model(torch.full((6,), float(index)))


def test_forked_loaders_may_use_the_model(jobs: Jobs) -> None:
    model = mlp()
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.01), model)
    loader = torch.utils.data.DataLoader(Squares(model), 4, num_workers=2, multiprocessing_context="fork")
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y + 1).backward()
        optimizer.step()
    assert optimizer.version == 2
    optimizer.finish()


def test_deepcopy_and_torch_save_after_step(jobs: Jobs) -> None:
    model = mlp()
    model.register_parameter("large", torch.nn.Parameter(torch.zeros(100_000)))
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    copied = copy.deepcopy(model)
    assert largest_difference(weights_of(copied), weights_of(model)) == 0
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()
    loss_of(copied, 0, 0).backward()  # It has no hooks.
    file = io.BytesIO()
    torch.save(model[0].state_dict(), file)
    assert file.tell() < 10_000  # Not the memory of all tensors.
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    assert largest_difference(weights_of(loaded), weights_of(model)) == 0
    before = weights_of(copied)
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    optimizer.step()
    assert largest_difference(weights_of(copied), before) == 0
    optimizer.finish()


def test_an_exponential_average_after_step(jobs: Jobs) -> None:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)

    def train(model: torch.nn.Module, optimizer: Any) -> torch.nn.Module:
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
            averaged.update_parameters(model)
        return averaged

    expected, model = mlp(), mlp()
    plain = train(expected, SGD(expected.parameters(), lr=0.1))
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    ours = train(model, optimizer)
    optimizer.finish()
    assert largest_difference(weights_of(ours), weights_of(plain)) < 1e-6


class Prepared(torch.optim.Optimizer):
    """An optimizer as Accelerate prepares it: another one around it, whose state it has read back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_the_loop_of_a_trainer_that_knows_of_one_process_alone(jobs: Jobs) -> None:
    """As docs/pytorch.md has it: it clips after backward(), accumulates, schedules, and says nothing of any of it."""
    job = jobs(2)

    def work() -> Any:
        model = mlp()
        wrapped = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = job.wrap(wrapped, model, overlap="none", accumulate=2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
        prepared = Prepared(optimizer)
        for step in range(4):
            for half in range(2 if step < 3 else 1):  # An epoch's end leaves one.
                (loss_of(model, 2 * step + half, optimizer.rank) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            scheduler.step()
            model.zero_grad()
        optimizer.finish()
        return optimizer.version, weights_of(model)

    (version, one), (_, other) = job.run(work)
    assert version == 4
    assert largest_difference(one, other) == 0
    assert largest_difference(one, weights_of(mlp())) > 0


def test_a_session_joins_twice(jobs: Jobs) -> None:
    model = mlp()
    for _ in range(2):
        with jobs().wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
            loss_of(model, 0, 0).backward()
            optimizer.step()
            assert optimizer.version == 1


def test_idle_and_properties(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with caplog.at_level("INFO"), jobs().wrap(SGD(model.parameters(), lr=0.1), model) as optimizer:
        assert (optimizer.rank, optimizer.num_workers, optimizer.mode, optimizer.lead) == (0, 1, "bsp", True)
        with optimizer.idle("evaluating"):
            assert getattr(optimizer.client, "busy_with", ["evaluating"]) == ["evaluating"]  # A fake has it.
        assert getattr(optimizer.client, "busy_with", ["evaluating", ""]) == ["evaluating", ""]
    assert "rank 0: evaluating" in caplog.text


def test_metrics(jobs: Jobs, tmp_path: Path) -> None:
    model = mlp()
    path = tmp_path / "worker{rank}.jsonl"
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model, metrics_file=path, samples=4)
    other = mlp()
    job = jobs()
    with pytest.raises(RuntimeError, match="belongs to a running process"):
        job.wrap(SGD(other.parameters(), lr=0.1), other, metrics_file=path)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step, 0)
        loss.backward()
        optimizer.record(loss=loss.item())
        optimizer.step()
    optimizer.finish()
    lines = [json.loads(line) for line in (tmp_path / "worker0.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "step", "step", "step", "end"]
    assert lines[0]["flags"]["optimizer"] == "momentum"
    assert lines[0]["mode"] == "bsp"
    for number, line in enumerate(lines[1:4]):
        assert (line["step"], line["version"], line["samples"], line["rank"]) == (number, number + 1, 4, 0)
        assert line["loss"] > 0
        for key in ("forward_s", "backward_s", "push_s", "wait_s", "pull_s"):
            assert line[key] >= 0
    assert lines[4]["steps"] == 3
    assert lines[4]["samples"] == 12
    assert lines[4]["samples_per_s"] > 0


def test_psgrad_torch_is_not_imported_by_psgrad() -> None:
    code = "import sys, psgrad; assert 'torch' not in sys.modules"
    if not hasattr(psgrad, "_core"):
        pytest.skip("psgrad._core has not been built")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=60)


def test_weights_that_are_written_to_between_steps_are_named_and_can_be_brought_back(jobs: Jobs) -> None:
    """A checkpoint that is loaded too late would be lost; an average for an evaluation is put back."""
    model = mlp()
    optimizer = jobs().wrap(SGD(model.parameters(), lr=0.1), model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    before = weights_of(model)
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)
    optimizer.zero_grad()
    loss_of(model, 1, 0).backward()
    with pytest.raises(RuntimeError, match=r"2\.weight was written to since the last step\(\).*opt\.pull\(\)"):
        optimizer.step()
    optimizer.empty_step()
    assert largest_difference(weights_of(model), before) == 0
    model.load_state_dict(mlp(seed=3).state_dict())
    optimizer.pull()
    assert largest_difference(weights_of(model), before) == 0
    optimizer.zero_grad()
    loss_of(model, 2, 0).backward()
    optimizer.step()
    assert optimizer.version == 3
    optimizer.finish()


def test_a_parameter_that_is_unfrozen_later_is_named(jobs: Jobs) -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = jobs().wrap(SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model)
    model[0].bias.requires_grad_(True)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"0\.bias was frozen when this worker joined"):
        optimizer.step()
    model[0].bias.requires_grad_(False)
    optimizer.empty_step()
    optimizer.finish()


def test_the_environment_names_a_metrics_file(fakes: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As deploy/compare.sh does; what the script says counts more."""
    monkeypatch.setenv("PS_METRICS_FILE", str(tmp_path / "worker{rank}.jsonl"))
    model = torch.nn.Linear(2, 1)
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model)
    optimizer.finish()
    assert (tmp_path / "worker0.jsonl").exists()


def test_a_metrics_file_that_is_full_does_not_end_the_training(fakes: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, metrics_file="/dev/full")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    optimizer.finish()
    assert caplog.text.count("metrics_file: /dev/full: No space left on device; nothing is written") == 1
    other = mlp()
    with pytest.raises(FileNotFoundError, match=r"metrics_file: No such file.*/no/such"):
        fakes().wrap(SGD(other.parameters(), lr=0.1), other, metrics_file="/no/such/file")


def test_records_stay_json_whatever_is_recorded(fakes: Jobs, tmp_path: Path) -> None:
    model = mlp()
    path = tmp_path / "worker.jsonl"
    optimizer = fakes().wrap(SGD(model.parameters(), lr=0.1), model, metrics_file=path)
    loss_of(model, 0, 0).backward()
    optimizer.record(loss=float("nan"), step=77)
    with pytest.raises(TypeError, match=r"loss=tensor.*a number is expected"):
        optimizer.record(loss=torch.ones(3))
    optimizer.step()
    optimizer.finish()
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["event"], line["step"], line["loss"]) == ("step", 0, None)
