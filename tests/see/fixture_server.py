"""Serves the page with a made-up job, with the headers of the real server: `python3 -B tests/see/fixture_server.py`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fixture_job import FixtureJob, FixtureSeries

PAGE = Path(__file__).resolve().parents[2] / "common" / "http" / "page"
CHART_JS = Path("/usr/share/javascript/chart.js/chart.min.js")
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class FixtureServer:
    """Answers for `job` at a port of its own, until it is closed. `paths` has what was asked for."""

    def __init__(self, job: FixtureJob, port: int = 0) -> None:
        self.job = job
        self.paths: list[str] = []
        self.status = 200
        self.connections: set[socket.socket] = set()
        fixture = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fixture.connections.add(self.connection)

            def finish(self) -> None:
                fixture.connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def do_GET(self) -> None:
                fixture.paths.append(self.path)
                status, kind, body = fixture.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A browser that goes away in the middle of an answer is no error."""

        self.http = Listener(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """The status, content type and body of a path."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path.startswith("/api/"):
            if self.status != 200:
                return self.status, "text/plain", b"the job goes back to a checkpoint\n"
            answers = {"/api/v1/job": self.job.job, "/api/v1/series": self.series, "/api/v1/events": self.events}
            make = answers.get(parts.path)
            if make is None:
                return 404, "text/plain", b"there is no such path\n"
            body = make() if make == self.job.job else make(query)  # type: ignore[call-arg]
            return 200, "application/json", json.dumps(body).encode()
        name = parts.path.lstrip("/") or "index.html"
        file = CHART_JS if name == "chart.js" else PAGE / name
        if "/" in name or not file.is_file():
            return 404, "text/plain", b"there is no such path\n"
        return 200, TYPES.get(file.suffix, "text/plain"), file.read_bytes()

    def series(self, query: dict[str, str]) -> dict[str, object]:
        """As of /api/v1/series: of the job since a cursor, or of an earlier run."""
        cursors: dict[str, list[int]] = {}
        if query.get("since"):
            cursors = json.loads(query["since"])
        all_series: dict[str, FixtureSeries] = self.job.runs[query["run"]] if "run" in query else self.job.series
        news = {}
        for name, series in list(all_series.items()):
            cursor = cursors.get(name)
            news[name] = series.since((cursor[0], cursor[1]) if cursor else None)
        cursor_text = json.dumps({name: [len(each.points), each.merges] for name, each in all_series.items()})
        return {"cursor": cursor_text, "series": news}

    def events(self, query: dict[str, str]) -> dict[str, object]:
        """As of /api/v1/events: those from a number on."""
        since = int(query.get("since", "0"))
        events = list(self.job.events)
        return {"next": len(events) + 1, "events": [each for each in events if each["number"] >= since]}

    def close(self) -> None:
        """The server goes: nothing answers at its port any more."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """A job that runs in real time, with a straggler after a minute."""
    job = FixtureJob()
    for _ in range(120):
        job.tick()
    earlier = FixtureJob(seed=2)
    for _ in range(200):
        earlier.tick()
    job.runs["before"] = earlier.series
    job.straggler = 3
    server = FixtureServer(job)
    print(f"page at {server.url}", flush=True)
    while True:
        time.sleep(1)
        job.tick()


if __name__ == "__main__":
    main()
