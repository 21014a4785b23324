"""Fixtures of the tests of psgrad.torch; a plugin, which these name in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_client import FakeClient
from torch_support import REAL_CLIENT, Jobs, ps_server, psgrad


@pytest.fixture(params=["fake", "real"])
def jobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs on the fake and on real servers."""
    real = request.param == "real"
    if real and ps_server() is None:
        pytest.skip("psgrad._core or ps_server has not been built")
    yield from _jobs(real, monkeypatch)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs on the fake alone: for what a test does to the server, or looks up in it."""
    yield from _jobs(False, monkeypatch)


@pytest.fixture
def reals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs on real servers alone: for what the fake does not do."""
    if ps_server() is None:
        pytest.skip("psgrad._core or ps_server has not been built")
    yield from _jobs(True, monkeypatch)


def _jobs(real: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    for name in ("RANK", "PS_RANK", "PS_SERVER", "PS_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(psgrad, "Client", REAL_CLIENT if real else FakeClient)
    made = Jobs(real)
    yield made
    for worker in psgrad.torch.optimizer.life.live():
        worker.leave("the test has ended")
    made.end()
