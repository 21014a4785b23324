"""The Gaussians experiment: its page's figures, recomputed from what its worker wrote. Skipped without PyTorch."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import os
import unittest

import support
from support import table_rows

PYTHON = os.environ.get("PS_TORCH_PYTHON")


class GaussiansTest(support.ExperimentCase):
    NAME = "gaussians"
    FLAGS = (f"--python={PYTHON}",) if PYTHON else ()

    def losses(self, name: str) -> list[float]:
        written = json.loads((self.runs / name / "losses.json").read_text())
        return [*(loss for _, loss in written["losses"]), written["last"]]

    def test_losses_are_those_that_the_worker_wrote(self) -> None:
        rows = table_rows(self.page, "The loss after each round")
        self.assertEqual([row["updates of all workers"] for row in rows], ["0", "80", "160", "240", "320", "400"])
        ours = [float(row["ours"]) for row in rows]
        for shown, written in zip(ours, self.losses("printed"), strict=False):
            self.assertAlmostEqual(shown, written, delta=1e-6)
        self.assertLess(ours[-1], ours[0])

    def test_last_losses_are_those_of_the_runs(self) -> None:
        rows = {row["whom to wait for"]: row["loss"] for row in table_rows(self.page, "The loss after as long a time")}
        self.assertEqual(list(rows), ["barrier", "quorum of 2", "async"])
        for sync, shown in rows.items():
            self.assertAlmostEqual(float(shown), self.losses(f"{sync.replace(' ', '-')}-1")[-1], delta=1e-4)


if __name__ == "__main__":
    unittest.main()
