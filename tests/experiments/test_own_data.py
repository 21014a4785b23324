"""The experiment with data that no machine has whole: its page, recomputed from metrics and from the files it cut."""
# ruff: noqa: I001, PT009 (support makes experiments importable; these tests need no pytest)

from __future__ import annotations

import json
import re
import statistics
import unittest
from pathlib import Path

import support
from support import table_rows

from experiments.own_data import within_margin
from experiments.shared.intervals import Interval

ACCURACY = "Test accuracy, %"
PARTS = "What each worker has: samples, and their classes"
RANKS, BATCH, EPOCHS = 4, 64, 2
SEEDS = {"bsp": (1, 2), "local_sgd": (1,), "asp": (1,)}


def events(file: Path, name: str) -> list[dict]:
    """In order."""
    return [event for event in map(json.loads, file.read_text().splitlines()) if event["event"] == name]


def dataset(folder: Path, rank: int) -> list[Path]:
    """The files that a worker was given: images, labels, and perhaps those of the test."""
    flag = events(folder / f"worker{rank}.jsonl", "start")[0]["flags"]["dataset"]
    return [Path(part) for part in flag.removeprefix("idx:").split(",")]


def content(images: Path, labels: Path) -> list[tuple[bytes, int]]:
    """The samples of a pair of IDX files of 28 × 28 images."""
    pixels, numbers = images.read_bytes()[16:], labels.read_bytes()[8:]
    return [(pixels[784 * place : 784 * (place + 1)], number) for place, number in enumerate(numbers)]


def weights(folder: Path) -> str:
    return re.search(r"weights hash: (\w+)\n", (folder / "worker0.out").read_text())[1]


class OwnDataTest(support.ExperimentCase):
    """What was cut, learnt and refused is in the page."""

    NAME = "own_data"

    def whole(self) -> list[tuple[bytes, int]]:
        return content(*dataset(self.runs / "the-whole-bsp-s1", 0)[:2])

    def test_the_ranks_of_the_exact_cut_have_what_they_take_of_the_whole(self) -> None:
        own = [content(*dataset(self.runs / "exact-own-none", rank)[:2]) for rank in range(RANKS)]
        dealt = []
        while any(own):
            for samples in own:
                dealt += samples[:BATCH]
                del samples[:BATCH]
        self.assertEqual(dealt, self.whole())

    def test_the_weights_are_those_of_the_whole(self) -> None:
        for normalize in ("none", "standard"):
            whole, own = (weights(self.runs / f"exact-{kind}-{normalize}") for kind in ("whole", "own"))
            self.assertTrue(whole)
            if normalize == "none":
                self.assertEqual(whole, own)
                self.assertIn(f"equal, bit for bit: {own} | agrees", self.page)
            for rank in range(RANKS):
                files = (self.runs / f"exact-{kind}-{normalize}/worker{rank}.jsonl" for kind in ("whole", "own"))
                one, other = ([step["loss"] for step in events(file, "step")] for file in files)
                self.assertEqual(len(one), len(other))
                for a, b in zip(one, other, strict=True):
                    self.assertAlmostEqual(a, b, delta=1e-5 * a)

    def test_each_cut_is_the_whole(self) -> None:
        whole = sorted(self.whole())
        for cut in ("quarters", "uneven", "by-class"):
            parts = [dataset(self.runs / f"{cut}-bsp-s1", rank) for rank in range(RANKS)]
            self.assertEqual(len({files[0] for files in parts}), RANKS)
            self.assertEqual([len(files) for files in parts], [4, 2, 2, 2])  # The test files are the lead's.
            self.assertEqual(sorted(sample for files in parts for sample in content(*files[:2])), whole)

    def test_the_table_of_the_cuts(self) -> None:
        rows = {row["cut"]: row for row in table_rows(self.page, PARTS)}
        for cut, folder in (("quarters", "quarters"), ("uneven", "uneven"), ("by class", "by-class")):
            for rank in range(RANKS):
                labels = [label for _, label in content(*dataset(self.runs / f"{folder}-bsp-s1", rank)[:2])]
                count, _, classes = rows[cut][f"rank {rank}"].partition(": ")
                self.assertEqual(int(count.replace(",", "")), len(labels))
                numbers = [int(number) for number in re.findall(r"\d+", classes)]
                self.assertEqual((numbers[0], numbers[-1]), (min(labels), max(labels)))

    def test_accuracies_are_those_of_the_metrics(self) -> None:
        rows = {row["data"]: row for row in table_rows(self.page, ACCURACY)}
        for mode, seeds in SEEDS.items():
            by_cut = {}
            for cut, row in rows.items():
                folders = [self.runs / f"{cut.replace(' ', '-')}-{mode}-s{seed}" for seed in seeds]
                tests = [events(folder / "worker0.jsonl", "eval")[-1] for folder in folders]
                self.assertEqual({test["split"] for test in tests}, {"test"})
                by_cut[cut] = statistics.mean(100 * test["accuracy"] for test in tests)
                self.assertAlmostEqual(float(row[mode].split(" ± ")[0]), by_cut[cut], delta=0.0501)
                if cut != "the whole":
                    points = float(row[f"{mode}, points from the whole"].split(" ± ")[0].replace("−", "-"))
                    self.assertAlmostEqual(points, by_cut[cut] - by_cut["the whole"], delta=0.0501)

    def test_a_rank_that_runs_out_contributes_nothing_and_all_samples_count_once(self) -> None:
        folder = self.runs / "uneven-bsp-s1"
        has = [len(content(*dataset(folder, rank)[:2])) for rank in range(RANKS)]
        steps = [event["samples"] for event in events(folder / "server0.jsonl", "apply")]
        each = -(-max(has) // BATCH)
        self.assertEqual(len(steps), EPOCHS * each)
        for epoch in range(EPOCHS):
            own = list(zip(*steps[epoch * each : (epoch + 1) * each], strict=True))
            self.assertEqual([sum(samples) for samples in own], has)
            self.assertEqual(sum(samples == 0 for samples in own[-1]), each - -(-has[-1] // BATCH))
        self.assertIn(f"{', '.join(f'{samples:,}' for samples in has)} in each of {EPOCHS} epochs | agrees", self.page)

    def test_an_accuracy_is_judged_by_its_interval(self) -> None:
        for low, high, expected in ((-0.5, 0.9, True), (1.1, 2, False), (-3, -1.2, False), (0.5, 1.5, None)):
            found = Interval((low + high) / 2, (high - low) / 2, 5)
            self.assertIs(within_margin(found, 1.0), expected)
        self.assertIsNone(within_margin(Interval(0.0, None, 1), 1.0))

    def test_what_does_not_go_together_is_refused(self) -> None:
        self.assertNotIn("NOT refused", self.page)
        section = self.page.partition("## What is refused")[2]
        self.assertRegex(section, r"nobody says `--data=own`: `[^`]*--dataset=750 samples")
        self.assertRegex(section, r"the others do not: `[^`]*normalised")


if __name__ == "__main__":
    unittest.main()
