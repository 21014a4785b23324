"""Two hosts, as network namespaces, on a link of 1 Gbit/s: push and pull bring the right weights, no faster than that.

    netns_test.py BUILD_FOLDER

Skipped (a line that begins with SKIPPED:) where namespaces cannot be made.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

RATE_BYTES_PER_S = 1e9 / 8
MEASUREMENT_ERROR = 1.05
TIMEOUT_S = 300
HOSTS = {f"ps-test-a-{os.getpid()}": "10.213.77.1", f"ps-test-b-{os.getpid()}": "10.213.77.2"}


def run(*command):
    subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)


def make_hosts():
    links = []
    for i, (host, address) in enumerate(HOSTS.items()):
        run("ip", "netns", "add", host)
        links.append(f"ps{i}-{os.getpid()}")
    run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
    for link, (host, address) in zip(links, HOSTS.items(), strict=True):
        run("ip", "link", "set", link, "netns", host)
        run("ip", "-n", host, "address", "add", f"{address}/24", "dev", link)
        run("ip", "-n", host, "link", "set", link, "up")
        run("ip", "-n", host, "link", "set", "lo", "up")
        run("tc", "-n", host, "qdisc", "add", "dev", link, "root", "tbf", "rate", "1gbit", "burst", "256kb", "latency",
            "50ms")


def measure(bin_folder):
    (server_host, address), (worker_host, _) = HOSTS.items()
    server = subprocess.Popen(
        ["ip", "netns", "exec", server_host, bin_folder / "ps_server", f"--listen={address}:0", "--insecure",
         "--num_workers=1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        endpoint = server.stdout.readline().removeprefix("listening on ").strip()
        out = subprocess.run(
            ["ip", "netns", "exec", worker_host, bin_folder / "ps_bench", f"--server={endpoint}", "--bytes=33554432",
             "--repeats=3", "--json", "network"], check=True, timeout=TIMEOUT_S, capture_output=True, text=True).stdout
        assert server.wait(timeout=TIMEOUT_S) == 0
        return {row["name"]: row for row in json.loads(out)["rows"]}
    finally:
        server.kill()
        server.wait()


def main():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("SKIPPED: needs root, ip and tc")
        return
    try:
        try:
            make_hosts()
        except subprocess.CalledProcessError as error:
            print(f"SKIPPED: {error}: {error.stderr.decode().strip()}")
            return
        rows = measure(pathlib.Path(sys.argv[1]) / "bin")
        for name in ("push, to the server", "pull, from the server"):
            rate = rows[name]["gb_per_s"] * 1e9
            print(f"{name}: {rate * 8 / 1e6:.0f} Mbit/s")
            # How near the rate comes to the link's depends on the machine; ps_bench network measures it.
            assert 0 < rate <= MEASUREMENT_ERROR * RATE_BYTES_PER_S, rows
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


if __name__ == "__main__":
    main()
