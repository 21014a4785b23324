"""MPI ranks, one on each of several hosts (hosts.py)."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .hosts import SUBNET_RANGE, Hosts
from .lab import Lab
from .program import run_program

PROGRAM = "ps_bench_mpi"
# What Open MPI's own choice is compared with: the sum that goes round in a ring.
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")


def why_no_mpi(lab: Lab) -> str:
    """What it is; empty if ranks can be started."""
    if shutil.which("mpirun") is None:
        return "not installed"
    return "" if (lab.bin / PROGRAM).exists() else "not built"


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
            *(str(lab.bin / PROGRAM), *arguments),
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
