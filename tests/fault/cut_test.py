"""Cuts of real servers whose messages come late: cut_test.py BUILD_FOLDER CASE."""

import pathlib
import sys

from job import Job, Program, wait_until

sys.path.append(str(pathlib.Path(__file__).parent / "chaos"))
from proxy import Link, Proxies

SLOWLY = ["--experiment_step_time=4ms"]


def late_commit():
    """A shard that hears late that a change is made applies no push meanwhile, and says what it waits for."""
    with Proxies() as proxies, Job("asp", 0, steps=1000000, checkpoints=False, worker_flags=SLOWLY) as job:
        job.shards, job.flags = 2, [*job.flags, "--lease=60s"]
        job.addresses.append("127.0.0.1:0")
        job.servers.append(job.start_server(0))
        job.addresses[0] = job.listening(0)
        link = Link(proxies)
        link.lead_to(job.addresses[0])
        job.addresses.append("127.0.0.1:0")
        job.servers.append(job.start_server(1, [f"--chief={link.address}"]))
        job.addresses[1] = job.listening(1)
        job.start_workers()
        job.wait_for_training()
        link.hold_at(b"learning_rate")
        asked = Program(job.folder, "asked", [*job.control(), "--timeout=40s", "set", "learning_rate=0.025"])
        assert link.held.wait(40), asked.errors()
        before = job.version(1)
        wait_until("the line that says so", lambda: "waiting for the chief's word" in job.servers[1].errors())
        assert job.version(1) == before
        link.heal()
        assert asked.end() == 0, asked.errors()
        for server in job.servers:
            wait_until("the change", lambda server=server: "learning_rate=0.025" in server.errors())
        wait_until("the job to go on", lambda: job.version(1) > before)
        assert not any("given it up" in server.errors() for server in job.servers)


if __name__ == "__main__":
    {case.__name__: case for case in (late_commit,)}[sys.argv[2]]()
