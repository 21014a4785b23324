"""The wheel, as somebody gets it who has not built it: made by deploy/build-wheel.sh, installed in a fresh environment, it
trains.

    wheel_test.py

Skipped (a line that begins with SKIPPED:) where a wheel cannot be built: without Python's headers, or where pip does not
reach PyPI.
"""
import os
import pathlib
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 2400
OTHER_TIMEOUT_S = 300
# What the wheel takes from the system that it is installed on: glibc, and libraries that come with any compiler's programs.
SYSTEM = {"linux-vdso.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0",
          "libdl.so.2", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1", "libz.so.1"}
# Each worker's gradient is 1, as is then the mean: three steps of 0.5 from 1 end at -0.5.
WORKER = """
import os
import numpy
import psgrad
client = psgrad.Client.join(os.environ["PS_SERVER"], [psgrad.Tensor("w", (3, 4))],
                            optimizer=psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5}))
weights, gradients = [numpy.ones((3, 4), numpy.float32)], [numpy.ones((3, 4), numpy.float32)]
result = client.start(weights, weights)
for _ in range(3):
    result = client.push_pull(result.next_step, gradients, weights, version=result.version)
assert (weights[0] == -0.5).all(), weights
client.done()
client.leave()
print("trained to version", result.version, "with", psgrad.__file__)
"""


def output(*command, **options):
    """What it writes; AssertionError, with that, if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **{"timeout": OTHER_TIMEOUT_S, **options})
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def why_not(folder):
    """Why no wheel can be built here, or nothing."""
    headers = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        return f"{headers} is not there: deploy/install-deps.sh --python installs it"
    made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True, timeout=OTHER_TIMEOUT_S)
    if made.returncode != 0:
        return "python -m venv fails: deploy/install-deps.sh --python installs what it needs"
    probe = [folder / "bin/pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder / "probe",
             "nanobind-backend"]
    if subprocess.run(probe, capture_output=True, timeout=OTHER_TIMEOUT_S).returncode != 0:
        return "pip does not reach PyPI"
    return ""


def check_name(wheel):
    """It is for any Python from 3.10 on, and for a glibc that is no newer than this one."""
    name = re.fullmatch(rf"psgrad-[0-9.]+-cp310-abi3-manylinux_2_([0-9]+)_{platform.machine()}\.whl", wheel.name)
    assert name, wheel.name
    assert int(name[1]) <= int(platform.libc_ver()[1].split(".")[1]), wheel.name


def check_libraries(package):
    """Those of gRPC and the like are the wheel's own, whether or not the system has them."""
    own = package.parent / "psgrad.libs"
    for file in (package / "_core.abi3.so", package / "bin/ps_server", package / "bin/ps_ctl"):
        lines = output("ldd", file).splitlines()
        assert any("libgrpc++" in line for line in lines), (file, lines)
        for line in lines:
            name, _, place = line.strip().partition(" => ")
            if pathlib.Path(name.split()[0]).name not in SYSTEM:
                assert own in pathlib.Path(place.split(" (")[0]).resolve().parents, f"{file}: {line}"


def check_training(folder, venv, package):
    """Of two workers on two servers, in an environment that shows nothing of this project's folder."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    environment = {"PATH": os.defpath, "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    text = output(venv / "bin/psrun", "--workers=2", "--servers=2", "--mode=bsp", script, env=environment, cwd=folder)
    print(text)
    for rank in range(2):
        assert f"[worker {rank}] trained to version 3 with {package / '__init__.py'}" in text, text
    assert "the job is finished" in text, text
    assert "--server" in output(package / "bin/ps_ctl", "--help", env=environment, cwd=folder)


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder).resolve()
        venv = folder / "venv"
        if reason := why_not(venv):
            print(f"SKIPPED: {reason}")
            return
        made = folder / "made"
        print(output(ROOT / "deploy/build-wheel.sh", f"--output={made}", env=os.environ | {"PYTHON": sys.executable},
                     timeout=BUILD_TIMEOUT_S))
        (wheel,) = made.glob("*.whl")
        assert len(list(made.glob("psgrad-*.tar.gz"))) == 1, list(made.iterdir())
        check_name(wheel)
        output(venv / "bin/pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:", wheel, "numpy", "abi3audit")
        package, = venv.glob("lib/python*/site-packages/psgrad")
        output(venv / "bin/abi3audit", "--strict", wheel)
        check_libraries(package)
        check_training(folder, venv, package)


if __name__ == "__main__":
    main()
