"""What /metrics says of a job in which workers do not wait for each other, and one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exposition import Family, parse, value
from observed_job import PROGRAMS, ObservedJob, get, wait_until

WORKERS, SLOW_RANK = 3, 2

pytestmark = pytest.mark.skipif(not (PROGRAMS / "ps_server").exists(), reason="the programs are not built")


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ObservedJob]:
    """One in which each worker makes as many steps as the test's parameter says."""
    pace = ("--experiment_step_time=10ms", f"--experiment_straggler={SLOW_RANK}:5")
    started = ObservedJob(
        tmp_path_factory.mktemp("job"),
        workers=WORKERS,
        server_flags=("--mode=asp", "--keep_running"),
        worker_flags=(f"--steps={request.param}", "--batch_size=50", *pace),
    )
    yield started
    started.end()


def metrics(job: ObservedJob) -> dict[str, Family]:
    return parse(get(job.pages[0], "/metrics"))


def ranks(families: dict[str, Family]) -> set[str]:
    """Those that some series is of."""
    found = [dict(labels) for family in families.values() for _, labels in family.samples]
    return {labels["rank"] for labels in found if "rank" in labels}


def steps_of(rank: int, families: dict[str, Family]) -> float:
    """0 as long as the worker has told of none."""
    name = "ps_worker_steps_total"
    return families[name].samples.get((name, (("rank", str(rank)),)), 0) if name in families else 0


@pytest.mark.parametrize("job", [400], indirect=True)
def test_a_lost_workers_series_go_and_what_it_did_stays_in_the_jobs_counters(job: ObservedJob) -> None:
    everyone = {str(rank) for rank in range(WORKERS)}
    wait_until("all are there", lambda: ranks(metrics(job)) == everyone)
    wait_until("it has trained", lambda: steps_of(SLOW_RANK, metrics(job)) > 10)
    job.workers[SLOW_RANK].kill()
    wait_until("its series are gone", lambda: ranks(metrics(job)) == everyone - {str(SLOW_RANK)})
    families = metrics(job)
    assert value(families, "ps_worker_losses_total") == 1
    assert value(families, "ps_workers", state="live") == WORKERS - 1
    assert job.job()["progress"]["samples"] >= value(families, "ps_worker_samples_total", rank="0")
    wait_until("the job has ended", lambda: value(metrics(job), "ps_job_phase", phase="finished") == 1)
    assert ranks(metrics(job)) == set()
    families, applied = metrics(job), [line for line in job.metrics_file("server-0") if line["event"] == "apply"]
    assert value(families, "ps_updates_total") == len(applied) == value(families, "ps_version")
    staleness = [one for line in applied for one in line["staleness"]]
    assert value(families, "ps_staleness_versions_count") == len(staleness)
    assert value(families, "ps_staleness_versions_sum") == sum(staleness)
    for bound in (0, 1, 2, 4, 8):
        at_most = sum(one <= bound for one in staleness)
        assert value(families, "ps_staleness_versions_bucket", le=str(bound)) == at_most, bound


@pytest.mark.parametrize("job", [100000], indirect=True)
def test_a_rank_under_half_the_median_is_slow_and_holds_nobody_up(job: ObservedJob) -> None:
    found = wait_until("it is seen to be slow", lambda: [one for one in job.job()["workers"] if one["slow"]])
    assert [one["rank"] for one in found] == [SLOW_RANK]
    held = metrics(job)["ps_worker_held_up_seconds_total"].samples
    assert set(held.values()) == {0.0}
