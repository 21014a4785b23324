"""ps_bench crowd: a row for each number of workers, with what was counted: crowd_bench_test.py BUILD_FOLDER."""
import json
import pathlib
import subprocess
import sys

LIMIT_S = 120
WORKERS, SERVERS, TENSORS, STEPS = [3, 6], 4, 9, 3


def rows_of(bin_folder, mode, *flags):
    workers = ",".join(map(str, WORKERS))
    counts = [f"--workers={workers}", f"--servers={SERVERS}", f"--tensors={TENSORS}", f"--steps={STEPS}"]
    command = [bin_folder / "ps_bench", "--json", f"--mode={mode}", *counts, *flags, "crowd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def check_rows(rows):
    assert [row["workers"] for row in rows] == WORKERS
    for row in rows:
        assert all(row[name] > 0 for name in row if name != "step_bytes"), row
        assert row["step_p50_s"] <= row["step_p99_s"]
        # All CPU is counted once: no more of it than time has passed.
        assert row["join_cpu_s"] * row["workers"] <= row["joined_s"]
        assert row["push_cpu_s"] * row["workers"] * STEPS <= row["step_p99_s"] * STEPS * 1.01
    assert rows[0]["push_cpu_ratio"] == 1
    assert rows[1]["joining_bytes"] > rows[0]["joining_bytes"]


def main():
    bin_folder = pathlib.Path(sys.argv[1]) / "bin"
    for mode in ["bsp", "asp"]:
        check_rows(rows := rows_of(bin_folder, mode))
        # In asp each shard decides by itself.
        assert all((row["step_bytes"] > 0) == (mode == "bsp") for row in rows), rows
    check_rows(rows_of(bin_folder, "bsp", "--burst=3"))
    refused = subprocess.run([bin_folder / "ps_bench", "--workers=1,x", "crowd"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--workers=x" in refused.stderr, refused.stderr


if __name__ == "__main__":
    main()
