"""What ps_ctl says of a real job, and its page of a run from metrics files."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from observed_job import PROGRAMS, WAIT_LIMIT_S, ObservedJob, get, wait_until

pytestmark = pytest.mark.skipif(not (PROGRAMS / "ps_ctl").exists(), reason="the programs are not built")

PACE = ("--batch_size=20", "--experiment_step_time=5ms")


@pytest.fixture
def real_job(tmp_path: Path) -> Iterator[ObservedJob]:
    """Two workers, who train for longer than any test."""
    flags = ("--lease=60s",)
    made = ObservedJob(tmp_path, workers=2, server_flags=flags, worker_flags=("--epochs=100000", *PACE))
    yield made
    made.end()


def ctl(job: ObservedJob, *arguments: str) -> subprocess.CompletedProcess[str]:
    """ps_ctl of the job's chief."""
    command = [str(PROGRAMS / "ps_ctl"), f"--server={job.address}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False)


def step_of(job: ObservedJob) -> int:
    return int(job.job()["progress"]["step"])


def test_status_in_json_is_what_the_page_reads(real_job: ObservedJob) -> None:
    wait_until("a worker has told its loss", lambda: real_job.job()["progress"]["loss"])
    told = json.loads(ctl(real_job, "--json", "status").stdout)
    shown = real_job.job()
    assert told.keys() == shown.keys()
    assert told["workers"][0].keys() == shown["workers"][0].keys()
    assert told["mode"] == shown["mode"] == "bsp"
    assert told["headline"].startswith("step ")


def test_workers_are_listed_with_where_their_time_goes(real_job: ObservedJob) -> None:
    wait_until("a worker has told its phases", lambda: real_job.job()["workers"][0]["seconds"])
    lines = ctl(real_job, "workers").stdout.splitlines()
    assert lines[0].split()[:3] == ["rank", "name", "host"]
    assert {int(line.split()[0]) for line in lines[1:]} == {0, 1}
    assert "%" in lines[1]


def test_health_fails_and_names_who_is_missing_while_a_worker_is_stopped(real_job: ObservedJob) -> None:
    wait_until("the first steps", lambda: step_of(real_job) > 5)
    well = ctl(real_job, "health", "--max_idle=20s")
    assert (well.returncode, well.stdout.startswith("SERVING: the job is running")) == (0, True), well
    real_job.stop(1)
    try:
        wait_until("no step for 2 s", lambda: real_job.job()["progress"]["since_version_s"] > 2)
        ill = ctl(real_job, "health", "--max_idle=2s")
        assert ill.returncode == 1
        assert "no version for" in ill.stderr
        assert "rank 1" in ill.stderr
    finally:
        real_job.go_on(1)


def test_a_watched_job_is_told_in_lines_until_its_end(tmp_path: Path) -> None:
    job = ObservedJob(tmp_path, workers=1, server_flags=("--keep_running",), worker_flags=("--steps=400", *PACE))
    try:
        watched = ctl(job, "status", "--watch")
    finally:
        job.end()
    assert watched.returncode == 0, watched
    lines = watched.stdout.splitlines()
    assert len(lines) >= 2
    assert "\x1b" not in watched.stdout
    assert "finished at step 400" in lines[-1]


def test_the_page_of_metrics_files_says_what_the_job_said(tmp_path: Path) -> None:
    job = ObservedJob(
        tmp_path, workers=2, server_flags=("--keep_running",), worker_flags=("--steps=200", "--eval_every=1", *PACE)
    )
    try:
        wait_until("the job is finished", lambda: job.job()["phase"] == "finished")
        told = job.job()
    finally:
        job.end()
    command = [str(PROGRAMS / "ps_ctl"), "view", str(tmp_path)]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        page = viewer.stdout.readline().removeprefix("page at ").strip()
        assert "<html" in get(page, "/")
        shown = json.loads(get(page, "/api/v1/job"))
        for name in ("step", "samples"):
            assert shown["progress"][name] == told["progress"][name]
        assert shown["shards"][0]["updates"] == told["shards"][0]["updates"]
        assert shown["staleness"] == told["staleness"]
        assert [each["steps"] for each in shown["workers"]] == [200, 200]
        series = json.loads(get(page, "/api/v1/series"))["series"]
        assert series["loss"]["points"][-1][1] == 200
        assert "accuracy.test" in series
        viewer.send_signal(signal.SIGTERM)
        assert viewer.wait(WAIT_LIMIT_S) == 0
    finally:
        viewer.kill()
        viewer.wait()
        if viewer.stdout is not None:
            viewer.stdout.close()
