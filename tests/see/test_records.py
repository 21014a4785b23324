"""What TensorBoard and Perfetto get of a real job: event files by TensorBoard's own reader, and traces that agree with
the metrics files.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(os.environ.get("PSGRAD_BIN", Path(__file__).resolve().parents[2] / "build/bin"))
LIMIT_S = 60.0
DATA_FLAGS = ("--dataset=synthetic:samples=6000,features=20,classes=4", "--model=mlp:20,32,4")


class RecordedJob:
    """Servers and workers that write all files that they can to `folder`."""

    def __init__(
        self, folder: Path, *worker_flags: str, workers: int = 2, servers: int = 2, server_flags: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        chief = ""
        for shard in range(servers):
            flags = [f"--shard={shard}", f"--num_shards={servers}", f"--num_workers={workers}", "--listen=127.0.0.1:0"]
            server = self._start("ps_server", f"server-{shard}", *flags, *chief.splitlines(), *server_flags)
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("listening on ").strip()
            chief = chief or f"--chief={address}"
            self.address = chief.removeprefix("--chief=")
        self.workers = [
            self._start(
                "ps_worker",
                f"worker-{rank}",
                f"--server={self.address}",
                f"--rank={rank}",
                f"--tensorboard_dir={folder / 'boards'}",
                *DATA_FLAGS,
                *worker_flags,
            )
            for rank in range(workers)
        ]

    def _start(self, program: str, name: str, *flags: str) -> subprocess.Popen[str]:
        records = [f"--metrics_file={self.folder / name}.jsonl", f"--trace_file={self.folder / name}.json"]
        with open(self.folder / f"{name}.log", "w", encoding="utf-8") as log:
            command = [str(PROGRAMS / program), *records, *flags]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes.append(process)
        return process

    def wait(self) -> None:
        """Until all have ended well."""
        for process in self.processes:
            assert process.wait(LIMIT_S) == 0, [log.read_text()[-2000:] for log in self.folder.glob("*.log")]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(LIMIT_S)
            assert process.stdout is not None
            process.stdout.close()

    def metrics(self, name: str, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in events if each["event"] == event]

    def merge(self) -> tuple[dict[str, Any], str]:
        """The merged trace, and what was said of it."""
        traces = sorted(str(path) for path in self.folder.glob("*-*.json"))
        output = self.folder / "merged.json"
        command = [str(PROGRAMS / "ps_ctl"), "merge_traces", *traces, f"--output={output}"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
        merged: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return merged, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RecordedJob:
    """A job of two servers and two workers that exchange what they have computed, and only then go on."""
    job = RecordedJob(tmp_path_factory.mktemp("job"), "--steps=300", "--overlap=false", "--eval_every=1")
    try:
        job.wait()
    finally:
        job.end()
    return job


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """The values by step of each tag, as TensorBoard reads them."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        for event in loading.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag][event.step] = value.simple_value
    return found


def test_tensorboards_reader_finds_each_ranks_losses_as_the_metrics_file_has_them(finished: RecordedJob) -> None:
    for rank in range(2):
        found = curves(finished.folder / "boards" / f"rank-{rank}")
        steps = finished.metrics(f"worker-{rank}", "step")
        assert len(steps) == 300
        assert found["loss/train"] == pytest.approx({step["step"]: step["loss"] for step in steps}, rel=1e-6)
    lead = curves(finished.folder / "boards" / "rank-0")
    evaluations = finished.metrics("worker-0", "eval")
    assert len(evaluations) > 1
    assert lead["loss/test"] == pytest.approx({each["step"]: each["loss"] for each in evaluations}, rel=1e-6)
    assert lead["accuracy/test"] == pytest.approx({each["step"]: each["accuracy"] for each in evaluations}, rel=1e-6)


def test_tensorboards_accumulator_takes_the_folder_as_one_run_a_rank(finished: RecordedJob) -> None:
    multiplexing = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    runs = multiplexing.EventMultiplexer().AddRunsFromDirectory(str(finished.folder / "boards")).Reload().Runs()
    assert sorted(runs) == ["rank-0", "rank-1"]
    assert "loss/train" in runs["rank-0"]["tensors"]


def spans(events: Sequence[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """Those of this name, by the number that follows it."""
    found = [event for event in events if event["ph"] == "X" and event["name"].startswith(f"{name} ")]
    return {int(event["name"].removeprefix(f"{name} ")): event for event in found}


def trace(job: RecordedJob, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((job.folder / f"{name}.json").read_text(encoding="utf-8"))
    return events


def test_a_workers_trace_has_the_times_of_its_metrics_file(finished: RecordedJob) -> None:
    events = trace(finished, "worker-0")
    forward, backward, push = (spans(events, name) for name in ("forward", "backward", "push"))
    steps = finished.metrics("worker-0", "step")
    assert len(steps) == len(forward) == len(backward) == len(push) == 300
    pulls = {event["args"]["step"]: event for event in events if event["ph"] == "X" and event["name"] == "pull"}
    longer = []
    for step in steps:
        number = step["step"]
        assert backward[number]["dur"] == pytest.approx(step["backward_s"] * 1e6, abs=50)
        assert forward[number]["args"]["loss"] == step["loss"]
        # But for what the next batch's loading hides, the exchange is what was waited for.
        exchanged = pulls[number]["ts"] + pulls[number]["dur"] - push[number]["ts"]
        waited = step["push_s"] + step["wait_s"] + step["pull_s"]
        assert exchanged >= waited * 1e6 - 50
        longer.append(exchanged / (waited * 1e6))
        assert pulls[number]["ts"] + pulls[number]["dur"] <= step["t"] * 1e6 + 50
    assert statistics.median(longer) < 1.25


def test_a_servers_trace_has_the_times_of_its_metrics_file(finished: RecordedJob) -> None:
    applied = spans(trace(finished, "server-1"), "apply")
    lines = finished.metrics("server-1", "apply")
    assert len(lines) == len(applied) == 300
    for line in lines:
        assert applied[line["version"]]["dur"] == pytest.approx(line["apply_s"] * 1e6, abs=2)
        assert applied[line["version"]]["args"]["ranks"] == line["ranks"]


def assert_rows_do_not_overlap(events: Sequence[dict[str, Any]]) -> None:
    """Each two of a row are apart, or one is in the other: viewers drop others."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        open_ends: list[float] = []
        for begin, end in sorted(row, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin + 0.01:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.01, (begin, end, open_ends)
            open_ends.append(end)


def test_the_merged_trace_leads_each_push_through_each_shard_and_back(finished: RecordedJob) -> None:
    merged, said = finished.merge()
    events = merged["traceEvents"]
    assert_rows_do_not_overlap(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.split(" on ")[0] for _, name in sorted(names.items())] == [
        "server, shard 0",
        "server, shard 1",
        "worker, rank 0",
        "worker, rank 1",
    ]
    arrows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "push":
            arrows[event["id"]].append(event)
    assert len(arrows) == 2 * 2 * 300
    for parts in arrows.values():
        parts.sort(key=lambda each: each["ts"])
        assert [each["ph"] for each in parts] == ["s", "t", "t", "f"]
        assert parts[0]["pid"] == parts[3]["pid"] != parts[1]["pid"] == parts[2]["pid"]
    assert said.count("the first one's clock") == 4
    assert [each["error_us"] for each in merged["otherData"]["processes"]] == [0, 0, 0, 0]


def test_traces_of_processes_that_were_killed_are_merged(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path, "--steps=1000000", servers=1, server_flags=["--on_worker_loss=continue", "--mode=asp"])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all(path.stat().st_size > 100_000 for path in tmp_path.glob("*-*.json")):
            assert time.monotonic() < deadline, "the traces do not grow"
            assert all(process.poll() is None for process in job.processes)
            time.sleep(0.05)  # Between two looks at other processes' files.
        for process in job.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT_S)
        merged, _ = job.merge()
    finally:
        job.end()
    assert len(spans(merged["traceEvents"], "apply")) > 10
    assert_rows_do_not_overlap(merged["traceEvents"])


def test_only_the_steps_that_were_asked_for_are_traced(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path, "--steps=40", "--trace_steps=10:12", servers=1, server_flags=["--trace_steps=:1"])
    try:
        job.wait()
    finally:
        job.end()
    events = trace(job, "worker-1")
    assert sorted(spans(events, "forward")) == sorted(spans(events, "push")) == [10, 11, 12]
    assert sorted(spans(trace(job, "server-0"), "apply")) == [1, 2]
