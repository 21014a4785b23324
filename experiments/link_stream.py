"""What a plain TCP connection carries between two hosts: the yardstick for whatever else crosses their links."""

from __future__ import annotations

import sys

from process import Child, end_all, wait_until

from .hosts import Hosts
from .job import GRACE_S, last_line
from .lab import ExperimentFailed, Lab

_PORT = 7000
_WARM_UP_S = 0.3
_LIMIT_S = 60.0

_RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
listener.settimeout(30)
connection = listener.accept()[0]
buffer, count, began, last = bytearray(1 << 20), 0, None, 0.0
first = time.monotonic()
while received := connection.recv_into(buffer):
    last = time.monotonic()
    if began is not None:
        count += received
    elif last - first >= float(sys.argv[3]):
        began = last
print(count / (last - began))
"""

_SEND = """
import socket, sys, time
connection, deadline = None, time.monotonic() + 20
while connection is None:
    try:
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
    except ConnectionRefusedError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.05)
stop, piece = time.monotonic() + float(sys.argv[3]), bytes(1 << 16)
while time.monotonic() < stop:
    connection.sendall(piece)
"""


def stream_bytes_per_s(lab: Lab, hosts: Hosts, seconds: float) -> float:
    """From host 0 to host 1, one way, for so many seconds. ExperimentFailed if it cannot be measured."""
    folder = lab.folder / f"stream-{hosts.mbit_per_s}"
    folder.mkdir(parents=True, exist_ok=True)
    to = [hosts.address(1), str(_PORT)]
    both = [
        Child("receiver", [*hosts.on(1), sys.executable, "-c", _RECEIVE, *to, str(_WARM_UP_S)], folder),
        Child("sender", [*hosts.on(0), sys.executable, "-c", _SEND, *to, str(_WARM_UP_S + seconds)], folder),
    ]
    try:
        wait_until(lambda: not both[0].running, _LIMIT_S + seconds, lambda: lab.stop.requested)
    finally:
        end_all(both, GRACE_S, lambda: lab.stop.hurry)
    if lab.stop.requested:
        raise KeyboardInterrupt
    try:
        return float(both[0].out.read_text())
    except ValueError:
        raise ExperimentFailed(f"a TCP stream between hosts: {last_line(both[0].log) or both[0].ending()}") from None
