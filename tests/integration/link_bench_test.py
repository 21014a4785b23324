"""ps_bench link: rows that links allow, also with a delay and of long rounds, and no host that stays: link_bench_test.py BUILD_FOLDER.

Skipped (a line that begins with SKIPPED:) where there can be no hosts.
"""
import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

LIMIT_S = 120
BYTES, MBIT_PER_S, WORKERS = 1 << 20, 200, 2
ONCE_S = BYTES * 1514 / 1448 * 8 / (MBIT_PER_S * 1e6)  # With the headers of full packets.
BURST_BYTES = 128 << 10  # That a link which was idle lets pass at once.
DELAY_S = 0.15
SLOWEST_TRIPS = 8  # Round trips of a step with a delay: 10 where only servers, 32 where nobody has long_links.
SERVERS = {"2 servers on hosts of their own", "2 servers on the workers' hosts", "1 server"}


def command(bin_folder, *flags):
    return [bin_folder / "ps_bench", f"--workers={WORKERS}", "--repeats=2", *flags, "link"]


def rows_of(bin_folder, *flags):
    """By name; None where there can be no hosts."""
    flags = ["--json", f"--bytes={BYTES}", f"--mbit_per_s={MBIT_PER_S}", *flags]
    done = subprocess.run(command(bin_folder, *flags), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("SKIPPED:"):
        print(done.stdout.strip())
        return None
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def hosts(prefix):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"{prefix}-")}


def check_rows(rows):
    assert set(rows) >= SERVERS, rows
    best = min([row["p50_s"] for name, row in rows.items() if name.startswith("MPI")], default=None)
    for name, row in rows.items():
        assert row["models"] > 1 - 2 * BURST_BYTES / BYTES, f"{name} is faster than a link"
        assert abs(row["models"] - row["p50_s"] / ONCE_S) < 1e-6 * row["models"]
        if name in SERVERS:
            assert row["carried_models"] > 0.9, f"{name}: not all of the model was carried"
            assert ("against_mpi" in row) == (best is not None)
            assert best is None or abs(row["against_mpi"] - best / row["p50_s"]) < 1e-6
    # One server's link carries both workers' gradients; the bytes are counted, whatever the times.
    assert rows["1 server"]["carried_models"] > 1.8


def check_delay(rows):
    assert set(rows) == SERVERS, "MPI's connections are not delayed"
    for name, row in rows.items():
        assert row["p50_s"] > 2 * DELAY_S, f"{name}: a step is there before a push and its answer can be"
        assert row["p50_s"] < SLOWEST_TRIPS * 2 * DELAY_S, f"{name}: windows do not grow with the delay"


def check_rounds(bin_folder):
    """Of long rounds: their weights were right, and workers computed no larger share than the bytes allow."""
    compute_s, steps = 0.01, 8
    rounds = ["--mode=diloco", f"--local_steps={steps}", f"--compute={round(compute_s * 1000)}ms", "--servers=2"]
    for wire, share in (([], 1.0), (["--wire_dtype=e3m0", "--weights_wire_dtype=bfloat16"], 0.5)):
        ((name, row),) = rows_of(bin_folder, *rounds, *wire).items()
        assert f"rounds of {steps}" in name and ("e3m0" in name) == bool(wire), name
        by_bytes = steps * compute_s / (steps * compute_s + share * ONCE_S)
        assert abs(row["utilisation_by_bytes"] - by_bytes) < 1e-6, row
        assert abs(row["utilisation"] - steps * compute_s / row["p50_s"]) < 1e-6, row
        # At once passes what a link that was idle holds.
        assert row["utilisation"] < steps * compute_s / (steps * compute_s + share * ONCE_S * (1 - 2 * BURST_BYTES / BYTES)), row
        assert row["carried_models"] > 0.9 * share, row


def runs_worker(name):
    for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(OSError):  # It may have ended.
            if b"link_worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
    return False


def check_stop(bin_folder, reached):
    """By SIGTERM, once `reached` says so of its hosts: nothing stays."""
    process = subprocess.Popen(
        command(bin_folder, "--bytes=67108864", "--mbit_per_s=10", "--delay=1ms"), stderr=subprocess.PIPE, text=True
    )
    try:
        first = re.match(r"ps_bench: hosts (psb\d+)-h0 to", line := process.stderr.readline())
        assert first is not None, line
        deadline = time.monotonic() + LIMIT_S
        while not reached(hosts(first[1])):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=LIMIT_S)[1]
        assert "stopped by SIGTERM" in said and process.returncode == 1, said
        assert not hosts(first[1]) and not pathlib.Path("/tmp", first[1]).exists()
    finally:
        process.kill()


def main():
    bin_folder = pathlib.Path(sys.argv[1]) / "bin"
    rows = rows_of(bin_folder)
    if rows is None:
        return
    check_rows(rows)
    delayed = [f"--delay={round(DELAY_S * 1000)}ms", "--bytes=8388608", "--mbit_per_s=1000", "--long_links"]
    check_delay(rows_of(bin_folder, *delayed))
    check_rounds(bin_folder)
    check_stop(bin_folder, lambda made: len(made) == 2 * WORKERS + 1)
    check_stop(bin_folder, lambda made: any(map(runs_worker, made)))


if __name__ == "__main__":
    main()
