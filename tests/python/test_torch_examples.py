"""The examples, in short: they run under psrun and learn something. docs/pytorch.md names them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

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


def one_worker(address: str, rank: int, folder: Path, *script: str) -> subprocess.Popen[str]:
    """psrun of one of two machines."""
    command = [sys.executable, "-m", "psgrad.run", f"--server={address}", "--workers=1", *script]
    machine = environment() | {"RANK": str(rank), "WORLD_SIZE": "2"}
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
    script = [str(EXAMPLES / "transformer.py"), "--steps=150"]
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
