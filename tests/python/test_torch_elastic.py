"""Workers that come and go under psrun: real processes and servers, whose record says what became of each sample."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from psgrad._supervisor import find_program
from test_run import Script, needs_programs, psrun

torch = pytest.importorskip("torch")

pytestmark = needs_programs

SAMPLES, BATCH, EPOCHS = 640, 8, 50
SCRIPT = f"""
    import torch
    import psgrad.torch
    from psgrad.data import Batches

    torch.manual_seed(1)
    x = torch.randn({SAMPLES}, 10)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    opt = psgrad.torch.DistributedOptimizer(optimizer, model)
    print("rank", opt.rank, "process", os.getpid())
    loader = {{"num_workers": 1, "prefetch_factor": 3}} if sys.argv[2] == "ahead" else None
    for x, y in Batches(data, opt, batch_size={BATCH}, epochs={EPOCHS}, loader=loader):
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if not os.path.exists(sys.argv[1]):  # Something is still to happen.
            time.sleep(0.05)
        opt.step()
        if opt.param_groups[0]["lr"] != 1e-4:
            raise AssertionError("a newcomer has another rate")
        if rank == 1 and len(sys.argv) == 4 and not os.path.exists(sys.argv[3]):
            open(sys.argv[3], "w").close()
            sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "train.py")


@pytest.mark.parametrize(("mode", "read"), [("bsp", "as_asked"), ("bsp", "ahead"), ("asp", "ahead")])
def test_workers_are_killed_and_join_and_each_sample_counts_once(
    script: Script, tmp_path: Path, mode: str, read: str
) -> None:
    path, metrics, all_happened = script(SCRIPT), tmp_path / "metrics.jsonl", tmp_path / "all_happened"
    flags = ["--workers=2", "--min_workers=1", "--max_workers=3", f"--mode={mode}", f"--metrics_file={metrics}"]
    with psrun(*flags, "--reconnect_grace=100ms", path, all_happened, read) as job:
        (address,) = job.await_output(r"listening on (\S+)")
        first = [int(pid) for pid in job.await_output(r"rank \d process (\d+)", times=2)]
        with psrun(f"--server={address.decode()}", "--max_restarts=1", path, all_happened, read) as more:
            (newcomer,) = more.await_output(r"rank (\d) process")
            assert newcomer == b"2"  # RANK is 0, which is another one's.
            os.kill(first[1], signal.SIGKILL)
            job.await_output("it is started again in 1 s")
            job.await_output(r"rank \d process (\d+)", times=3)
            subprocess.run([find_program("ps_ctl"), f"--server={address.decode()}", "drain", "2"], check=True)
            assert more.await_end() == 0, more.text
            assert "started again" not in more.text
            all_happened.touch()
        assert job.await_end() == 0, job.text
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    counts: collections.Counter[int] = collections.Counter()
    for event in events:
        if event["event"] == "run":
            counts[event["run"]] += -1 if event["returned"] else 1
    assert counts == dict.fromkeys(range(SAMPLES // BATCH * EPOCHS), 1)
    applied = [event for event in events if event["event"] == "apply"]
    assert sum(sum(event["samples"]) for event in applied) == SAMPLES * EPOCHS


def test_a_script_that_ends_with_a_status_is_started_again_while_the_others_train(
    script: Script, tmp_path: Path
) -> None:
    """It leaves at once, though nothing but the interpreter's exit would end it."""
    path, left, all_happened = script(SCRIPT), tmp_path / "left", tmp_path / "all_happened"
    with psrun("--workers=2", "--min_workers=1", "--mode=bsp", path, all_happened, "as_asked", left) as job:
        job.await_output(r"rank \d process", times=2)
        job.await_output("worker 1 ended with status 3; it is started again in 1 s")
        job.await_output(r"rank \d process", times=3)
        all_happened.touch()
        assert job.await_end() == 0, job.text
    assert "left: SystemExit: 3" in job.text


@pytest.mark.parametrize("overlap", ["auto", "none"])
def test_a_batch_that_has_no_step_of_its_own_is_refused_where_it_would_count_as_used(
    script: Script, tmp_path: Path, overlap: str
) -> None:
    adds_up = SCRIPT.replace("optimizer, model)", f'optimizer, model, overlap="{overlap}")').replace(
        "opt.step()", "opt.step() if opt.step_number == 0 else None"
    )
    with psrun("--workers=1", "--max_workers=2", "--max_restarts=0", script(adds_up), tmp_path, "as_asked") as job:
        job.await_output("the last batch has been through backward\\(\\), and had no step\\(\\)")
        assert job.await_end() == 1, job.text


EPOCH_ENDS = """
    import torch
    import psgrad.torch
    from psgrad.data import Batches

    torch.manual_seed(1)
    x = torch.randn(56, 10)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(10, 1)
    with psgrad.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model) as opt:
        for epoch, batches in Batches(data, opt, batch_size=8, epochs=3).by_epoch():
            for x, y in batches:
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
            print("epoch", epoch, "of", opt.all_sum(1, name=f"epoch {epoch}"))
"""


def test_each_epochs_end_is_reduced_where_it_comes_at_another_step_for_each_worker(script: Script) -> None:
    """Seven runs an epoch: one of two workers trains the last, for which it needs the other's contribution."""
    flags = ["--workers=2", "--min_workers=1", "--max_workers=2", "--mode=bsp", "--progress_timeout=30s"]
    with psrun(*flags, script(EPOCH_ENDS)) as job:
        job.await_output("the job is running")
        assert job.await_end() == 0, job.text
        output = job.text
    ends = collections.Counter(line[line.index("epoch") :] for line in output.splitlines() if "epoch" in line)
    assert ends["epoch 0 of 2.0"] == 2, output
    assert sum(ends.values()) >= 5, output  # A worker may get none of the last epoch's.
