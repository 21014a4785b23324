"""A real Prometheus that watches a real job of two servers and three workers, one of them slow."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from exposition import Family, dashboard_queries, documented, parse, selectors_in, value
from observed_job import PROGRAMS, ObservedJob, get, wait_until
from prometheus import Prometheus

SERVERS, WORKERS, SLOW_RANK = 2, 3, 2
VARIABLES = {"__rate_interval": "10s", "instance": ".*", "datasource": ""}
# A metric of calls that were refused has a series once there was one; so it is with each code.
ONLY_WHERE_IT_HAPPENED = ('ps_refused_calls_total{code="RESOURCE_EXHAUSTED"}',)

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
    pytest.mark.skipif(not (PROGRAMS / "ps_server").exists(), reason="the programs are not built"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedJob]:
    folder = tmp_path_factory.mktemp("job")
    patience = ("--lease=120s", "--progress_timeout=300s")  # Tests stop a worker.
    checkpoints = (f"--checkpoint_dir={folder / 'checkpoints'}", "--checkpoint_every=1s")
    pace = ("--experiment_step_time=10ms", f"--experiment_straggler={SLOW_RANK}:3")
    started = ObservedJob(
        folder,
        workers=WORKERS,
        servers=SERVERS,
        server_flags=("--mode=bsp", *patience, *checkpoints),
        worker_flags=("--steps=1000000", "--batch_size=50", "--eval_every=0.5", *pace),
    )
    # One more, which is refused as it is of another job.
    other = started.start_worker(0, "--job=another", f"--metrics_file={folder / 'another.jsonl'}")
    try:
        assert other.wait(30) != 0
        yield started
    finally:
        other.kill()
        started.end()


@pytest.fixture(scope="module")
def prometheus(job: ObservedJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has seen the job train for some seconds, take checkpoints and evaluate."""
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), job.pages)
    try:
        saved = "rate(ps_checkpoint_seconds_count[10s]) > 0"
        wait_until("each server's checkpoints are in a rate", lambda: len(started.query(saved)) == SERVERS)
        wait_until("an evaluation is told", lambda: started.query('ps_accuracy_ratio{split="test"}'))
        wait_until("all workers have told of them", lambda: len(started.query("ps_worker_info")) == WORKERS)
        wait_until("a refusal is told", lambda: started.query("rate(ps_refused_calls_total[10s])"))
        yield started
    finally:
        started.end()


def metrics(job: ObservedJob, shard: int = 0) -> dict[str, Family]:
    return parse(get(job.pages[shard], "/metrics"))


def ready_metrics(job: ObservedJob) -> dict[str, Family]:
    """The chief's, once a checkpoint was taken and an evaluation was made."""

    def found() -> dict[str, Family] | None:
        families = metrics(job)
        told = "ps_accuracy_ratio" in families and "ps_refused_calls_total" in families
        return families if told and value(families, "ps_checkpoint_seconds_count") else None

    ready: dict[str, Family] = wait_until("the job was evaluated and saved", found)
    return ready


@pytest.mark.parametrize("shard", range(SERVERS))
def test_promtool_finds_nothing_wrong_with_the_metrics(job: ObservedJob, shard: int) -> None:
    ready_metrics(job)
    text = get(job.pages[shard], "/metrics")
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), text


def test_metrics_are_those_of_the_table_with_its_types_and_labels(job: ObservedJob, prometheus: Prometheus) -> None:
    assert prometheus.targets()
    families = {name: family for name, family in metrics(job).items() if name.startswith("ps_")}
    stable = {name: family for name, family in families.items() if not name.startswith("ps_debug_")}
    table = documented()
    assert set(stable) == set(table)
    for name, family in stable.items():
        assert family.kind == table[name].kind, name
        if family.samples:
            assert family.labels == table[name].labels, name


def test_only_rank_grows_and_prometheus_own_labels_are_left_alone(job: ObservedJob) -> None:
    for shard in range(SERVERS):
        families = metrics(job, shard)
        used = set().union(*(family.labels for family in families.values()))
        assert not used & {"job", "instance"}
        if shard > 0:
            assert "rank" not in used
        assert all("rank" not in family.labels for family in families.values() if family.kind == "histogram")


def test_both_servers_are_scraped_without_an_error(job: ObservedJob, prometheus: Prometheus) -> None:
    targets = prometheus.targets()
    assert sorted(target["scrapeUrl"] for target in targets) == sorted(f"{page}/metrics" for page in job.pages)
    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * SERVERS


def test_no_query_of_the_dashboard_is_empty(prometheus: Prometheus) -> None:
    queries = dashboard_queries(VARIABLES)
    empty = {name: query for name, query in queries.items() if not prometheus.query(query)}
    assert empty == {}
    for name, query in queries.items():
        for series in prometheus.query(query):
            # A quotient of nothing by nothing is no number: a median of nothing that happened.
            finite = math.isfinite(float(series["value"][1]))
            assert finite or "histogram_quantile" in query, (name, query, series)


def test_no_alert_asks_for_what_there_is_not(prometheus: Prometheus) -> None:
    rules = wait_until("the alerts were evaluated", lambda: all_evaluated(prometheus))
    assert {name: rule.get("lastError", "") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    asked = set().union(*(selectors_in(rule["query"]) for rule in rules.values()))
    # What an alert compares with (that it failed, say) is not so now; that it is told is what counts.
    empty = {one for one in asked - {*ONLY_WHERE_IT_HAPPENED} if not prometheus.query(regular(one))}
    assert empty == set()
    assert "ps_refused_calls_total" in {selector.split("{")[0] for selector in asked}


def all_evaluated(prometheus: Prometheus) -> dict[str, dict[str, Any]] | None:
    rules = prometheus.rules()
    return rules if rules and all(rule["health"] != "unknown" for rule in rules.values()) else None


def regular(selector: str) -> str:
    """The job is in bsp: a selector of other modes is asked for this one's."""
    return selector.replace('mode=~"asp|easgd"', 'mode="bsp"')


def test_no_alert_of_a_job_that_goes_well_calls_for_help(prometheus: Prometheus) -> None:
    fires = prometheus.query('ALERTS{severity="stop",alertstate="firing"}')
    assert fires == []


def test_counters_equal_the_metrics_files_while_a_stopped_worker_holds_all_up(
    job: ObservedJob, prometheus: Prometheus
) -> None:
    held_before = held_up(job)[SLOW_RANK]
    job.stop(SLOW_RANK)
    try:
        progress = wait_until("the job says whom it waits for", lambda: named(job), limit_s=3.0)
        assert progress["waits_for"] == [SLOW_RANK]
        assert f"rank {SLOW_RANK}" in job.job()["headline"]
        wait_until("files and counters agree", lambda: counted(job) == recorded(job) or None)
        assert counted(job) == recorded(job)
        scraped = wait_until("Prometheus has it", lambda: prometheus.query("ps_updates_total == ps_version"))
        updates = {series["metric"]["instance"]: float(series["value"][1]) for series in scraped}
        assert set(updates.values()) == {recorded(job)["server-0 updates"]}, updates
        wait_until("it is charged with it", lambda: held_up(job)[SLOW_RANK] - held_before > 2)
        assert held_up(job)[SLOW_RANK] >= 0.95 * sum(held_up(job).values())
    finally:
        job.go_on(SLOW_RANK)
    version = value(metrics(job), "ps_version")
    wait_until("the job goes on", lambda: value(metrics(job), "ps_version") > version)


def held_up(job: ObservedJob) -> dict[int, float]:
    """For how long others have waited for each rank, in seconds."""
    samples = metrics(job)["ps_worker_held_up_seconds_total"].samples
    return {int(dict(labels)["rank"]): seconds for (_, labels), seconds in samples.items()}


def named(job: ObservedJob) -> dict[str, Any] | None:
    """The job's progress, once it waits for somebody who is long enough away to be no mere straggler."""
    progress: dict[str, Any] = job.job()["progress"]
    return progress if progress["waits_s"] > 0.5 else None


def counted(job: ObservedJob) -> dict[str, float]:
    """What the servers' metrics have, of what metrics files have as well."""
    found: dict[str, float] = {}
    for shard in range(SERVERS):
        families = metrics(job, shard)
        found |= {
            f"server-{shard} updates": value(families, "ps_updates_total"),
            f"server-{shard} version": value(families, "ps_version"),
            f"server-{shard} pushes": value(families, "ps_pushes_total", answer="applied"),
            f"server-{shard} samples": value(families, "ps_samples_total", outcome="applied"),
            f"server-{shard} timed": value(families, "ps_apply_seconds_count"),
            f"server-{shard} staleness": value(families, "ps_staleness_versions_count"),
            f"server-{shard} staleness sum": value(families, "ps_staleness_versions_sum"),
        }
    for rank in set(range(WORKERS)) - {SLOW_RANK}:
        found[f"worker-{rank} steps"] = value(metrics(job), "ps_worker_steps_total", rank=str(rank))
        found[f"worker-{rank} samples"] = value(metrics(job), "ps_worker_samples_total", rank=str(rank))
    return found


def recorded(job: ObservedJob) -> dict[str, float]:
    """The same from the metrics files."""
    found: dict[str, float] = {}
    for shard in range(SERVERS):
        versions = [event for event in job.metrics_file(f"server-{shard}") if event["event"] == "apply"]
        pushes = sum(len(event["samples"]) for event in versions)
        found |= {
            f"server-{shard} updates": len(versions),
            f"server-{shard} version": versions[-1]["version"],
            f"server-{shard} pushes": pushes,
            f"server-{shard} samples": sum(sum(event["samples"]) for event in versions),
            f"server-{shard} timed": len(versions),
            f"server-{shard} staleness": pushes,
            f"server-{shard} staleness sum": sum(sum(event["staleness"]) for event in versions),
        }
    for rank in set(range(WORKERS)) - {SLOW_RANK}:
        steps = [event for event in job.metrics_file(f"worker-{rank}") if event["event"] == "step"]
        found[f"worker-{rank} steps"] = len(steps)
        found[f"worker-{rank} samples"] = sum(event["samples"] for event in steps)
    return found
