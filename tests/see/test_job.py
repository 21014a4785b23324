"""The page of a real job in a browser: what servers say is what is shown."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, axe_violations, needs_browser
from observed_job import ObservedJob

pytestmark = needs_browser

DRAWN = "document.querySelector('#loss .chart canvas')?.offsetHeight > 0"
NAMED_WITHIN_S = 3.0
SLACK_S = 2.0  # Of a busy machine, and of the browser's own look once a second.


@pytest.fixture
def real_job(tmp_path: Path) -> Iterator[ObservedJob]:
    """Three workers on two servers, who train for longer than any test."""
    flags = ("--epochs=100000", "--batch_size=20", "--eval_every=2")
    # So that a worker that a test stops is waited for, and not lost.
    made = ObservedJob(tmp_path, workers=3, servers=2, server_flags=("--lease=60s",), worker_flags=flags)
    yield made
    made.end()


def open_page(browser: Browser, url: str) -> None:
    """As at a desk, by day."""
    browser.resize(1280, 1600)
    browser.scheme("light")
    browser.open(f"{url}/")


def test_a_real_job_is_shown_as_it_goes_on(browser: Browser, real_job: ObservedJob) -> None:
    open_page(browser, real_job.pages[0])
    browser.wait(DRAWN)
    browser.wait("document.querySelectorAll('#workers tbody tr').length === 3")
    browser.wait("Chart.getChart(document.querySelector('#loss .chart canvas')).data.datasets.at(-1).data.length >= 5")
    browser.wait("document.querySelector('#accuracy .chart canvas').offsetHeight > 0")
    browser.wait("document.querySelector('#phases .chart canvas').offsetHeight > 0")
    browser.wait("document.querySelector('#staleness .chart canvas').offsetHeight > 0")
    assert browser.text("#state").split() == ["●", "running"]
    assert "2 servers" in browser.text("#job-facts")
    assert len(browser.run("return [...document.querySelectorAll('#servers tbody tr')]")) == 2
    step = browser.run("return document.querySelector('#headline').innerText")
    browser.wait("document.querySelector('#headline').innerText !== arguments[0]", step)
    for word in ("NaN", "undefined", "[object"):
        assert word not in browser.text("body")
    assert axe_violations(browser) == []
    assert browser.console() == []
    browser.screenshot("job")


def test_a_stopped_worker_is_named_within_seconds(browser: Browser, real_job: ObservedJob) -> None:
    open_page(browser, real_job.pages[0])
    browser.wait(DRAWN)
    browser.wait("document.querySelectorAll('#workers tbody tr').length === 3")
    begin = time.monotonic()
    real_job.stop(1)
    try:
        browser.wait("document.querySelector('#headline-rest').innerText.includes('rank 1')")
        took = time.monotonic() - begin
        print(f"\nthe page named the stopped worker after {took:.1f} s")
        assert took < NAMED_WITHIN_S + SLACK_S
        assert "waited for" in browser.text("#workers tbody tr")
        browser.wait("document.body.dataset.state === 'stuck'")
        assert "rank 1" in browser.text("#announcement")
        browser.screenshot("job-stuck")
    finally:
        real_job.go_on(1)
    browser.wait("document.body.dataset.state === 'running'")
    assert "stuck" in browser.text("#events")
    assert browser.console() == []


def test_another_server_shows_its_part_and_where_the_rest_is(browser: Browser, real_job: ObservedJob) -> None:
    open_page(browser, real_job.pages[1])
    browser.wait("document.querySelectorAll('#servers tbody tr').length === 1")
    browser.wait("document.querySelector('#headline').innerText.includes('server 0')")
    assert browser.run("return document.querySelector('#curves').offsetHeight") == 0
    for word in ("NaN", "undefined", "[object"):
        assert word not in browser.text("body")
    assert axe_violations(browser) == []
    assert browser.console() == []
    browser.screenshot("job-part")


def test_after_the_chief_died_all_stays(browser: Browser, real_job: ObservedJob) -> None:
    open_page(browser, real_job.pages[0])
    browser.wait(DRAWN)
    os.kill(real_job.servers[0].pid, signal.SIGKILL)
    browser.wait("!document.querySelector('#gone').hidden")
    assert "no connection" in browser.text("#gone")
    assert browser.run(f"return {DRAWN}")
    assert "step" in browser.text("#headline").lower()


def test_the_end_of_a_job_is_seen_before_its_servers_go(browser: Browser, tmp_path: Path) -> None:
    # Slow enough for a browser to open its page in the meantime.
    flags = ("--steps=800", "--batch_size=20", "--experiment_step_time=10ms")
    job = ObservedJob(tmp_path, workers=2, worker_flags=flags)
    try:
        open_page(browser, job.pages[0])
        browser.wait("document.querySelectorAll('#workers tbody tr').length === 2")
        browser.wait("document.body.dataset.state === 'finished'")
        browser.wait("!document.querySelector('#gone').hidden")
        assert "The job has ended" in browser.text("#gone")
        assert browser.text("#state").split() == ["✓", "finished"]
        assert "finished at step" in browser.text("#headline").lower()
        assert browser.run("return document.querySelectorAll('#workers tbody tr').length") == 2
        assert job.servers[0].wait(10) == 0
        browser.screenshot("job-finished")
    finally:
        job.end()
