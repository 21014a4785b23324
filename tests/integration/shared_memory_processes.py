"""Real programs that share memory: killed and stopped at random moments, and in two network namespaces.

    shared_memory_processes.py BUILD_FOLDER faults COUNT STEPS | namespaces

Faults: COUNT small jobs of STEPS steps, each with one fault at a moment that a fixed seed chooses.
Namespaces: skipped (a line that begins with SKIPPED:) where they cannot be made.
"""
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

TIMEOUT_S = 120
SHARED = "exchanging with all shards through shared memory"
JOB = ["--dataset=synthetic:samples=2000,features=20,classes=4,test=100", "--model=mlp:20,300,4", "--batch_size=20",
       "--connect_timeout=3s"]


class Job:
    """A server and two workers, whose logs are in files of `folder`."""

    def __init__(self, bin_folder, folder, mode, steps, server_flags=(), prefixes=((), (), ()), listen="127.0.0.1:0",
                 worker_flags=()):
        self.folder = folder
        self.processes = {}
        self.server = self.start("server", [*prefixes[0], bin_folder / "ps_server", f"--listen={listen}",
                                            f"--mode={mode}", "--num_workers=2", *server_flags])
        address = self.server.stdout.readline().removeprefix("listening on ").strip()
        self.workers = [
            self.start(f"worker {i}", [*prefixes[i + 1], bin_folder / "ps_worker", f"--server={address}",
                                       f"--steps={steps}", f"--rank={i}", *JOB, *worker_flags]) for i in range(2)]

    def start(self, name, command):
        with open(self.folder / name, "w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes[name] = process
        return process

    def log(self, name):
        return (self.folder / name).read_text()

    def wait(self):
        """The exit statuses of the server and the workers, and the weights hash, if there is one."""
        out = {name: process.communicate(timeout=TIMEOUT_S)[0] for name, process in self.processes.items()}
        found = re.search("weights hash: ([0-9a-f]+)", "".join(out.values()))
        return [process.returncode for process in self.processes.values()], found and found.group(1)

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def run(job, act=lambda: None):
    try:
        act()
        return job.wait()
    finally:
        job.kill()


def one_fault(bin_folder, folder, steps, rng, undisturbed):
    fault = rng.choice(["kill worker", "kill server", "stop worker", "stop server"])
    mode = "asp" if fault == "kill worker" else "bsp"
    moment = rng.random() * 0.8
    job = Job(bin_folder, folder, mode, steps, worker_flags=["--shared_memory=require"])
    never = threading.Event()
    victim = rng.choice(job.workers) if "worker" in fault else job.server

    def act():
        for worker in ("worker 0", "worker 1"):  # As soon as both have joined: before and after the job runs.
            while SHARED not in job.log(worker):
                assert job.processes[worker].poll() is None, job.log(worker)
                never.wait(0.005)
        never.wait(moment)
        if fault.startswith("kill"):
            victim.send_signal(signal.SIGKILL)
        else:
            victim.send_signal(signal.SIGSTOP)
            never.wait(0.4)
            victim.send_signal(signal.SIGCONT)

    statuses, weights = run(job, act)
    what = f"{fault} after {moment:.3f} s: {statuses}\n" + "\n".join(job.log(name) for name in job.processes)
    if fault == "kill server":
        # Whoever has left before is done.
        assert statuses[0] == -signal.SIGKILL or statuses == [0, 0, 0], what
        assert all(status in (0, 1) for status in statuses[1:]), what
    elif fault == "kill worker":
        others = [p.returncode for p in job.workers if p is not victim]
        before_start = "the job is running" not in job.log("server")
        assert victim.returncode in (-signal.SIGKILL, 0), what
        assert (statuses[0], others) == (0, [0]) or before_start, what
    else:
        assert statuses == [0, 0, 0] and weights == undisturbed, what
    print(f"{fault} after {moment:.3f} s: {statuses}")


def faults(bin_folder, count, steps):
    rng = random.Random(14)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        statuses, undisturbed = run(Job(bin_folder, folder, "bsp", steps, worker_flags=["--shared_memory=off"]))
        assert statuses == [0, 0, 0], statuses
        for _ in range(count):
            one_fault(bin_folder, folder, steps, rng, undisturbed)


def namespaces(bin_folder):
    hosts = {f"ps-shm-a-{os.getpid()}": "10.213.78.1", f"ps-shm-b-{os.getpid()}": "10.213.78.2"}
    if os.geteuid() != 0 or not shutil.which("ip"):
        print("SKIPPED: needs root and ip")
        return

    def ip(*command):
        subprocess.run(["ip", *command], check=True, timeout=TIMEOUT_S, capture_output=True)

    try:
        try:
            links = [f"psm{i}-{os.getpid()}" for i in range(2)]
            for host in hosts:
                ip("netns", "add", host)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for link, (host, address) in zip(links, hosts.items(), strict=True):
                ip("link", "set", link, "netns", host)
                ip("-n", host, "address", "add", f"{address}/24", "dev", link)
                ip("-n", host, "link", "set", link, "up")
                ip("-n", host, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            print(f"SKIPPED: {error}: {error.stderr.decode().strip()}")
            return
        (first, address), (second, _) = hosts.items()
        prefixes = [["ip", "netns", "exec", host] for host in (first, first, second)]
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            hashes = set()
            for socket in (None, folder / "socket"):
                flags = ["--insecure"] + ([f"--local_socket={socket}"] if socket else [])
                job = Job(bin_folder, folder, "bsp", 100, server_flags=flags, prefixes=prefixes, listen=f"{address}:0")
                statuses, weights = run(job)
                assert statuses == [0, 0, 0], [job.log(process) for process in job.processes]
                hashes.add(weights)
                assert SHARED in job.log("worker 0")
                expected = SHARED if socket else "exchanging with shard 0 over gRPC (not reachable on this host)"
                assert expected in job.log("worker 1"), job.log("worker 1")
            assert len(hashes) == 1
            assert not (folder / "socket").exists()
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


if __name__ == "__main__":
    programs = pathlib.Path(sys.argv[1]) / "bin"
    if sys.argv[2] == "faults":
        faults(programs, int(sys.argv[3]), int(sys.argv[4]))
    else:
        namespaces(programs)
