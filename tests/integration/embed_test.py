"""The client as others use it: from an installed package, and without it, in another language.

    embed_test.py installed|python BUILD_FOLDER

Skipped (a line that begins with SKIPPED:) where what it needs is not there.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
RESULT = re.compile(r"rank \d+: version 100, loss [\d.e-]+, (w = .*)")


def run(*command, **options):
    subprocess.run([str(part) for part in command], check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, **options)


def start(*command, **options):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, **options)


def train(bin_folder, workers, shards):
    """Runs `workers` (commands to which the address is added) with these many servers; their lines on stdout."""
    started = []
    try:
        addresses = []
        for shard in range(shards):
            command = [bin_folder / "ps_server", f"--num_workers={len(workers)}", "--learning_rate=0.2", "--lease=120s",
                       f"--num_shards={shards}", f"--shard={shard}"]
            if shard > 0:
                command.append(f"--chief={addresses[0]}")
            started.append(start(*command, stderr=subprocess.DEVNULL))
            addresses.append(started[-1].stdout.readline().removeprefix("listening on ").strip())
        ends = [start(*command, addresses[0], env=env) for command, env in workers]
        started += ends
        lines = [process.communicate(timeout=TIMEOUT_S)[0] for process in ends]
        statuses = [process.wait(timeout=TIMEOUT_S) for process in started]
        assert statuses == [0] * len(statuses), f"exit statuses {statuses}: {lines}"
        return lines
    finally:
        for process in started:
            process.kill()
            process.wait()


def check_line_found(lines):
    """All workers ended on the same weights, those of the line that the points are on."""
    found = [RESULT.match(line) for line in lines]
    assert all(found), lines
    weights = {match.group(1) for match in found}
    assert len(weights) == 1, lines
    values = [float(value) for value in re.findall(r"-?[\d.]+", weights.pop())]
    for value, expected in zip(values, (3, -2, 0.5), strict=True):
        assert abs(value - expected) < 0.05, lines


def installed(build, folder):
    """The example, built against the installed package alone, trains with the installed server."""
    run("cmake", "--install", build, "--prefix", folder / "prefix")
    run("cmake", "-S", ROOT / "worker/client/example", "-B", folder / "example", "-G", "Ninja",
        f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    run("cmake", "--build", folder / "example")
    linear = ([folder / "example/linear"], None)
    for shards in (1, 2):
        check_line_found(train(folder / "prefix/bin", [linear, linear], shards))


def python(build, folder):
    """A worker on generated Python stubs trains beside a C++ one."""
    try:
        import grpc  # noqa: F401
        from google.protobuf import descriptor  # noqa: F401
    except ImportError as error:
        print(f"SKIPPED: {error}")
        return
    proto = ROOT / "proto"
    plugin = subprocess.run(["which", "grpc_python_plugin"], check=True, capture_output=True, text=True).stdout.strip()
    run("protoc", f"--proto_path={proto}", f"--python_out={folder}", f"--grpc_out={folder}",
        f"--plugin=protoc-gen-grpc={plugin}", proto / "ps/v1/ps.proto")
    worker = ([sys.executable, ROOT / "tests/integration/python_worker.py"], os.environ | {"PYTHONPATH": str(folder)})
    linear = ([pathlib.Path(build) / "bin/linear"], None)
    for shards in (1, 2):
        check_line_found(train(pathlib.Path(build) / "bin", [linear, worker], shards))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        {"installed": installed, "python": python}[sys.argv[1]](sys.argv[2], pathlib.Path(temporary))
