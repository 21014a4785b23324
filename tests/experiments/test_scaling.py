"""The scaling experiment: its page's figures, recomputed from the metrics of its runs."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import re
import statistics
import unittest
from pathlib import Path

import support
from support import table_rows

CORES_BUSY = 0.70
PUBLISHED = {2: 1.91, 4: 3.75, 8: 6.74}
BATCHES = 160  # They have 1,000 samples each: the quick form's work.
IDLE = (("1,000", "shared memory"), ("1,000", "TCP"), ("10,000", "shared memory"), ("10,000", "TCP"))


def steps_of(file: Path) -> tuple[float, list[dict]]:
    """When the process's clock was 0, and its steps."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    return start["unix_time"] - start["t"], [event for event in events if event["event"] == "step"]


class Run:
    """A job's folder."""

    def __init__(self, folder: Path) -> None:
        self.workers = [
            steps_of(folder / f"worker{rank}.jsonl") for rank in range(len(list(folder.glob("worker*.jsonl"))))
        ]
        ends = [zero + step["t"] for zero, steps in self.workers for step in steps]
        self.count = len(self.workers[0][1])
        self.span_s = max(ends) - min(ends)
        self.step_s = self.span_s / (self.count - 1)
        parts = ("forward_s", "backward_s", "idle_s")
        after_first = [step for _, steps in self.workers for step in steps[1:]]
        self.computing_s = statistics.median(sum(step.get(part, 0) for part in parts) for step in after_first)
        self.start = json.loads((folder / "worker0.jsonl").read_text().splitlines()[0])
        self.weights = re.search(r"weights hash: (\w+)", (folder / "worker0.out").read_text())


class ScalingTest(support.ExperimentCase):
    """All setups are in the page with what their metrics say."""

    NAME = "scaling"

    def run_of(self, name: str) -> Run:
        return Run(self.runs / name)

    def lines(self) -> list[tuple[str, str]]:
        """The caption of each details table, and how its folders' names begin."""
        found = [
            (
                f"Idle-time form, batch {batch}, {way}",
                f"idle-{batch.replace(',', '')}-{'tcp' if way == 'TCP' else 'shm'}",
            )
            for batch, way in IDLE
        ]
        for place, begin in (("a core of its own", "beside-a-server"), ("the workers' cores", "with-the-server")):
            found.append((f"Real cores, server on {place}, shared memory", f"{begin}-shm"))
            found.append((f"Real cores, server on {place}, TCP", f"{begin}-tcp"))
        return found

    def test_seconds_steps_and_speed_ups_are_those_of_the_metrics(self) -> None:
        compared = 0
        for caption, begin in self.lines():
            rows = table_rows(self.page, caption)
            one_s = None
            for row in rows:
                number = int(row["workers"])
                run = self.run_of(f"{begin}-{number}-r1")
                self.assertEqual(len(run.workers), number)
                seconds = run.step_s * run.count
                one_s = one_s or seconds
                self.assertAlmostEqual(float(row["seconds"]), seconds, delta=0.006, msg=caption)
                self.assertAlmostEqual(float(row["speed-up"]), one_s / seconds, delta=0.006, msg=caption)
                self.assertAlmostEqual(float(row["step, ms"]), 1000 * run.step_s, delta=0.006, msg=caption)
                self.assertAlmostEqual(
                    float(row["of it computing, ms"]), 1000 * run.computing_s, delta=0.006, msg=caption
                )
                compared += 1
        self.assertEqual(compared, len(list(self.runs.glob("*-r1"))))
        self.assertGreaterEqual(compared, 12)

    def test_all_workers_together_do_the_same_work_in_every_setup(self) -> None:
        for caption, begin in self.lines():
            batch = int(begin.split("-")[1]) if begin.startswith("idle") else 1000
            for row in table_rows(self.page, caption):
                run = self.run_of(f"{begin}-{row['workers']}-r1")
                self.assertEqual(sum(len(steps) for _, steps in run.workers) * batch, BATCHES * 1000, msg=caption)
                used = {step["samples"] for _, steps in run.workers for step in steps}
                self.assertEqual(used, {10} if begin.startswith("idle") else {1000})

    def test_idling_makes_up_for_what_a_batch_took_to_compute_alone(self) -> None:
        for batch in (1000, 10000):
            alone = self.run_of(f"compute-{batch}")
            own = [step["forward_s"] + step["backward_s"] for step in alone.workers[0][1][1:]]
            microseconds = round(1e6 * statistics.median(own))
            run = self.run_of(f"idle-{batch}-tcp-8-r1")
            self.assertEqual(run.start["flags"]["experiment_step_time"], _duration(microseconds))
            self.assertTrue(any(step.get("idle_s", 0) > 0 for _, steps in run.workers for step in steps))
            computing = [
                step["forward_s"] + step["backward_s"] + step.get("idle_s", 0)
                for _, steps in run.workers
                for step in steps
            ]
            # A batch's time is from its beginning; where a busy machine takes the processor away between two of its
            # parts, none of them has that.
            long_enough = sum(seconds > 0.99e-6 * microseconds for seconds in computing)
            self.assertGreater(long_enough, 0.9 * len(computing))

    def test_as_many_workers_have_the_same_weights_wherever_and_however_they_exchange(self) -> None:
        for number in (1, 2):
            folders = [*self.runs.glob(f"with-the-server-*-{number}-r1"), *self.runs.glob(f"beside-*-{number}-r1")]
            hashes = {Run(folder).weights[1] for folder in folders}
            self.assertEqual(len(hashes), 1 if folders else 0)
            for value in hashes:
                self.assertIn(f"{number}: {value}", self.page)

    def test_verdicts_follow_from_the_speed_ups(self) -> None:
        claims = _claims(self.page)
        seen = 0
        for caption, _ in self.lines():
            for row in table_rows(self.page, caption):
                if row["workers"] == "1":
                    continue
                what = f"speed-up: {caption}, {row['workers']} workers"
                claim = next(each for each in claims if each["what"].lower() == what.lower())
                off = float(row["speed-up"]) / PUBLISHED[int(row["workers"])] - 1
                bound = row["speed-up is"] == "a lower bound"
                if abs(abs(off) - 0.1) < 0.004 or (bound and abs(off) < 0.004):
                    continue  # Rounded figures cannot tell.
                expected = "agrees" if abs(off) <= 0.1 else "contradicts"
                self.assertEqual(claim["verdict"], "not comparable" if bound and off < 0 else expected, msg=what)
                seen += 1
        self.assertGreater(seen, 0)

    def test_lower_bounds_are_those_with_busy_cores_and_those_who_share_them_with_the_server(self) -> None:
        for caption, begin in self.lines():
            for row in table_rows(self.page, caption):
                busy = float(row["in the rest of a step"].rstrip("%")) / 100
                several, idle = row["workers"] != "1", begin.startswith("idle")
                if not idle or abs(busy - CORES_BUSY) > 0.01:
                    short = busy > CORES_BUSY if idle else begin.startswith("with-the-server")
                    self.assertEqual(row["speed-up is"] == "a lower bound", several and short, msg=caption)

    def test_nothing_is_said_to_be_of_gpus(self) -> None:
        overview = {row["form"]: row for row in table_rows(self.page, "Speed-ups over one worker")}
        self.assertEqual({value for key, value in overview["GPUs, here"].items() if key != "form"}, {"not measured"})
        self.assertEqual(overview["published: GPUs"]["8 workers"], "6.74")


def _duration(microseconds: int) -> str:
    """As the flag's value is printed."""
    return f"{microseconds / 1000:g}ms" if microseconds >= 1000 else f"{microseconds}us"


def _claims(page: str) -> list[dict[str, str]]:
    """The table under the first heading, which has no caption."""
    lines = page.partition("## Published and measured")[2].strip().splitlines()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    found = []
    for line in lines[1:]:
        if len(line) != len(lines[0]):
            break
        found.append(dict(zip(lines[0], line, strict=True)))
    return found


if __name__ == "__main__":
    unittest.main()
