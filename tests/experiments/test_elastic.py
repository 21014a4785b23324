"""The experiment on workers that come and go: its page's figures, recomputed from its jobs' metrics and logs."""
# ruff: noqa: PT009 (these tests need no pytest)

from __future__ import annotations

import json
import re
import unittest
from datetime import datetime
from typing import Any

import support
from support import table_rows

SAMPLES, BATCH = 60_000, 64


class ElasticTest(support.ExperimentCase):
    """What is said of a job is what its servers and workers have recorded."""

    NAME = "elastic"

    def events(self, job: str, name: str) -> tuple[list[dict[str, Any]], float]:
        """With the Unix time at which its `t` was 0."""
        lines = (self.runs / job / f"{name}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        start = next(event for event in events if event["event"] == "start")
        return events, start["unix_time"] - start["t"]

    def expected(self) -> dict[str, dict[str, str]]:
        begin = self.page.index("## Expected and measured")
        after = "**x**\n" + self.page[begin:].partition("\n")[2].strip()
        return {row["what"]: row for row in table_rows(after, "x")}

    def test_no_sample_is_lost_or_counts_twice(self) -> None:
        for mode in ("bsp", "asp"):
            events, _ = self.events(f"changing-{mode}", "server0")
            (terms,) = (event for event in events if event["event"] == "runs")
            per_epoch = -(-SAMPLES // BATCH)
            whole, left = divmod(terms["runs"], per_epoch)
            used = sum(sum(event["samples"]) for event in events if event["event"] == "apply")
            self.assertEqual(used, whole * SAMPLES + left * BATCH)
            counts: dict[int, int] = {}
            for event in events:
                if event["event"] == "run":
                    counts[event["run"]] = counts.get(event["run"], 0) + (-1 if event["returned"] else 1)
            self.assertEqual(counts, dict.fromkeys(range(terms["runs"]), 1))
            self.assertEqual(self.expected()[f"{mode}, the same: samples repeated or lost"]["ours"], "0")

    def test_the_job_had_the_workers_that_the_page_tells(self) -> None:
        for mode in ("bsp", "asp"):
            files = sorted((self.runs / f"changing-{mode}").glob("worker*.jsonl"))
            self.assertEqual(len(files), 2 + 3 + 2)  # From 2 to 5, and from 1 to 3.
            first = {}
            for file in files:
                events, zero = self.events(f"changing-{mode}", file.stem)
                steps = [zero + event["t"] for event in events if event["event"] == "step"]
                first[file.stem] = (steps[0], steps[-1])
            most = max(sum(begin <= at <= end for begin, end in first.values()) for at, _ in first.values())
            self.assertEqual(most, 5)

    def test_a_newcomers_time_is_that_from_its_join_to_the_first_version_with_its_push(self) -> None:
        events, zero = self.events("costs", "server0")
        log = (self.runs / "costs/server0.log").read_text()
        joined = re.search(r"^(\S+ \S+) I ps_server: rank 2 \(.*\) joined", log, re.MULTILINE)
        assert joined is not None
        began = datetime.fromisoformat(joined[1]).timestamp()
        counted = min(
            zero + event["t"]
            for event in events
            # Its first push has no samples, so that nobody waits for it.
            if event["event"] == "apply" and dict(zip(event["ranks"], event["samples"], strict=True)).get(2, 0) > 0
        )
        row = self.expected()["100 MB: a newcomer, from its join to its first push that counts"]
        self.assertAlmostEqual(float(row["ours"].removesuffix(" s")), counted - began, delta=0.006)


if __name__ == "__main__":
    unittest.main()
