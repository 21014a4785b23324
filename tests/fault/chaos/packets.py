"""Real packets that are lost: rules of iptables, in a network namespace that is this run's alone.

Nobody else has the namespace's addresses, and it goes with its last process.
"""

import os
import shutil
import subprocess
import sys

MARK = "PS_CHAOS_NETWORK"  # In the environment of whoever runs in a namespace of its own.
TOOLS = ["unshare", "ip", "iptables"]
BEGIN = "ip link set lo up && iptables -w -L INPUT >/dev/null"
DIRECTIONS = {"there": ["dport"], "back": ["sport"], "both": ["dport", "sport"]}


def are_own():
    return MARK in os.environ


def enter():
    """Begins this program again in a namespace of its own; returns, with the reason, only if that is not possible."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "that needs root"
    if missing:
        return f"that needs {' and '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", BEGIN], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return (tried.stderr.strip().splitlines() or [f"unshare ended with status {tried.returncode}"])[-1]
    os.environ[MARK] = str(os.getpid())
    again = ["unshare", "--net", "sh", "-c", f'{BEGIN} && exec "$@"', "sh", sys.executable, *sys.orig_argv[1:]]
    os.execvp(again[0], again)


def _iptables(*arguments):
    command = ["iptables", "-w", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


class Drops:
    """What is dropped now. Use it as `with Drops() as drops`: at its end all passes again."""

    def __init__(self):
        self.packets = 0  # That were dropped.
        self._rules = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rule in list(self._rules):
            self._end(rule)

    def begin(self, address, direction):
        """Packets to the address, those that come back from it, or both. Returns what ends it."""
        port = address.rsplit(":", 1)[1]
        rules = [(which, port) for which in DIRECTIONS[direction]]
        for rule in rules:
            _iptables("-A", *_dropping(*rule))
            self._rules.append(rule)
        return lambda: [self._end(rule) for rule in rules]

    def _end(self, rule):
        if rule not in self._rules:
            return
        self._rules.remove(rule)
        which, port = rule
        listed = _iptables("-nvxL", "INPUT").splitlines()
        counted = next(line.split() for line in listed if line.split()[-1:] == [f"{which[0]}pt:{port}"])
        self.packets += int(counted[0])
        _iptables("-D", *_dropping(*rule))


def _dropping(which, port):
    return ["INPUT", "-p", "tcp", f"--{which}", port, "-j", "DROP"]
