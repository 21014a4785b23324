"""The examples, in short: they run under psrun and learn something. docs/pytorch.md names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
