"""deploy/observability without a job: Prometheus and Grafana take its files, which ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from exposition import DASHBOARD, OBSERVABILITY, dashboard_queries, documented, families_in, panels, parse

ALERTS = (OBSERVABILITY / "alerts.yml").read_text(encoding="utf-8")
VARIABLES = {"__rate_interval": "20s", "instance": ".*"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@needs_promtool
@pytest.mark.parametrize(
    "command", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids=lambda words: words[1]
)
def test_promtool_finds_nothing_wrong(command: tuple[str, ...]) -> None:
    ran = subprocess.run(["promtool", *command], cwd=OBSERVABILITY, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_case_in_which_it_speaks() -> None:
    cases = (OBSERVABILITY / "alerts_test.yml").read_text(encoding="utf-8")
    speaks = set(
        re.findall(r"^      - alertname: (\w+)\n        eval_time: \w+\n        exp_alerts:\n", cases, re.MULTILINE)
    )
    assert speaks == set(re.findall(r"- alert: (\w+)", ALERTS))


def test_every_alert_is_silent_in_some_case() -> None:
    cases = (OBSERVABILITY / "alerts_test.yml").read_text(encoding="utf-8")
    silent = set(re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\]", cases))
    assert silent == set(re.findall(r"- alert: (\w+)", ALERTS))


def test_alerts_and_dashboard_ask_only_for_documented_metrics() -> None:
    known = set(documented())
    asked = {f"dashboard: {name}": query for name, query in dashboard_queries(VARIABLES).items()}
    asked |= {f"alerts, line {number}": line for number, line in enumerate(ALERTS.splitlines(), 1) if "#" not in line}
    unknown = {where: families_in(query) - known for where, query in asked.items() if families_in(query) - known}
    assert unknown == {}


def test_the_dashboard_shows_all_metrics_but_those_that_have_no_picture() -> None:
    shown = set().union(*map(families_in, dashboard_queries(VARIABLES).values()))
    assert set(documented()) - shown == {"ps_build_info", "ps_job_info"}


def test_panels_have_identities_of_their_own_and_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels(dashboard):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_names_that_only_look_like_metrics_are_none() -> None:
    assert families_in('rate(ps_push_seconds_bucket{call="ps_nothing"}[5m]) / ps_version # ps_ctl') == {
        "ps_push_seconds",
        "ps_version",
    }


def test_the_text_format_is_read_with_quotes_and_numbers_that_are_none() -> None:
    text = '# HELP a_total Of a.\n# TYPE a_total counter\na_total{x="1,\\"}",y="<b>"} 3\na_total NaN\n'
    family = parse(text + '# TYPE b histogram\nb_bucket{le="+Inf"} 2\nb_sum 1.5\nb_count 2\n')
    assert family["a_total"].samples["a_total", (("x", '1,\\"}'), ("y", "<b>"))] == 3
    assert family["b"].labels == set()
    with pytest.raises(AssertionError, match="has no type"):
        parse("c_total 1\n")
