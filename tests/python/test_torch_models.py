"""Several models in one script, each in a job of its own: a GAN."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad import _models, run
from torch_support import Jobs, environment, largest_difference, ps_server, psgrad, seeded, weights_of

pytest_plugins = ["torch_fixtures"]

STEPS = 6
needs_servers = pytest.mark.skipif(ps_server() is None, reason="psgrad._core or ps_server has not been built")


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A generator and a discriminator."""
    generator = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)), 1)
    discriminator = seeded(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), 2
    )
    return generator, discriminator


def losses(g: torch.nn.Module, d: torch.nn.Module, step: int, rank: int) -> tuple[Any, Any]:
    """Functions that compute the losses of the discriminator and of the generator."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    real, noise = torch.randn(5, 4, generator=generator) + 1, torch.randn(5, 3, generator=generator)
    softplus = torch.nn.functional.softplus
    return (
        lambda: (softplus(-d(real)) + softplus(d(g(noise).detach()))).mean(),
        lambda: softplus(-d(g(noise))).mean(),
    )


def alone(ranks: int) -> dict[str, torch.Tensor]:
    """What plain PyTorch makes of the ranks' mean losses."""
    g, d = models()
    opt_g, opt_d = optimizers(g, d)
    for step in range(STEPS):
        for which, opt in ((0, opt_d), (1, opt_g)):
            opt.zero_grad()
            (sum(losses(g, d, step, rank)[which]() for rank in range(ranks)) / ranks).backward()
            opt.step()
    return both(g, d)


def optimizers(g: torch.nn.Module, d: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9)


def both(g: torch.nn.Module, d: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {f"g.{name}": value for name, value in weights_of(g).items()}
    return {**found, **{f"d.{name}": value for name, value in weights_of(d).items()}}


def train(steps: dict[int, int] | int = STEPS, servers: tuple[str | None, str | None] = (None, None)) -> Any:
    """One worker: the weights that both models have in the end."""
    g, d = models()
    plain_g, plain_d = optimizers(g, d)
    opt_g = psgrad.torch.DistributedOptimizer(plain_g, g, name="g", server=servers[0])
    opt_d = psgrad.torch.DistributedOptimizer(plain_d, d, name="d", server=servers[1])
    rank = opt_g.rank
    with opt_g, opt_d:
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            of_d, of_g = losses(g, d, step, rank)
            for opt, loss in ((opt_d, of_d), (opt_g, of_g)):
                opt.zero_grad()
                loss().backward()
                opt.step()
    return both(g, d)


# ---- The whole


@needs_servers
@pytest.mark.parametrize("servers", [1, 2])
def test_a_gan_of_two_workers_is_that_of_the_mean_gradient(servers: int) -> None:
    expected = alone(2)
    for weights in psgrad.spawn(train, workers=2, servers=servers, models=("g", "d")):
        assert largest_difference(weights, expected) < 1e-6


@needs_servers
def test_each_model_may_have_a_mode_of_its_own() -> None:
    one, other = psgrad.spawn(train, workers=2, models=("g", "d"), mode="asp", **{"d.mode": "bsp"})
    assert largest_difference(one, other) == 0
    assert all(bool(value.isfinite().all()) for value in one.values())


@needs_servers
def test_workers_with_different_numbers_of_batches_do_not_wait_for_each_other() -> None:
    """As they would if each finished one model after the other."""
    one, other = psgrad.spawn(train, ({0: 2, 1: 5},), workers=2, models=("g", "d"))
    assert largest_difference(one, other) == 0


SCRIPT = """
import os, sys
import psgrad.torch, torch
import test_torch_models as t
g, d = t.models()
plain_g, plain_d = t.optimizers(g, d)
opt_g = psgrad.torch.DistributedOptimizer(plain_g, g, name="g")
opt_d = psgrad.torch.DistributedOptimizer(plain_d, d, name="d")
for step in range(int(sys.argv[1])):
    if step == 3:
        print("training as process", os.getpid(), flush=True)
        if len(sys.argv) > 2 and opt_g.rank == 1:
            exec(sys.argv[2])
    for opt, loss in zip((opt_d, opt_g), t.losses(g, d, step, opt_g.rank)):
        opt.zero_grad()
        loss().backward()
        opt.step()
print("steps", opt_g.step_number, opt_d.step_number)
"""


def psrun(folder: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "gan.py").write_text(script, encoding="utf-8")
    arguments = tuple(str(folder / "gan.py") if each == "gan.py" else each for each in arguments)
    command = [sys.executable, "-m", "psgrad.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)


@needs_servers
def test_psrun_starts_servers_for_each_model_and_goes_on_from_both_checkpoints(tmp_path: Path) -> None:
    flags = [
        "--models=g,d",
        "--workers=2",
        "--servers=2",
        f"--checkpoint_dir={tmp_path / 'job'}",
        "--checkpoint_every=2",
    ]
    flags.append(f"--metrics_file={tmp_path / 'm.jsonl'}")
    done = psrun(tmp_path, *flags, "gan.py", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\[server [gd]/[01]\] listening on ", done.stdout)) == 4
    assert done.stdout.count("steps 4 4") == 2
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"g", "d"}
    assert {path.name for path in tmp_path.glob("m.*")} == {f"m.{model}.{n}.jsonl" for model in "gd" for n in (0, 1)}
    again = psrun(tmp_path, *flags, "gan.py", "2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("steps 6 6") == 2


@needs_servers
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_killed_worker_ends_both_jobs_and_is_named(mode: str, tmp_path: Path) -> None:
    flags = ["--models=g,d", "--workers=2", f"--mode={mode}"]
    done = psrun(tmp_path, *flags, "gan.py", "1000000", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"psrun: (the first failure: )?worker 1 was killed by signal 9 \(SIGKILL\)", last), done.stderr


@needs_servers
def test_an_exception_ends_both_jobs_with_its_reason(tmp_path: Path) -> None:
    done = psrun(tmp_path, "--models=g,d", "--workers=2", "gan.py", "1000000", "raise ValueError('no data')")
    assert done.returncode == 1
    assert done.stderr.endswith("worker 1 ended with status 1: ValueError: no data\n"), done.stderr
    for model in ("g", "d"):
        assert re.search(rf"\[server {model}/0\] .*ValueError: no data", done.stderr), done.stderr


@needs_servers
def test_servers_of_a_model_that_the_script_does_not_train_are_ended(tmp_path: Path) -> None:
    script = "\n".join(line for line in SCRIPT.splitlines() if "plain_d, d, name" not in line)
    script = script.replace("(opt_d, opt_g), t.losses(g, d, step, opt_g.rank)", "(opt_g,), t.losses(g, d, step, 0)[1:]")
    done = psrun(tmp_path, "--models=g,d", "gan.py", "2", script=script.replace(", opt_d.step_number", ""))
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Names, addresses and ranks


@pytest.mark.parametrize(
    ("found", "options", "message"),
    [
        ({"PS_SERVERS": "g=a:1,d=a:2"}, {}, r"^name: there are several models .*: 'g', 'd'$"),
        ({"PS_SERVERS": "g=a:1,d=a:2"}, {"name": "q"}, r"^name='q': there are no servers for it; .* 'g', 'd'$"),
        ({"PS_SERVER": "a:1"}, {"name": "g"}, r"^name='g': \$PS_SERVER is a job of one model"),
        ({}, {"name": "g"}, r"^server: none was given"),
    ],
)  # fmt: skip
def test_a_name_that_nobody_was_told_is_refused_with_the_choices(
    found: dict[str, str], options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PS_SERVER", "PS_JOB", "PS_SERVERS", "PS_JOBS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    g, d = models()
    with pytest.raises(ValueError, match=message):
        psgrad.torch.DistributedOptimizer(optimizers(g, d)[0], g, **options)


def test_a_model_finds_its_job_in_the_environment() -> None:
    found = {"PS_SERVERS": "g=unix:/a=b,d=h:2", "PS_JOBS": "g=j/g,d=j/d"}
    assert _models.place_of("g", None, found) == ("unix:/a=b", "j/g")
    assert _models.place_of("d", None, found) == ("h:2", "j/d")
    assert _models.place_of("d", "h:3", found) == ("h:3", "j/d")
    assert _models.place_of(None, None, {"PS_SERVER": "h:4", "PS_JOB": "j"}) == ("h:4", "j")
    assert _models.place_of("g", "h:5", {}) == ("h:5", None)


def test_ranks_that_differ_are_refused(fakes: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would if workers without PS_RANK joined the jobs in different orders."""
    first, second = fakes(1), fakes(2)
    g, d = models()
    plain_g, plain_d = optimizers(g, d)
    opt_g = first.wrap(plain_g, g, name="g")
    monkeypatch.setenv("PS_RANK", "1")
    with pytest.raises(RuntimeError, match=r"rank 1 in the job of model d, and rank 0 in that of g"):
        second.wrap(plain_d, d, name="d")
    opt_g.leave("the test has ended")


def test_a_name_is_given_once(fakes: Jobs) -> None:
    g, d = models()
    plain_g, plain_d = optimizers(g, d)
    opt_g = fakes().wrap(plain_g, g, name="g")
    with pytest.raises(ValueError, match=r"name='g': another DistributedOptimizer has it already"):
        fakes().wrap(plain_d, d, name="g")
    opt_g.leave("the test has ended")


def test_the_end_of_the_outermost_with_finishes_all_models(jobs: Jobs) -> None:
    one, other = jobs(), jobs()
    g, d = models()
    plain_g, plain_d = optimizers(g, d)
    with one.wrap(plain_g, g, name="g") as opt_g:
        with other.wrap(plain_d, d, name="d") as opt_d:
            pass
        losses(g, d, 0, 0)[0]().backward()
        opt_d.step()  # It is in its job still.
    for opt in (opt_g, opt_d):
        with pytest.raises(RuntimeError, match="has left the job"):
            opt.step()


def test_what_one_chief_hands_out_is_not_for_several_models(reals: Jobs) -> None:
    g, d = models()
    with pytest.raises(ValueError, match="name='g': the chief of its job hands out the samples"):
        reals(1, "bsp", "--budget=job").wrap(optimizers(g, d)[0], g, name="g")


# ---- Flags


def test_flags_of_each_models_servers() -> None:
    flags = {
        "job": "j",
        "mode": "bsp",
        "d.mode": "asp",
        "checkpoint_dir": "c",
        "restore": "auto",
        "metrics_file": "m.jsonl",
    }
    assert _models.flags_of("g", flags) == {
        "job": "j/g", "mode": "bsp", "checkpoint_dir": "c/g", "restore": "auto", "metrics_file": "m.g.jsonl"
    }  # fmt: skip
    assert _models.flags_of("d", {**flags, "restore": "old"}) == {
        "job": "j/d", "mode": "asp", "checkpoint_dir": "c/d", "restore": "old/d", "metrics_file": "m.d.jsonl"
    }  # fmt: skip


def test_pages_of_each_models_servers_are_on_ports_of_their_own() -> None:
    flags = {"http_listen": "127.0.0.1:8080", "d.http_listen": "127.0.0.1:9000"}
    assert _models.flags_of("g", flags, servers_before=4) == {"http_listen": "127.0.0.1:8084"}
    assert _models.flags_of("d", flags, servers_before=2) == {"http_listen": "127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models=g,g", "-m", "x"], "--models: a name comes twice"),
        (["--models=g,b=c", "-m", "x"], "--models: 'b=c' is no name of a model"),
        (["--models=g,d", "--q.mode=asp", "-m", "x"], "--q.mode: there is no model q; --models has g, d"),
        (["--models=g,d", "--workers=2", "--min_workers=1", "-m", "x"], "--min_workers: with --models the number of"),
        (["--models=g,d", "--d.budget=job", "-m", "x"], "--d.budget: with --models the number of workers is fixed"),
        (["--models=g,d", "--server=a:1", "-m", "x"], "an address for each of the models is expected, as in g=HOST"),
        (["--server=g=a:1,g=a:2", "-m", "x"], "--server: g comes twice"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_with_several_models(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"psrun: {message}")


def test_models_with_addresses_need_not_be_named_again() -> None:
    assert run.parse(["--server=g=a:1,d=unix:/x", "-m", "x"]).models == ("g", "d")
    assert run.parse(["--server=unix:/x=y", "-m", "x"]).models == ()
