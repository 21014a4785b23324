"""PyTorch's reference curve: what a seed decides, computed a second time, and the same curve as the programs'."""

# ruff: noqa: PT027 (these tests need no pytest)

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import tempfile
import unittest
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.compare import commands
from experiments.compare.plan import Rates, make_plan
from experiments.compare.settings import parse
from experiments.shared.data import IdxError, mnist_files, mt19937_64, permutation, read_idx
from experiments.shared.machine import why_no_reports
from support import REPOSITORY, compare

BIN = Path(os.environ.get("PS_BIN") or os.environ.get("PSGRAD_BIN") or REPOSITORY / "build/bin")
PYTHON = os.environ.get("PS_TORCH_PYTHON") or sys.executable


class DrawsTest(unittest.TestCase):
    def test_generator_is_the_standards(self) -> None:
        # [rand.predef] of the C++ standard: the 10000th number of a generator with the default seed.
        assert next(islice(mt19937_64(5489), 9999, None)) == 9981545732273789042

    def test_order_is_that_of_the_workers(self) -> None:
        path = REPOSITORY / "python/psgrad/sampling.py"
        spec = importlib.util.spec_from_file_location("psgrad_sampling", path)
        assert spec is not None and spec.loader is not None
        data = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(data)
        for samples, seed, epoch in ((1, 1, 0), (2, 1, 0), (1000, 7, 3), (2053, 2**63, 11)):
            assert permutation(samples, seed, epoch) == list(data.permutation(samples, seed, epoch))


def write_idx(path: Path, shape: list[int], data: bytes) -> None:
    head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    path.write_bytes(head + data)


def write_dataset(folder: Path, train: int, test: int) -> None:
    """Images of 4 x 4 pixels, in which the bright row tells the class."""
    noise = random.Random(1)
    for split, count in (("train", train), ("t10k", test)):
        labels = [noise.randrange(4) for _ in range(count)]
        pixels = bytes(noise.randrange(256 if row == label else 128) for label in labels
                       for row in range(4) for _ in range(4))  # fmt: skip
        write_idx(folder / f"{split}-images-idx3-ubyte", [count, 4, 4], pixels)
        write_idx(folder / f"{split}-labels-idx1-ubyte", [count], bytes(labels))


class IdxFilesTest(unittest.TestCase):
    def test_found_and_read(self) -> None:
        with tempfile.TemporaryDirectory(prefix="compare-test-") as name:
            folder = Path(name)
            with self.assertRaisesRegex(IdxError, "mnist is in none of"):
                mnist_files("mnist", name)
            write_dataset(folder, 6, 2)
            images, labels = mnist_files("mnist", name)["train"]
            assert read_idx(images)[0] == [6, 4, 4]
            assert max(read_idx(labels)[1]) < 4
            write_idx(labels, [7], bytes(6))
            with self.assertRaisesRegex(IdxError, "holds 6 elements"):
                read_idx(labels)


class PlanTest(unittest.TestCase):
    def test_it_has_the_rates_and_batches_of_the_wide_reference(self) -> None:
        settings = parse(["--workers=3", "--batch_size=10", "--learning_rate=0.3", "--seeds=1", "--python=py"])
        runs = {run.id: run for run in make_plan(settings, Rates(settings), 0.008, pytorch=True)}
        run = runs["reference_PyTorch-s1"]
        assert (run.batch_size, run.rate) == (30, runs["reference_NxB-s1"].rate)
        command = commands.pytorch_command(run, settings, Path("/o"))
        assert command[0] == "py"
        assert {"--folder=/o", "--batch_size=30", "--learning_rate=0.3", "--seed=1"} <= set(command)

    def test_why_it_is_left_out(self) -> None:
        assert "--dataset=csv:x.csv" in commands.why_no_pytorch(parse(["--dataset=csv:x.csv"]))
        assert "--python=/no/python: No such file" in commands.why_no_pytorch(parse(["--python=/no/python"]))


WHY_NOT = commands.why_no_pytorch(parse([f"--python={PYTHON}"]))


@unittest.skipIf(why_no_reports(), why_no_reports())
@unittest.skipIf(WHY_NOT, f"no PyTorch: {WHY_NOT}; $PS_TORCH_PYTHON names a Python that has it")
@unittest.skipUnless((BIN / "ps_worker").exists() and (BIN / "ps_server").exists(), f"no programs in {BIN}")
class SameCurveTest(unittest.TestCase):
    def test_pytorch_one_worker_and_bsp_agree(self) -> None:
        with tempfile.TemporaryDirectory(prefix="compare-test-") as name:
            folder, output = Path(name), Path(name) / "output"
            write_dataset(folder, 1024, 256)  # 32 batches of 32 an epoch: bsp's epochs end with whole versions.
            status, _, err = compare(
                "--modes=bsp", "--workers=2", "--conditions=even", "--seeds=1", "--staleness=", "--epochs=2",
                "--batch_size=16", "--step_time=5ms", "--dataset=mnist", f"--data_dir={name}", "--model=mlp:16,12,10",
                "--activation=tanh", f"--python={PYTHON}", f"--bin={BIN}", f"--output={output}",
            )  # fmt: skip
            assert status == 0, err
            curves = {
                run: self.losses(output, run) for run in ("reference_NxB-s1", "reference_PyTorch-s1", "even-bsp-s1")
            }
            expected = curves["reference_NxB-s1"]
            assert list(expected) == [8, 16, 24, 32, 40, 48, 56, 64]
            assert list(curves["reference_PyTorch-s1"]) == list(expected)
            if not self.handed_out_in_order(output / "runs/even-bsp-s1"):
                del curves["even-bsp-s1"]  # A busy machine: a worker asked for its batch a whole step late.
            for run, losses in curves.items():
                # The lead of several workers evaluates after a run of its own, which may be one version later.
                shared = losses.keys() & expected.keys()
                assert 64 in shared
                for version in shared:
                    assert abs(losses[version] - expected[version]) < 1e-5, (run, version)
            said = (output / "report.md").read_text()
            assert "PyTorch and NxB: at most 0.00 points of accuracy and" in said

    def handed_out_in_order(self, folder: Path) -> bool:
        """Whether version v was made of the batches 2v and 2v + 1."""
        taken: dict[int, list[int]] = {}
        for line in (folder / "server0.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "run":
                taken.setdefault(event["worker"], []).append(event["run"])
        return [set(pair) for pair in zip(*taken.values(), strict=False)] == [{2 * v, 2 * v + 1} for v in range(64)]

    def losses(self, output: Path, run: str) -> dict[int, float]:
        lines = (output / "runs" / run / "worker0.jsonl").read_text().splitlines()
        return {event["version"]: event["loss"] for event in map(json.loads, lines) if event["event"] == "eval"}


if __name__ == "__main__":
    unittest.main()
