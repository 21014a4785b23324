"""What the page's modules without a page come to: words for numbers, and series that merge."""

from __future__ import annotations

from typing import Any

import pytest

from browser import Browser, needs_browser
from fixture_server import FixtureServer

pytestmark = needs_browser


@pytest.fixture
def call(browser: Browser, server: FixtureServer) -> Any:
    """Calls a module's function in the browser."""
    browser.open(f"{server.url}words.js")

    def of(module: str, expression: str) -> Any:
        answer = browser.driver.execute_async_script(
            f"""const done = arguments[0];
            import('{server.url}{module}').then((m) => done({{value: {expression}}}))
              .catch((e) => done({{error: String(e)}}))"""
        )
        assert "error" not in answer, answer
        return answer["value"]

    return of


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("duration(0)", "0 s"),
        ("duration(0.00008)", "80 µs"),
        ("duration(0.0999)", "0.1 s"),
        ("duration(0.4)", "0.4 s"),
        ("duration(9.96)", "10 s"),
        ("duration(119.6)", "2 min"),
        ("duration(7500)", "2 h 5 min"),
        ("duration(273600)", "3 d 4 h"),
        ("duration('NaN')", "\u2013"),
        ("duration(null)", "\u2013"),
        ("figure('-Infinity')", "-∞"),
        ("figure(0.041234)", "0.0412"),
        ("figure(1041.4)", "1,041"),
        ("figure(2.1e-7)", "2.1e-7"),
        ("figure(null)", "\u2013"),
        ("short(1234567)", "1.23M"),
        ("bytes(0)", "0 B"),
        ("bytes(1024 ** 3)", "1 GiB"),
        ("percent(0.9312)", "93.1 %"),
        ("percent(0.0004)", "< 0.1 %"),
        ("percent(0)", "0 %"),
        ("stopwatch(3725)", "1:02:05"),
        ("ranks([3])", "rank 3"),
        ("ranks([1, 3])", "ranks 1 and 3"),
        ("ranks([0, 1, 2, 3, 4, 5, 6])", "ranks 0, 1 and 5 more"),
    ],
)
def test_numbers_in_words(call: Any, expression: str, words: str) -> None:
    assert call("words.js", f"m.{expression}") == words


def test_a_quantile_lies_in_the_range_where_so_many_are(call: Any) -> None:
    assert call("words.js", "m.quantile([0, 10, 0, 0], [1, 2, 5], 0.5)") == 1.5
    assert call("words.js", "m.quantile([0, 0, 0, 7], [1, 2, 5], 0.5)") == 5
    assert call("words.js", "m.quantile([0, 0, 0, 0], [1, 2, 5], 0.5)") is None


def test_the_first_new_point_takes_the_place_of_the_last_one_of_its_time(call: Any) -> None:
    steps = """(() => {
      const s = new m.Series();
      s.take({reset: true, points: [[0, 1, 1, 1, 2, 3], [1, 2, 2, 1, 2, 3]]});
      s.take({reset: false, points: [[1, 3, 3, 0, 5, 9], [2, 4, 4, 1, 'NaN', 3]]});
      return [s.points.map(p => [p.t, p.steps, p.largest]), s.lastNotFinite.t, s.take({reset: false, points: []})];
    })()"""
    assert call("series.js", steps) == [[[0, 1, 3], [1, 3, 9], [2, 4, 3]], 2, False]


def test_merged_rows_keep_the_least_and_the_largest(call: Any) -> None:
    rows = """(() => {
      const s = new m.Series();
      s.take({reset: true, points: Array.from({length: 1000}, (_, i) =>
        [i, i, i, i === 500 ? -7 : 0, 1, i === 501 ? 99 : 2])});
      const rows = m.merged(s.points, 100);
      const [least, largest] = [Math.min(...rows.map(r => r.least)), Math.max(...rows.map(r => r.largest))];
      return [rows.length, least, largest, rows[99].t, rows[0].points];
    })()"""
    assert call("series.js", rows) == [100, -7, 99, 999, 10]
