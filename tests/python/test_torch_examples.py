"""The examples, in short, and the recipes of docs/pytorch.md as they are printed: they run under psrun and learn."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from conftest import ServerProcesses
from torch_support import environment, ps_server

EXAMPLES = Path(__file__).parents[2] / "python" / "examples"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

pytestmark = pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")


def psrun(mode: str, *script: str) -> str:
    command = [sys.executable, "-m", "psgrad.run", "--workers=2", f"--mode={mode}", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not FASHION_MNIST.exists(), reason="dataset-fashion-mnist is not installed")
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_the_cnn_learns(mode: str) -> None:
    # In asp the result depends on which worker is when slower; one that learned nothing has 10 %.
    output = psrun(mode, str(EXAMPLES / "cnn.py"), "--images=12000", "--epochs=1", "--batch=32")
    found = re.search(rf"{mode}, 2 workers: test accuracy ([\d.]+) %", output)
    assert found is not None, output
    assert float(found[1]) > {"bsp": 70, "asp": 55}[mode], output


def test_the_transformer_learns() -> None:
    output = psrun("asp", str(EXAMPLES / "transformer.py"), "--steps=40")
    found = re.search(r"final loss ([\d.]+)", output)
    assert found is not None, output
    assert float(found[1]) < 3.2, output


def test_nodes_of_two_processes_learn() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = psrun("asp", *launch, str(EXAMPLES / "hybrid.py"), "--epochs=6")
    found = re.search(r"asp, 2 nodes, 4 processes: test accuracy ([\d.]+) %", output)
    assert found is not None, output
    assert float(found[1]) > 80, output


def recipes() -> dict[str, tuple[str, list[str]]]:
    """Each script of the page, by its name, and the commands that follow it."""
    page = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(# (\w+\.py)\n.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    return {name: (script, commands.splitlines()) for script, name, commands in found}


def run_recipe(name: str, folder: Path, *, eager: bool = False) -> list[str]:
    """The outputs of the page's commands."""
    script, commands = recipes()[name]
    if eager:
        script = script.replace("torch.compile(model)", 'torch.compile(model, backend="eager")')
    (folder / name).write_text(script, encoding="utf-8")
    outputs = []
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "psrun"
        started = [sys.executable, "-m", "psgrad.run", *arguments]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "env": environment()}
        done = subprocess.run(started, cwd=folder, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"final loss ([\d.]+)", done.stdout)
        assert found is not None, done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
    assert float(found[1]) < 0.7, outputs  # One that has learned nothing has 1.39.
    return outputs


@pytest.mark.parametrize("name", ["train.py", "amp.py", "closure.py", "classifier.py", "gan.py", "nodes.py"])
def test_a_recipe_runs_as_printed_and_learns(name: str, tmp_path: Path) -> None:
    if name == "classifier.py" and importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    (output,) = run_recipe(name, tmp_path, eager=True)
    assert output.count("from now on gradients are sent in step()") == {"amp.py": 2, "classifier.py": 2}.get(name, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_the_compiled_recipe_runs_as_printed(tmp_path: Path) -> None:
    run_recipe("amp.py", tmp_path)


def test_all_workers_stop_early_at_the_same_accuracy(tmp_path: Path) -> None:
    (output,) = run_recipe("early_stop.py", tmp_path)
    found = re.search(r"accuracy ([\d.]+) after epoch (\d+)", output)
    assert found is not None, output
    assert float(found[1]) >= 0.92, output
    assert int(found[2]) < 99, output


def test_a_process_looks_on_as_printed(servers: ServerProcesses, tmp_path: Path) -> None:
    """It sees the training's first weights and its last, which are the workers'."""
    script, commands = recipes()["look_on.py"]
    (tmp_path / "look_on.py").write_text(script, encoding="utf-8")
    (tmp_path / "train.py").write_text(recipes()["train.py"][0], encoding="utf-8")
    server, workers, observer = (shlex.split(command.removesuffix("&")) for command in commands)
    assert server[:2] == ["ps_server", "--listen=127.0.0.1:5000"]
    address = servers.start(2, *server[4:], mode="asp")

    def started(program: list[str]) -> subprocess.Popen[str]:
        program = [argument.replace("127.0.0.1:5000", address) for argument in program]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, *program], cwd=tmp_path, env=environment(), **options)

    assert (workers[0], observer[0]) == ("psrun", "python")
    with started(observer[1:]) as looks_on, started(["-m", "psgrad.run", *workers[1:]]) as trains:
        try:
            trained, _ = trains.communicate(timeout=200)
            seen, _ = looks_on.communicate(timeout=60)
        finally:
            looks_on.kill()
            trains.kill()
    assert trains.returncode == 0, trained
    assert looks_on.returncode == 0, seen
    found = re.search(r"final loss ([\d.]+)", seen)
    assert found is not None, seen
    assert float(found[1]) < 0.7, seen
    versions = [int(version) for version in re.findall(r"version (\d+):", seen)]
    assert versions == sorted(versions)
    assert versions[-1] == 128, seen  # 8 epochs of 8 batches of two workers.


def test_a_job_goes_on_where_it_has_ended(tmp_path: Path) -> None:
    first, second = run_recipe("resume.py", tmp_path)
    assert "after step 32" in first
    assert "continues at" not in first
    assert second.count("continues at step 32") == 2
    assert "after step 64" in second


def test_a_saved_file_has_all_that_a_job_has_learnt(tmp_path: Path) -> None:
    first, second = run_recipe("save.py", tmp_path)
    assert "after 32 updates" in first
    assert "after 64 updates" in second
    assert "is not used" not in second
    saved = torch.load(tmp_path / "saved.pt")
    assert saved["opt"]["state"].keys() == {0, 1, 2, 3}


def one_worker(address: str, rank: int, folder: Path, *script: str) -> subprocess.Popen[str]:
    """psrun of one of two machines, which are this one: with a thread each they do not wait for each other's."""
    command = [sys.executable, "-m", "psgrad.run", f"--server={address}", "--workers=1", *script]
    machine = environment() | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with open(folder / "psrun.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=machine)


def lines_until(out: IO[str] | None, found: str) -> str:
    """What was printed, up to a line with this; all, if none comes."""
    assert out is not None
    lines = ""
    for line in out:
        lines += line
        if found in line:
            break
    return lines


def test_the_transformer_trains_in_rounds_while_a_worker_is_killed_and_replaced(
    servers: ServerProcesses, tmp_path: Path
) -> None:
    address = servers.start(2, "--local_steps=10", "--on_worker_loss=continue", mode="diloco")
    script = [str(EXAMPLES / "transformer.py"), "--steps=450"]
    stays = one_worker(address, 0, tmp_path, *script)
    killed = one_worker(address, 1, tmp_path, *script)
    replacement = None
    try:
        lines_until(stays.stdout, "step 50")
        for child in Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text(encoding="utf-8").split():
            os.kill(int(child), signal.SIGKILL)
        assert killed.wait(60) == 1
        lines_until(stays.stdout, "step 100")  # Without it.
        replacement = one_worker(address, 1, tmp_path, *script)
        output, _ = stays.communicate(timeout=200)
        found = re.search(r"final loss ([\d.]+)", output)
        log = (tmp_path / "psrun.log").read_text(encoding="utf-8")
        assert found is not None, output + log
        assert float(found[1]) < 2.9, output + log
        assert replacement.wait(60) == 0, log
        assert servers.wait() == [0]
    finally:
        for process in (stays, killed, replacement):
            if process is not None and process.poll() is None:
                process.kill()
            if process is not None and process.stdout is not None:
                process.stdout.close()
