"""A browser for all tests, and a made-up job behind the page for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixture_job import FixtureJob
from fixture_server import FixtureServer


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One for all tests of a process: starting it takes seconds."""
    from browser import Browser

    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def job() -> FixtureJob:
    """Two minutes old."""
    made = FixtureJob()
    for _ in range(120):
        made.tick()
    return made


@pytest.fixture
def server(job: FixtureJob) -> Iterator[FixtureServer]:
    """Serves `job`."""
    made = FixtureServer(job)
    yield made
    made.close()
