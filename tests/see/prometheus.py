"""A Prometheus with the project's own configuration, which scrapes a job of the test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exposition import OBSERVABILITY
from observed_job import wait_until

START_LIMIT_S = 60.0
INTERVAL = "500ms"


class Prometheus:
    """It runs until end()."""

    def __init__(self, folder: Path, pages: Sequence[str]) -> None:
        """folder: for its data and configuration. pages: the servers' addresses, as they print them."""
        shutil.copy(OBSERVABILITY / "alerts.yml", folder)
        configuration = (OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8")
        (folder / "prometheus.yml").write_text(re.sub(r"(_interval): \S+", rf"\1: {INTERVAL}", configuration))
        targets = [page.removeprefix("http://") for page in pages]
        (folder / "targets.yml").write_text(json.dumps([{"targets": targets}]))
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        self._log = folder / "prometheus.log"
        with open(self._log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(command, stderr=log)
        try:
            self.address: str = wait_until("Prometheus listens", self._address, START_LIMIT_S)
        except BaseException:
            self.end()
            raise

    def query(self, query: str) -> list[dict[str, Any]]:
        """The series that it gives now, each with `metric` (its labels) and `value` (a time and a text)."""
        found: list[dict[str, Any]] = self._get("query", query=query)["result"]
        return found

    def rules(self) -> dict[str, dict[str, Any]]:
        """The alerts by name, with the query of each and how its last evaluation went."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes, and how that goes."""
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def end(self) -> None:
        """Kills it: its data are the test's."""
        self._process.kill()
        self._process.wait(START_LIMIT_S)

    def _get(self, what: str, **parameters: str) -> Any:
        address = f"{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=START_LIMIT_S) as answer:
            return json.loads(answer.read())["data"]

    def _address(self) -> str | None:
        """Its log has it, and says when it takes requests."""
        text = self._log.read_text(encoding="utf-8")
        assert self._process.poll() is None, f"Prometheus has ended:\n{text}"
        found = re.search(r'msg="Listening on" address=(\S+)', text)
        ready = "Server is ready to receive web requests" in text
        return f"http://{found[1]}" if found and ready else None
