"""Who is started again and who is to blame, with processes that end as a test says."""

from __future__ import annotations

import re
import time
from typing import Any

from psgrad import _supervisor
from psgrad._supervisor import Ending, Supervisor


class Doubles:
    """A supervisor whose processes end as a test says."""

    class Process(_supervisor.Process):
        def look(self) -> None: ...
        def signal(self, number: int) -> None: ...
        def release(self) -> None: ...

    def __init__(self, servers: int, *, servers_stay: bool = False) -> None:
        self.output = b""
        self.fd, self.full = None, False
        self.supervisor = Supervisor(self, 2, servers_stay=servers_stay)
        self.supervisor.servers = [self.Process(f"server {n}", 0) for n in range(servers)]  # type: ignore[misc]
        self.start("worker 0")
        self.start("worker 1")
        self.supervisor._start_worker = lambda life: self.start(f"worker {life.rank}", life)  # type: ignore[method-assign]

    def put(self, fd: int, data: bytes) -> None:
        self.output += data

    def write(self) -> None: ...

    def start(self, name: str, life: Any = None) -> None:
        worker = self.Process(name, 0)
        self.supervisor.workers.append(worker)
        self.supervisor._lives[worker] = life or _supervisor._Life(int(name[-1]), [], {}, time.monotonic())

    def end(self, name: str, status: int) -> None:
        for process in self.supervisor.processes:
            if process.name == name:
                process.ending = Ending(status=status)
        self.supervisor._replace_failed()

    def start_again(self) -> None:
        for life in self.supervisor._lives.values():
            life.next_at = 0.0 if life.next_at is not None else None
        self.supervisor._replace_failed()

    @property
    def to_blame(self) -> str | None:
        failed = self.supervisor._failed()
        return failed.name if failed else None


def test_who_fails_after_the_jobs_end_is_a_failure_and_who_waits_to_be_started_again_is_none() -> None:
    doubles = Doubles(servers=2)
    doubles.end("worker 1", 3)
    assert doubles.to_blame is None
    doubles.end("server 0", 0)
    assert doubles.to_blame is None  # The other one is about to end, too.
    doubles.start_again()
    assert len(doubles.supervisor.workers) == 2
    doubles.end("worker 0", 0)
    doubles.end("server 1", 0)
    assert doubles.to_blame is None
    assert b"worker 1 ended with status 3; it is not started again: the job has ended well" in doubles.output

    doubles = Doubles(servers=1)
    doubles.end("server 0", 0)
    for name in ("worker 0", "worker 1"):  # Their scripts went on, and failed: a model that could not be saved.
        doubles.end(name, 3)
        assert doubles.to_blame == "worker 0"

    doubles = Doubles(servers=1)
    doubles.end("worker 1", 3)
    doubles.end("server 0", 1)
    assert doubles.to_blame == "server 0"


def test_whoever_was_started_again_and_came_too_late_is_no_failure() -> None:
    for servers, stay in ((1, False), (1, True), (0, True)):
        doubles = Doubles(servers=servers, servers_stay=stay)
        doubles.end("worker 1", 3)
        doubles.start_again()
        doubles.end("worker 0", 0)
        if servers and not stay:
            doubles.end("server 0", 0)
        doubles.end("worker 1", 1)
        assert doubles.to_blame is None
        ended = b"others have ended well" if stay else b"the job has ended well without it"
        assert b"worker 1 ended with status 1; it is not started again: " + ended in doubles.output
        assert doubles.output.count(b"it is started again") == 1


def test_whoever_comes_too_late_is_no_failure_while_others_still_end_even_the_last_time() -> None:
    doubles = Doubles(servers=1)
    for _ in range(2):  # As often as it may be.
        doubles.end("worker 1", 3)
        doubles.start_again()
    doubles.end("server 0", 0)
    doubles.end("worker 1", 1)
    for _ in range(5):
        doubles.supervisor._replace_failed()
        assert doubles.to_blame is None  # Worker 0 saves what it has.
    doubles.end("worker 0", 0)
    assert doubles.to_blame is None

    doubles.end("worker 0", 4)  # But if it cannot, nobody has ended well.
    assert doubles.to_blame == "worker 0"


def test_a_worker_that_fails_after_a_long_life_is_a_failure_although_it_was_started_again_once() -> None:
    doubles = Doubles(servers=1)
    doubles.end("worker 1", 3)
    doubles.start_again()
    (life,) = (life for life in doubles.supervisor._lives.values() if life.is_restart)
    life.began -= 3600
    doubles.end("server 0", 0)
    doubles.end("worker 0", 0)
    doubles.end("worker 1", 1)
    assert doubles.to_blame == "worker 1"


def test_a_drained_worker_is_not_the_jobs_end_for_one_that_is_killed_later() -> None:
    doubles = Doubles(servers=0, servers_stay=True)
    doubles.end("worker 0", 0)
    doubles.end("worker 1", 3)
    assert b"it is started again in 1 s" in doubles.output
    doubles.start_again()
    assert [worker.running for worker in doubles.supervisor.workers] == [False, True]


def test_servers_that_stayed_and_then_end_leave_nobody_to_wait_for() -> None:
    doubles = Doubles(servers=1, servers_stay=True)
    doubles.end("worker 0", 3)
    doubles.end("worker 1", 3)
    assert doubles.to_blame is None
    doubles.end("server 0", 0)
    assert doubles.to_blame == "worker 0"


def test_the_pauses_before_a_start_grow_and_end_growing() -> None:
    doubles = Doubles(servers=1)
    doubles.supervisor._max_restarts = 100
    for _ in range(9):
        doubles.end("worker 1", 3)
        doubles.start_again()
    assert [int(pause) for pause in re.findall(rb"again in (\d+) s", doubles.output)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        60,
        60,
        60,
    ]
