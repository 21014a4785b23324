"""The function experiment's page: its numbers, recomputed from the metrics; and its trainings, by a second program."""
# ruff: noqa: I001, PT009 (support makes experiments importable; these tests need no pytest)

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import unittest
from itertools import pairwise
from pathlib import Path

import support
from support import BIN, table_rows

from experiments.function_training import QUICK, train
from experiments.lab import Lab
from experiments.shared.data import stream, uniform_weights

try:
    import numpy as np
except ImportError:
    np = None

PYTHON = os.environ.get("PS_TORCH_PYTHON")
ROWS = {1: "after every batch", 2: "after every 2nd batch", 4: "after every 4th batch", 10: "after every 10th batch"}
ROWS[0] = "never"
PUBLISHED_S = {1: 330, 2: 183, 4: 136, 10: 99, 0: 88}
WIDTHS = [1, 80, 80, 40, 1]
SAMPLES, BATCH, WORKERS, LEG, SEEDS = 8000, 100, 4, 4, (1, 2)
STEPS = SAMPLES // (BATCH * WORKERS)  # An epoch has so many.


def events(folder: Path, name: str) -> list[dict]:
    """Worker 0's."""
    lines = (folder / "worker0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def tensors(path: Path) -> dict[str, tuple[list[int], bytes]]:
    """Shape and bytes of each tensor of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = entry["shape"], content[begin:end]
    return found


def outputs(weights: dict[str, tuple[list[int], bytes]], x: float) -> float:
    """The network's, in double precision."""
    layers = sorted({name.split(".")[0] for name in weights})
    values = [x]
    for layer in layers:
        (rows, columns), raw = weights[f"{layer}.weight"]
        matrix = struct.unpack(f"<{rows * columns}f", raw)
        bias = struct.unpack(f"<{rows}f", weights[f"{layer}.bias"][1])
        sums = [
            sum(matrix[row * columns + k] * value for k, value in enumerate(values)) + bias[row] for row in range(rows)
        ]
        values = sums if layer == layers[-1] else [max(one, 0.0) for one in sums]
    return values[0]


class FunctionTest(support.ExperimentCase):
    NAME = "function"
    FLAGS = (f"--python={PYTHON}",) if PYTHON else ()

    def folder(self, interval: int, seed: int = 1, leg: int = 1, setting: str = "code") -> Path:
        return self.runs / f"{setting}-every{interval}-seed{seed}-leg{leg}"

    def losses(self, interval: int, seed: int = 1, leg: int = 1, setting: str = "code") -> list[float]:
        return [event["loss"] for event in events(self.folder(interval, seed, leg, setting), "eval")]

    def seed_of_two_legs(self, interval: int) -> int:
        return next(seed for seed in SEEDS if self.folder(interval, seed, 2).exists())

    def thousand_epochs_s(self, interval: int, seed: int) -> float:
        steps = events(self.folder(interval, seed), "step")
        self.assertEqual(len(steps), LEG * STEPS)
        return 1000 * STEPS * (steps[-1]["t"] - steps[0]["t"]) / (len(steps) - 1)

    def test_losses_are_those_of_the_metrics(self) -> None:
        rows = {row["gradients averaged"]: row for row in table_rows(self.page, "Loss, code's setting")}
        self.assertEqual(list(rows), list(ROWS.values()))
        for interval, name in ROWS.items():
            last = {seed: self.losses(interval, seed)[1] for seed in SEEDS}
            for seed in SEEDS:
                self.assertEqual(rows[name][f"seed {seed}"], f"{last[seed]:.3f}")
            best = min(last, key=last.__getitem__)
            legs = 2 if interval in (1, 10) else 1
            self.assertEqual(rows[name]["the seed that went on"], str(best))
            self.assertEqual(rows[name]["last loss"], f"{self.losses(interval, best, legs)[-1]:.3f}")
            self.assertFalse(self.folder(interval, 3 - best, 2).exists())
        for row in table_rows(self.page, "Loss after 4 epochs by setting"):
            interval = next(interval for interval, name in ROWS.items() if name == row["gradients averaged"])
            for column, cell in list(row.items())[1:]:
                if cell != "not run":
                    self.assertEqual(cell, f"{self.losses(interval, setting=column.partition(':')[0])[-1]:.3f}")
        mini, full = table_rows(self.page, "Full batch against mini-batches")
        self.assertEqual(mini["loss after 4 epochs"], f"{self.losses(1)[-1]:.3f}")
        lines = events(self.runs / "code-full-every1-seed1-leg1", "step")
        self.assertEqual((full["steps"], len(lines), lines[0]["samples"]), ("4", 4, SAMPLES // WORKERS))

    def test_times_are_those_of_the_metrics_and_verdicts_follow_from_them(self) -> None:
        rows = table_rows(self.page, "Time for a thousand epochs")
        claims = self.page.partition("## Published and measured")[2].splitlines()
        first = {seed: self.thousand_epochs_s(1, seed) for seed in SEEDS}
        for row, (interval, name) in zip(rows, ROWS.items(), strict=True):
            seconds = {seed: self.thousand_epochs_s(interval, seed) for seed in SEEDS}
            self.assertEqual(row["gradients averaged"], name)
            said = row["ours, shared memory, s"].split(" ± ")[0]
            self.assertEqual(said, f"{sum(seconds.values()) / len(seconds):.1f}")
            if interval == 1:
                continue
            ratio = math.prod(seconds[seed] / first[seed] for seed in SEEDS) ** (1 / len(SEEDS))
            what = "gradients never averaged" if interval == 0 else f"gradients averaged {name}"
            claim = next(line for line in claims if line.startswith(f"| time for as many epochs, {what},"))
            cells = [cell.strip() for cell in claim.split("|")[1:-1]]
            published = PUBLISHED_S[interval] / PUBLISHED_S[1]
            self.assertEqual(cells[1], f"{published:.2f}")
            self.assertEqual(cells[2].split(" (")[0], f"{ratio:.2f}")
            self.assertEqual(cells[3], "agrees" if abs(ratio - published) <= 0.1 else "contradicts")

    def test_legs_are_one_training_and_a_seed_gives_the_same_weights(self) -> None:
        with tempfile.TemporaryDirectory(prefix="experiments-test-") as folder:
            lab = Lab("function", Path(folder), BIN, quick=True)
            for interval in (1, 10):
                seed = self.seed_of_two_legs(interval)
                whole = train(lab, QUICK, QUICK.code, interval, seed, epochs=2 * LEG).weights[0]
                self.assertEqual(tensors(whole), tensors(self.folder(interval, seed, 2) / "weights.safetensors"))
                shown = self.losses(interval, seed) + self.losses(interval, seed, 2)
                self.assertEqual([event["loss"] for event in events(whole.parent, "eval")], shown)
            again = train(lab, QUICK, QUICK.code, 2, 2).weights[0]
            self.assertEqual(tensors(again), tensors(self.folder(2, seed=2) / "weights.safetensors"))
            self.assertNotEqual(tensors(again), tensors(self.folder(2, seed=1) / "weights.safetensors"))

    def test_predictions_are_what_the_saved_network_says(self) -> None:
        folder = self.folder(1, self.seed_of_two_legs(1), 2)
        weights = tensors(folder / "weights.safetensors")
        lines = (folder / "outputs.csv").read_text().splitlines()
        self.assertEqual(lines[0], "target,output")
        self.assertEqual(len(lines), 402)
        for k, line in list(enumerate(lines[1:]))[::25]:
            target, output = map(float, line.split(","))
            x = 20 * k / 400
            self.assertAlmostEqual(target, math.sqrt(x) * math.sin(3.14 * x / 5), delta=1e-5)
            self.assertAlmostEqual(output, outputs(weights, x), delta=1e-4)

    def test_he_weights_fail_and_glorot_ones_do_not(self) -> None:
        rows = table_rows(self.page, "Initial weights")
        said = [(row["initial weights"], row["outcome"].split()[0]) for row in rows]
        self.assertEqual(said, [("`--init=he`", "fails:")] * 2 + [("`--init=glorot`", "loss")] * 2)

    def test_pytorch_agrees_or_is_said_to_be_missing(self) -> None:
        if "Not measured: " in self.page:
            self.assertFalse(PYTHON, "$PS_TORCH_PYTHON has no PyTorch")
            return
        self.assertIn("Both programs compute the same", self.page)
        rows = table_rows(self.page, "Largest relative difference of rank 0's losses, batch by batch")
        self.assertEqual([float(row["all"]) < 1e-4 for row in rows], [True])

    @unittest.skipIf(np is None, "no numpy")
    def test_training_is_what_its_definition_says(self) -> None:
        for interval in ROWS:
            self.assert_close(self.losses(interval), Reference(1).train(interval, 0.005, 2 * STEPS))
        self.assert_close(self.losses(2, seed=2), Reference(2).train(2, 0.005, 2 * STEPS))
        for interval in (1, 0):
            self.assert_close(self.losses(interval, setting="text"), Reference(1).train(interval, 0.001, 20))
        self.assert_close(self.losses(0, setting="mixed"), Reference(1).train(0, 0.005, 20))

    def assert_close(self, found: list[float], expected: list[float]) -> None:
        self.assertEqual(len(found), len(expected))
        for one, other in zip(found, expected, strict=True):
            self.assertAlmostEqual(one / other, 1, delta=1e-4)


class Reference:
    """The four workers of a job, in double precision and one after another."""

    def __init__(self, seed: int) -> None:
        numbers = stream(seed, 3 << 48)
        self.x = np.array([[np.float32((next(numbers) >> 40) / 2**24 * 20)] for _ in range(SAMPLES)], float)
        self.y = np.float32(np.sqrt(self.x) * np.sin(3.14 * self.x / 5)).astype(float)
        self.first = []
        for (_, values), (inputs, outs) in zip(uniform_weights(WIDTHS, seed), pairwise(WIDTHS), strict=True):
            limit = math.sqrt(6 / (inputs + outs))
            self.first += [np.array(values).reshape(outs, inputs) * limit, np.zeros(outs)]

    def train(self, interval: int, rate: float, average_every: int) -> list[float]:
        """The loss over all samples, of the averaged weights, every two epochs."""
        workers = [[tensor.copy() for tensor in self.first] for _ in range(WORKERS)]
        losses = []
        for number in range(1, LEG * STEPS + 1):
            begin = (number - 1) % STEPS * WORKERS * BATCH
            gradients = []
            for rank, weights in enumerate(workers):
                chosen = slice(begin + rank * BATCH, begin + (rank + 1) * BATCH)
                gradients.append(self.gradient(weights, self.x[chosen], self.y[chosen]))
            averages = number % average_every == 0
            if not averages and interval and number % interval == 0:
                gradients = [[sum(parts) / WORKERS for parts in zip(*gradients, strict=True)]] * WORKERS
            for weights, gradient in zip(workers, gradients, strict=True):
                for tensor, slope in zip(weights, gradient, strict=True):
                    tensor -= rate * slope
            if averages:
                middle = [sum(parts) / WORKERS for parts in zip(*workers, strict=True)]
                workers = [[tensor.copy() for tensor in middle] for _ in range(WORKERS)]
            if number % (2 * STEPS) == 0:
                losses.append(float(np.mean((self.forward(workers[0], self.x)[-1] - self.y) ** 2)))
        return losses

    @staticmethod
    def forward(weights: list, x):
        """What goes into each layer, and what comes out of the last."""
        values = [x]
        for layer in range(len(WIDTHS) - 1):
            sums = values[-1] @ weights[2 * layer].T + weights[2 * layer + 1]
            values.append(sums if layer == len(WIDTHS) - 2 else np.maximum(sums, 0))
        return values

    def gradient(self, weights: list, x, y) -> list:
        """The mean squared error's."""
        values = self.forward(weights, x)
        slope, found = 2 * (values[-1] - y) / len(x), []
        for layer in reversed(range(len(WIDTHS) - 1)):
            found = [slope.T @ values[layer], slope.sum(axis=0), *found]
            slope = slope @ weights[2 * layer] * (values[layer] > 0)
        return found


if __name__ == "__main__":
    unittest.main()
