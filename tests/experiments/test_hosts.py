"""Hosts in network namespaces: their links, and what becomes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import unittest
from pathlib import Path

import support
from experiments.hosts import Hosts, check_available
from experiments.lab import Skipped

_HOLD = """
import sys, time
from experiments.hosts import Hosts
with Hosts(1, 10) as hosts:
    print(hosts.name(0), flush=True)
    time.sleep(60)
"""
_SEND = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    out.sendto(bytes(1000), (sys.argv[1], 7001))
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^(\S+)", listed, re.MULTILINE))


def hold() -> tuple[subprocess.Popen[str], str]:
    """A process that has a host, and the host's name."""
    environment = {**os.environ, "PYTHONPATH": str(support.REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", _HOLD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    return process, process.stdout.readline().strip()


class HostsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        try:
            check_available()
            with Hosts(1, 10):
                pass
        except Skipped as skipped:
            raise unittest.SkipTest(str(skipped)) from None

    def test_two_at_a_time_have_different_names_and_both_are_gone_afterwards(self) -> None:
        with Hosts(2, 10) as one, Hosts(1, None) as other:
            names = {one.name(0), one.name(1), other.name(0)}
            assert len(names) == 3
            assert names <= namespaces()
        assert not names & namespaces()

    def test_what_runs_on_a_host_ends_with_it(self) -> None:
        with Hosts(1, 10) as hosts:
            sleeper = subprocess.Popen([*hosts.on(0), "sleep", "60"])
            stubborn = subprocess.Popen(
                [*hosts.on(0), "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"],
                stdout=subprocess.PIPE,
            )
            stubborn.stdout.readline()
        assert sleeper.wait(10) == -signal.SIGTERM
        assert stubborn.wait(10) == -signal.SIGKILL
        stubborn.stdout.close()

    def test_what_a_killed_process_left_is_removed_and_its_name_used_again(self) -> None:
        process, left = hold()
        process.kill()
        process.wait(10)
        process.stdout.close()
        assert left in namespaces()
        with Hosts(1, 10) as hosts:
            assert hosts.name(0) == left
        assert left not in namespaces()

    def test_another_process_keeps_its_own(self) -> None:
        process, theirs = hold()
        try:
            with Hosts(1, 10) as hosts:
                assert hosts.name(0) != theirs
            assert theirs in namespaces()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(10)
            process.stdout.close()
        assert theirs not in namespaces()

    def test_a_link_counts_what_it_carries_in_each_direction(self) -> None:
        with Hosts(2, 100) as hosts:
            before = hosts.carried()
            subprocess.run([*hosts.on(0), sys.executable, "-c", _SEND, hosts.address(1)], check=True, timeout=30)
            first, second = (link for _, link in (hosts.carried() - before).iterrows())
        # 100 datagrams of 1,000 bytes, with 42 bytes of headers each; besides, a few of the network's own packets.
        assert first.sent >= 104_200
        assert first.sent < 110_000
        assert second.received >= 104_200
        assert first.max() == first.sent
        assert second.sent < 20_000

    def test_a_rate_is_kept_both_ways(self) -> None:
        with Hosts(2, 10) as hosts:
            for host, device in ((0, "eth0"), (1, "eth0")):
                shown = subprocess.run(
                    ["tc", "-n", hosts.name(host), "qdisc", "show", "dev", device],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                assert "tbf" in shown
                assert "rate 10Mbit" in shown
            switch = hosts.name(0).replace("-h0", "-switch")
            shown = subprocess.run(["tc", "-n", switch, "qdisc"], capture_output=True, text=True, check=True).stdout
            assert shown.count("rate 10Mbit") == 2


class UnprivilegedTest(unittest.TestCase):
    def test_who_is_not_root_is_told(self) -> None:
        if os.geteuid() != 0 or not Path("/usr/bin/setpriv").exists():
            self.skipTest("needs root and setpriv, to do without root")
        code = "from experiments.hosts import Hosts; Hosts(1, 10).__enter__()"
        environment = {**os.environ, "PYTHONPATH": str(support.REPOSITORY)}
        ended = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-B", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            timeout=30,
            check=False,
        )
        assert "network namespaces need root" in ended.stderr


if __name__ == "__main__":
    unittest.main()
