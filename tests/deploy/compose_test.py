"""The docker-compose demo, for real: builds the image, brings the cluster up and looks at how it ended.

    compose_test.py bsp|asp

Skipped (a line that begins with SKIPPED:) where no Docker engine runs. PS_START_DOCKER names a program that makes one
available, if it is set.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "deploy/docker-compose.yml"
UP_TIMEOUT_S = 1200
OTHER_TIMEOUT_S = 120


def output(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=OTHER_TIMEOUT_S, **options).stdout


def find_compose():
    """The command that is Docker Compose here, or a reason why there is none."""
    if start := os.environ.get("PS_START_DOCKER"):
        if subprocess.run([start], timeout=UP_TIMEOUT_S, stdout=subprocess.DEVNULL).returncode != 0:
            return None, f"{start} failed"
    if shutil.which("docker") is None:
        return None, "docker is not installed"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=OTHER_TIMEOUT_S).returncode != 0:
        return None, "no Docker engine runs"
    probe = ["docker", "run", "--rm", "debian:bookworm-slim", "apt-get", "update", "-q", "--error-on=any"]
    if subprocess.run(probe, capture_output=True, timeout=OTHER_TIMEOUT_S).returncode != 0:
        return None, "containers do not reach Debian's packages"
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command, None
    return None, "there is no Docker Compose"


def check_ended(compose, environment):
    """Every container ended by itself, with status 0."""
    containers = output(*compose, "ps", "-a", "-q", env=environment).split()
    # prepare, two servers, three workers
    assert len(containers) == 6, containers
    for container in containers:
        state = json.loads(output("docker", "inspect", "--format", "{{json .State}}", container))
        name = output("docker", "inspect", "--format", "{{.Name}}", container).strip()
        assert state["Status"] == "exited" and state["ExitCode"] == 0, (name, state)


def check_run(folder, mode):
    """Metrics of every node and the table are on the host, and the network has learnt."""
    files = sorted(path.name for path in folder.iterdir())
    assert len([name for name in files if name.startswith("worker-")]) == 3, files
    assert {"server-0.jsonl", "server-1.jsonl", "report.md"} <= set(files), files
    table = (folder / "report.md").read_text()
    assert f"| {mode}  |       3 |" in table, table
    events = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    accuracy = [event["accuracy"] for event in events if event["event"] == "eval"][-1]
    assert accuracy > 0.70, accuracy  # One epoch; how late the slow worker's gradients come is chance.
    ends = [event for event in events if event["event"] == "end" and "samples" in event]
    assert sum(event["samples"] for event in ends) == 60000, ends


def main(mode):
    compose, reason = find_compose()
    if compose is None:
        print(f"SKIPPED: {reason}")
        return
    with tempfile.TemporaryDirectory() as runs:
        environment = os.environ | {"MODE": mode, "EPOCHS": "1", "RUNS": runs}
        compose = [*compose, "-p", f"ps-test-{mode}", "-f", str(COMPOSE_FILE)]
        try:
            up = subprocess.run([*compose, "up", "--build"], env=environment, capture_output=True, text=True,
                                timeout=UP_TIMEOUT_S)
            print(up.stdout[-8000:], up.stderr[-4000:])
            assert up.returncode == 0, up.returncode
            check_ended(compose, environment)
            check_run(pathlib.Path(runs) / mode, mode)
        finally:
            subprocess.run([*compose, "down", "--volumes"], env=environment, capture_output=True, timeout=OTHER_TIMEOUT_S)


if __name__ == "__main__":
    main(sys.argv[1])
