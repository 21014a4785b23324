"""Hosts on one machine: network namespaces on a switch, each with a link of a given rate in both directions; and MPI's
ranks and plain TCP streams on them.

A host's processes share this machine's processors with those of all others; only their links are their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.lab import ExperimentFailed, Lab, Skipped, run_program, run_programs

INTERFACE = "eth0"  # A host's, to the switch.
SUBNET = "10.88.0"  # The switch is in a namespace of its own, so that all laboratories may use the same addresses.
SUBNET_RANGE = f"{SUBNET}.0/24"
_LABORATORIES_MAX = 64  # At a time on a machine.
_HOSTS_MAX = 64
_COMMAND_LIMIT_S = 30
_END_S = 2.0  # For what still runs on a host to end, before SIGKILL.

# A burst holds a packet of the largest size (64 KB; its segmentation is left to the card, as on a real one), and what a
# timer that is late must not lose.
_BURST_BYTES_MIN = 72 << 10
_BURST_S = 0.001
_QUEUE_BYTES = 16 << 20  # Longer than TCP's windows: nothing is lost.


def check_available() -> None:
    """Skipped, with what is missing for hosts of this kind."""
    if os.geteuid() != 0:
        raise Skipped("network namespaces need root")
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise Skipped(f"{' and '.join(missing)} not found (Debian's package iproute2)")


class Hosts:
    """Hosts 0 to count - 1, from `with` on until its end, which ends what runs on them.

    `with` raises Skipped where this machine has, or allows, none; what fails later is ExperimentFailed.
    """

    def __init__(self, count: int, mbit_per_s: int | None) -> None:
        """Without a rate links are as fast as the processors."""
        if not 1 <= count <= _HOSTS_MAX:
            raise ValueError(f"1 to {_HOSTS_MAX} hosts, not {count}")
        self.count = count
        self.mbit_per_s = mbit_per_s
        self._lock: socket.socket | None = None
        self._prefix = ""  # All names of this laboratory begin so.

    def description(self) -> dict[str, Any]:
        """What decides, besides the programs and flags, what comes of a job on these hosts: their links."""
        if self.mbit_per_s is None:
            return {"mbit_per_s": None}
        burst = burst_bytes(self.mbit_per_s)
        return {"mbit_per_s": self.mbit_per_s, "burst_bytes": burst, "queue_bytes": _QUEUE_BYTES}

    def listen(self, host: int) -> list[str]:
        """A server's flags, to be reached from other hosts."""
        return [f"--listen={self.address(host)}:5000", "--insecure"]

    def on(self, host: int) -> list[str]:
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self.name(host)]

    def name(self, host: int) -> str:
        return f"{self._prefix}-h{host}"

    @staticmethod
    def address(host: int) -> str:
        """Its IPv4 address, for the other hosts."""
        return f"{SUBNET}.{host + 1}"

    def carried(self) -> pd.DataFrame:
        """Bytes that each host's link has `sent` and `received`, since the beginning, with all headers but Ethernet's
        preamble and checksum. Links without a rate have no counter of their own: zeros.
        """
        if self.mbit_per_s is None:
            return pd.DataFrame(0, range(self.count), ["sent", "received"])
        ports = _sent(self._switch)
        rows = [(_sent(self.name(host))[INTERFACE], ports[f"p{host}"]) for host in range(self.count)]
        return pd.DataFrame(rows, columns=["sent", "received"])

    def __enter__(self) -> Hosts:
        check_available()
        self._claim()
        try:
            self._make()
        except BaseException as error:
            self._remove()
            if isinstance(error, ExperimentFailed):
                raise Skipped(f"this machine has no such hosts: {error}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _claim(self) -> None:
        """Takes the first prefix that nobody uses, and removes what a killed process has left under it.

        Names are the same each time, so that a job that is run again is known by its command line.
        """
        for number in range(_LABORATORIES_MAX):
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # One process at a time has it, and it is gone when that ends.
                lock.bind(f"\0ps-experiments-hosts-{number}")
            except OSError:
                lock.close()
                continue
            self._lock, self._prefix = lock, f"psx{number}"
            _remove_namespaces(self._prefix)
            return
        raise Skipped(f"{_LABORATORIES_MAX} laboratories of hosts are in use")

    def _make(self) -> None:
        switch = self._switch
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add br0 type bridge")
        _run(f"ip -n {switch} link set br0 up")
        for host in range(self.count):
            name, port, address = self.name(host), f"p{host}", self.address(host)
            _run(f"ip netns add {name}")
            _run(f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip -n {switch} link set {port} master br0 up")
            _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {INTERFACE} up")
            # Said in the route, since a kernel may not let a namespace set it. BBR's speed scatters on such links.
            route = f"route replace {SUBNET_RANGE} dev {INTERFACE} proto kernel scope link src {address} congctl cubic"
            _run(f"ip -n {name} {route}")
            if self.mbit_per_s is not None:  # What a device sends is limited: the host's, and the switch's to it.
                shape = f"rate {self.mbit_per_s}mbit burst {burst_bytes(self.mbit_per_s)} limit {_QUEUE_BYTES}"
                _run(f"tc -n {name} qdisc add dev {INTERFACE} root tbf {shape}")
                _run(f"tc -n {switch} qdisc add dev {port} root tbf {shape}")

    def _remove(self) -> None:
        if self._lock is None:
            return
        _remove_namespaces(self._prefix)
        self._lock.close()
        self._lock = None


def burst_bytes(mbit_per_s: int) -> int:
    """What a link lets pass at once after a pause."""
    return max(int(mbit_per_s * 1e6 / 8 * _BURST_S), _BURST_BYTES_MIN)


def _sent(namespace: str) -> dict[str, int]:
    """Bytes, by device, of those that have a rate."""
    said = json.loads(_run(f"tc -n {namespace} -s -j qdisc show"))
    return {each["dev"]: int(each["bytes"]) for each in said if each["kind"] == "tbf"}


def _remove_namespaces(prefix: str) -> None:
    """All whose names begin so, with what runs there."""
    with contextlib.suppress(ExperimentFailed):
        listed = re.findall(rf"^({re.escape(prefix)}-\S+)", _run("ip netns list"), re.MULTILINE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = [pid for name in listed for pid in _pids(name)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + _END_S
            while pids and time.monotonic() < deadline and any(map(_pids, listed)):
                time.sleep(0.05)
        for name in listed:
            _run(f"ip netns delete {name}")


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run(f"ip netns pids {namespace}").split()]


def _run(command: str) -> str:
    """Its output. ExperimentFailed, with what it said, if it fails."""
    limits = {"timeout": _COMMAND_LIMIT_S, "check": False, "start_new_session": True}
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, **limits)
    except (OSError, subprocess.SubprocessError) as error:
        raise ExperimentFailed(f"{command}: {error}") from None
    if done.returncode != 0:
        raise ExperimentFailed(f"{command}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


# ---- What a plain TCP connection carries between two hosts: the yardstick for whatever else crosses their links

_PORT = 7000
_WARM_UP_S = 0.3
_STREAM_LIMIT_S = 60.0

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
    to, python = [hosts.address(1), str(_PORT)], sys.executable
    both = {
        "receiver": [*hosts.on(1), python, "-c", _RECEIVE, *to, str(_WARM_UP_S)],
        "sender": [*hosts.on(0), python, "-c", _SEND, *to, str(_WARM_UP_S + seconds)],
    }
    receiver, _ = run_programs(lab, lab.folder / f"stream-{hosts.mbit_per_s}", both, _STREAM_LIMIT_S + seconds)
    try:
        return float(receiver.out.read_text())
    except ValueError:
        raise ExperimentFailed(f"a TCP stream between hosts: {receiver.ending()} without a rate") from None


# ---- MPI ranks, one on each of several hosts

MPI_PROGRAM = "ps_bench_mpi"
# What Open MPI's own choice is compared with: the sum that goes round in a ring.
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")


def why_no_mpi(lab: Lab) -> str:
    """What it is; empty if ranks can be started."""
    if shutil.which("mpirun") is None:
        return "not installed"
    return "" if (lab.bin / MPI_PROGRAM).exists() else "not built"


def run_ranks(
    lab: Lab, hosts: Hosts, ranks: int, folder: Path, arguments: Sequence[str], options: Sequence[str] = ()
) -> str:
    """What the program with these arguments printed, on hosts 0 to ranks - 1. `options` are mpirun's.

    ExperimentFailed if it fails; KeyboardInterrupt if a signal asked to stop.
    """
    # For sockets, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="psx-mpi-") as scratch:
        agent = Path(scratch) / "agent"
        agent.write_text(_agent(hosts, ranks))
        agent.chmod(0o755)
        command = [
            *_named(hosts, 0),
            *("mpirun", "--allow-run-as-root", "--bind-to", "none"),
            *("--host", ",".join(hosts.address(rank) for rank in range(ranks))),
            *("--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(agent)),
            *("--mca", "orte_leave_session_attached", "1", "--mca", "orte_tmpdir_base", scratch),
            *("--mca", "oob_tcp_if_include", SUBNET_RANGE, "--mca", "btl_tcp_if_include", SUBNET_RANGE),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
            *("--mca", "mpi_yield_when_idle", "1"),  # There may be more ranks than processors.
            *options,
            *(str(lab.bin / MPI_PROGRAM), *arguments),
        ]
        return run_program(lab, "mpirun", command, folder).out.read_text()


def _named(hosts: Hosts, host: int) -> list[str]:
    """What a command there begins with. It has a host name of its own: Open MPI's daemons name a folder after it."""
    return [*hosts.on(host), "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', hosts.name(host)]


def _agent(hosts: Hosts, ranks: int) -> str:
    """A script in place of ssh: an address, and a command for the shell there."""
    cases = "".join(
        f'  {hosts.address(host)}) exec {shlex.join([*_named(hosts, host), "sh", "-c"])} "$command" ;;\n'
        for host in range(ranks)
    )
    return f"#!/bin/sh\naddress=$1\nshift\ncommand=$*\ncase $address in\n{cases}esac\nexit 1\n"
