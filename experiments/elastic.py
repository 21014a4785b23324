"""Workers that come and go: what a job makes of those that it has, and what each coming and going costs the others.

The same is done with plain PyTorch, elastic torchrun over Gloo (elastic_pytorch.py), where --python has PyTorch.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import REPOSITORY
from experiments.lab import ExperimentFailed, JobSpec, Lab, guarded, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.job import Job, Part
from experiments.shared.metrics import read_events
from experiments.shared.pages import Table
from experiments.shared.processes import Child, wait_until

MODES = ("bsp", "asp")
COUNTS = (2, 5, 1, 3)  # Workers, one after another.
PHASE_S = 20.0, 1.5  # For so long each; in the full and the quick form, as everything that is a pair.
STEP_MS = 40, 10  # A batch takes at least so long, so that five workers need not share two cores.
MODEL, BATCH = "mlp:784,128,10", 64
RATE, MOMENTUM = {"bsp": 0.05, "asp": 0.05}, {"bsp": 0.9, "asp": 0.5}
SAMPLES = 60_000
# What one coming and one going costs: a model of 100 MB, whose steps take 300 ms.
LARGE, LARGE_BATCH, LARGE_STEP_MS = ("mlp:784,5000,4300,10", "mlp:784,500,430,10"), 8, (300, 40)
GRACE_S = 1.0  # --reconnect_grace has it by default.
# Workers are killed, and another one comes a while later.
KILLS, KILL_EVERY_S, COMES_AFTER_S = (4, 2), (60.0, 4.0), (10.0, 1.0)
BIN_S = 0.5  # Losses are means over so long.
TIMES = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) \w ps_server: (.*)$")


# ---- A job whose workers come and go


class Crew:
    """Its workers, oldest first; and when what was done to them."""

    def __init__(self, lab: Lab, job: Job, worker: list[str]) -> None:
        self._lab, self._job, self._worker = lab, job, worker
        self.members: list[Child] = []
        self.moments: list[tuple[str, float]] = []
        self._count = 0

    def begin(self, count: int, server: list[str]) -> None:
        self._job.start(self._lab.bin, [Part(server)], [Part(self._worker) for _ in range(count)])
        self.members, self._count = list(self._job.workers), count
        self.until("training", lambda: '"apply"' in self.file(0, "server").read_text())
        self._note("training")

    def file(self, number: int, kind: str = "worker") -> Path:
        return self._job.folder / f"{kind}{number}.jsonl"

    def add(self) -> int:
        name = f"worker{self._count}"
        command = Part(self._worker).command(
            self._lab.bin / "ps_worker", self._job.folder, name, [f"--server={self._job.chief}"]
        )
        self._note("add")
        self.members.append(self._job.start_worker(name, command))
        self._count += 1
        return self._count - 1

    def remove(self, how: int, which: int = -1) -> None:
        """SIGTERM asks it to leave, which it has done when this returns."""
        gone = self.members.pop(which)
        self._note("kill" if how == signal.SIGKILL else "drain")
        gone.signal(how)
        self.until(f"{gone.name} to end", lambda: not gone.running)
        self._job.workers.remove(gone)

    def become(self, count: int) -> None:
        """Of those that are too many the newer half is asked to leave, and the others are killed."""
        while len(self.members) < count:
            self.add()
        too_many = len(self.members) - count
        for number in range(too_many):
            self.remove(signal.SIGTERM if number < (too_many + 1) // 2 else signal.SIGKILL)

    def until(self, what: str, true: Callable[[], Any], limit_s: float = 60) -> None:
        if not wait_until(true, limit_s, lambda: self._lab.stop.requested):
            if self._lab.stop.requested:
                raise KeyboardInterrupt
            raise ExperimentFailed(f"{self._job.folder.name}: waited {limit_s:g} s for {what}")

    def stay(self, seconds: float) -> None:
        """The job goes on like this."""
        end = time.monotonic() + seconds
        self.until("nothing", lambda: time.monotonic() >= end, seconds + 60)

    def _note(self, what: str) -> None:
        self.moments.append((what, time.time()))


@contextmanager
def job_of(lab: Lab, folder: Path) -> Iterator[Job]:
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    with guarded(lab, folder.name, folder) as job:
        yield job


def play(
    lab: Lab, name: str, count: int, server: list[str], worker: list[str], act: Callable[[Crew], None], ends: bool
) -> list[tuple[str, float]]:
    """Runs the job, or takes what an earlier run left: the moments. `ends`: after `act` its work comes to its end."""
    folder = lab.folder / name

    def make() -> dict[str, Any]:
        with job_of(lab, folder) as job:
            crew = Crew(lab, job, worker)
            crew.begin(count, server)
            act(crew)
            if ends:
                job.wait(300)
            crew.moments.append(("end", time.time()))
        return {"moments": crew.moments}

    programs = [lab.file_hash(program) for program in ("ps_server", "ps_worker")]
    identity = {"programs": programs, "flags": [server, worker], "count": count, "form": lab.quick}
    stored = lab.once(name, folder / "job.json", identity, make, ("moments",))
    return [(what, at) for what, at in stored["moments"]]


def flags_of(lab: Lab, mode: str, most: int) -> tuple[list[str], list[str]]:
    """Of the server, without --min_workers and its kind where `most` is 0; and of workers, but for the end."""
    server = [f"--mode={mode}", "--budget=job", f"--learning_rate={RATE[mode]}"]
    server += ["--optimizer=momentum", f"--momentum={MOMENTUM[mode]}"]
    server += ["--min_workers=1", f"--max_workers={most}"] if most else []
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    return server, [*worker, f"--experiment_step_time={lab.pick(*STEP_MS)}ms", "--eval_every=0"]


def could(lab: Lab) -> float:
    """Samples a second of a worker that does nothing but compute."""
    return BATCH / (lab.pick(*STEP_MS) / 1e3)


def epochs(lab: Lab, workers: float, seconds: float) -> str:
    return f"--epochs={workers * could(lab) * seconds / SAMPLES:.4f}"


# ---- What has become of it


def versions(folder: Path) -> pd.DataFrame:
    """When each was made, of whose pushes that count, of how many samples."""
    chief = read_events(folder / "server0.jsonl")
    zero = chief.start_unix_s or 0.0
    rows = []
    for each in chief.named("apply"):
        counts = [rank for rank, samples in zip(each["ranks"], each["samples"], strict=True) if samples > 0]
        rows.append((zero + each["t"], counts, sum(each["samples"])))
    return pd.DataFrame(rows, columns=["unix_s", "ranks", "samples"])


def steps(folder: Path) -> pd.DataFrame:
    """All batches of all workers: `worker`, unix_s, loss."""
    rows = []
    for path in sorted(folder.glob("worker*.jsonl")):
        events = read_events(path)
        zero = events.start_unix_s or 0.0
        rows += [(path.stem, zero + step["t"], step["loss"], step["samples"]) for step in events.named("step")]
    return pd.DataFrame(rows, columns=["worker", "unix_s", "loss", "samples"])


def present(made: pd.DataFrame, at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many workers there are at these times: each from its first batch's end to its last's."""
    count = np.zeros(len(at), dtype=int)
    for _, own in made.groupby("worker"):
        count += (at >= own["unix_s"].min()) & (at <= own["unix_s"].max())
    return count


def middle_rate(folder: Path) -> float:
    """Samples a second of a job of a fixed size, without its begin and its end."""
    made = versions(folder)
    begin, end = made["unix_s"].iloc[0], made["unix_s"].iloc[-1]
    inside = made[made["unix_s"].between(begin + 0.2 * (end - begin), begin + 0.9 * (end - begin))]
    return float(inside["samples"].iloc[1:].sum() / (inside["unix_s"].iloc[-1] - inside["unix_s"].iloc[0]))


def share_of_fixed(folder: Path, until: float, rates: dict[int, float]) -> float:
    """Samples that count, of those that jobs of the fixed sizes would have made with as many workers at each time."""
    made, whole = steps(folder), versions(folder)
    begin = float(whole["unix_s"].iloc[0])
    at = np.arange(begin, until, 0.01)
    there = present(made, at)
    expected = sum(rates[count] * float((there == count).sum()) * 0.01 for count in set(there.tolist()) - {0})
    counted = whole[(whole["unix_s"] > begin) & (whole["unix_s"] <= until)]["samples"].sum()
    return float(counted / expected)


def longest_without(made: pd.DataFrame, begin: float, end: float) -> float:
    """Seconds between two versions, at most, in this time."""
    inside = made["unix_s"][made["unix_s"].between(begin, end)]
    times = [begin, *inside, end] if inside.empty else list(inside)
    return float(max(np.diff(times), default=end - begin))


def said(folder: Path, pattern: str) -> list[float]:
    """When the chief's log said this."""
    found = []
    for line in (folder / "server0.log").read_text(errors="replace").splitlines():
        timed = TIMES.match(line)
        if timed and re.search(pattern, timed[2]):
            found.append(datetime.fromisoformat(timed[1]).timestamp())
    return found


def counted_too_often(folder: Path) -> int:
    """Samples in all versions, less those of the job's budget."""
    (terms,) = read_events(folder / "server0.jsonl").named("runs")
    epochs, left = divmod(terms["runs"], terms["runs_per_epoch"])
    budget = epochs * terms["samples"] + left * terms["batch_size"]
    return int(versions(folder)["samples"].sum()) - int(budget)


def loss_over_time(made: pd.DataFrame, begin: float) -> pd.DataFrame:
    """Means over BIN_S: seconds since the begin, loss."""
    bins = ((made["unix_s"] - begin) // BIN_S).astype(int)
    means = made.groupby(bins)["loss"].mean()
    return pd.DataFrame({"s": (means.index + 0.5) * BIN_S, "loss": means.to_numpy()})


# ---- The parts


@dataclass
class Changing:
    """A job whose size changes."""

    name: str
    begin: float
    made: pd.DataFrame  # As of steps().
    share: float | None  # Of what jobs of the fixed sizes make.
    still_s: float  # The longest time without a step.
    repeated: int  # Samples that were trained twice; below 0: so many were lost.

    def counts(self) -> tuple[list[float], list[int]]:
        at = np.arange(self.begin, self.made["unix_s"].max(), 0.1)
        return list(at - self.begin), list(present(self.made, at))


def change_size(lab: Lab, mode: str, rates: dict[int, float]) -> Changing:
    server, worker = flags_of(lab, mode, max(COUNTS))
    phase_s = lab.pick(*PHASE_S)

    def act(crew: Crew) -> None:
        for count in COUNTS:
            crew.become(count)
            crew.stay(phase_s)

    name = f"changing-{mode}"
    worker = [*worker, epochs(lab, sum(COUNTS) + 0.5 * COUNTS[-1], phase_s)]
    moments = play(lab, name, COUNTS[0], server, worker, act, ends=True)
    folder = lab.folder / name
    begin = moments[0][1]
    until = begin + phase_s * len(COUNTS)
    still = longest_without(versions(folder), begin, until)
    share = share_of_fixed(folder, until, rates)
    return Changing(f"{mode}, here", begin, steps(folder), share, still, counted_too_often(folder))


def fixed_rates(lab: Lab, mode: str) -> dict[int, float]:
    server, worker = flags_of(lab, mode, 0)
    rates = {}
    for count in range(1, max(COUNTS) + 1):
        length = epochs(lab, count, lab.pick(8.0, 1.5))
        job = run_job(lab, JobSpec(f"fixed-{mode}-{count}", count, server, [*worker, length], shared_memory=True))
        rates[count] = middle_rate(job.folder)
    return rates


def fixed_losses(lab: Lab, mode: str, count: int) -> Changing:
    """For the figure: as long as the changing one."""
    server, worker = flags_of(lab, mode, 0)
    length = epochs(lab, count, lab.pick(*PHASE_S) * len(COUNTS))
    job = run_job(lab, JobSpec(f"long-{mode}-{count}", count, server, [*worker, length], shared_memory=True))
    made = versions(job.folder)
    begin, end = float(made["unix_s"].iloc[0]), float(made["unix_s"].iloc[-1])
    still = longest_without(made, begin, end)
    return Changing(f"{mode}, always {count}", begin, steps(job.folder), 1.0, still, counted_too_often(job.folder))


def change_torchrun(lab: Lab) -> Changing | None:
    """The same with torchrun; nothing where there is no PyTorch."""
    has = subprocess.run([lab.python, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    if not has:
        return None
    folder, phase_s = lab.folder / "changing-torchrun", lab.pick(*PHASE_S)
    script = REPOSITORY / "experiments/elastic_pytorch.py"

    def make() -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with job_of(lab, folder) as job:
            command = [lab.python, "-m", "torch.distributed.run", f"--nnodes=1:{max(COUNTS)}", "--nproc_per_node=1"]
            command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--max_restarts=1000"]
            # As fast as it can notice: by default it waits half a minute for more members, and 15 s for a lost one.
            command += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"]
            command += ["--monitor_interval=0.1", str(script), f"--folder={folder}", f"--batch={BATCH}"]
            command += [f"--step_ms={lab.pick(*STEP_MS)}", f"--learning_rate={RATE['bsp']}"]
            members: list[Child] = []
            numbers = itertools.count()

            def add() -> None:
                members.append(job.start_worker(f"agent{next(numbers)}", command, {"OMP_NUM_THREADS": "1"}))

            def trained() -> bool:
                return any(path.stat().st_size > 0 for path in folder.glob("steps-*.jsonl"))

            for _ in range(COUNTS[0]):
                add()
            if not wait_until(trained, 120, lambda: lab.stop.requested):
                raise ExperimentFailed("torchrun did not train within 120 s; see changing-torchrun/agent0.log")
            begin = time.time()
            for count in COUNTS:
                while len(members) < count:
                    add()
                too_many = len(members) - count
                for number in range(too_many):
                    members.pop().signal(signal.SIGTERM if number < (too_many + 1) // 2 else signal.SIGKILL)
                end = time.monotonic() + phase_s
                wait_until(lambda end=end: time.monotonic() >= end, phase_s + 10, lambda: lab.stop.requested)
            until = time.time()
        return {"begin": begin, "until": until}

    identity = {"script": script.read_text(), "python": lab.python, "form": lab.quick, "counts": COUNTS}
    stored = lab.once("changing-torchrun", folder / "job.json", identity, make, ("begin", "until"))
    rows, begin, until = [], stored["begin"], stored["until"]
    for path in sorted(folder.glob("steps-*.jsonl")):
        rows += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    made = pd.DataFrame(rows)
    made = made[made["unix_s"].between(begin, until)]
    lead = made.sort_values("unix_s").drop_duplicates(["round", "position"])
    whole = lead.assign(ranks=None)[["unix_s", "ranks", "samples"]]
    # A restart goes on from a snapshot: what was trained since then is trained again.
    ends = lead.groupby("round")["position"].agg(["min", "max"]).sort_index()
    repeated = int((ends["max"].shift() - ends["min"]).clip(lower=0).sum())
    return Changing("torchrun", begin, made, None, longest_without(whole, begin, until), repeated)


def torchrun_share(found: Changing, rates: dict[int, float], phase_s: float) -> float:
    """Distinct samples, of those that bsp's jobs of the fixed sizes would have made in each phase."""
    samples = found.made["samples"].sum() - found.repeated
    return float(samples / sum(rates[count] * phase_s for count in COUNTS))


def large_flags(lab: Lab) -> tuple[list[str], list[str]]:
    server = ["--mode=bsp", "--budget=job", "--learning_rate=0.01", "--min_workers=1", "--max_workers=3"]
    worker = [f"--model={lab.pick(*LARGE)}", "--activation=relu", "--dataset=fashion-mnist", "--epochs=100"]
    return server, [*worker, f"--batch_size={LARGE_BATCH}", f"--experiment_step_time={lab.pick(*LARGE_STEP_MS)}ms"]


def costs(lab: Lab) -> dict[str, float]:
    """What a coming, a leaving and a loss cost; seconds."""
    server, worker = large_flags(lab)
    folder = lab.folder / "costs"
    calm_s = lab.pick(6.0, 1.0)

    def joined(count: int, folder: Path = folder) -> bool:
        return len(said(folder, r"^rank \d+ \(.*\) joined")) >= count

    def act(crew: Crew) -> None:
        crew.stay(calm_s)
        crew.add()
        crew.until("the third to join", lambda: joined(3))
        crew.stay(calm_s)
        crew.remove(signal.SIGTERM)
        crew.stay(calm_s)
        crew.add()
        crew.until("the fourth to join", lambda: joined(4))
        crew.add()
        crew.until("it to stand by", lambda: len(said(folder, "stands by")) >= 1)
        crew.stay(calm_s)
        crew.remove(signal.SIGKILL, -2)
        crew.until("the standby to join", lambda: joined(5))
        crew.stay(calm_s)

    moments = play(lab, "costs", 2, server, worker, act, ends=False)
    at = {what: [when for each, when in moments if each == what] for what in ("training", "drain", "kill", "end")}
    made = versions(folder)
    begin, drain, kill = at["training"][0], at["drain"][0], at["kill"][0]
    third = said(folder, r"^rank 2 \(.*\) joined")[0]
    with_third = float(made[(made["unix_s"] > third) & made["ranks"].map(lambda ranks: 2 in ranks)]["unix_s"].iloc[0])
    quiet = made["unix_s"][made["unix_s"].between(begin + 0.3 * calm_s, third)]
    median = float(np.diff(quiet).mean() if len(quiet) < 3 else np.median(np.diff(quiet)))
    with_three = made["unix_s"][made["unix_s"].between(with_third, drain)]
    three = float(np.median(np.diff(with_three)))
    lost = said(folder, r"connection broke|was lost|is lost")
    standby = said(folder, r"^rank \d+ \(.*\) starts at step")[-1]
    after = made["unix_s"][made["unix_s"] > kill]
    # The step in which it was lost ends without it, or, if its push had come, with it; then the next one has to wait.
    next_step = float(max(np.diff([kill, *after[after < kill + GRACE_S + 5]])))
    return {
        "median": median,
        "three": three,
        "join": with_third - third,
        "longest_in_join": longest_without(made, third - median, with_third + 2 * three),
        "longest_in_drain": longest_without(made, drain - three, drain + 4 * three),
        "kill": next_step,
        "standby": standby - max(when for when in lost if when <= standby),
    }


def goodput(lab: Lab, rates: dict[int, float]) -> tuple[float, int]:
    """Under kills: the share of what those who were alive could do, and how many were killed."""
    server, worker = flags_of(lab, "bsp", 4)
    every_s, later_s, kills = lab.pick(*KILL_EVERY_S), lab.pick(*COMES_AFTER_S), lab.pick(*KILLS)

    def act(crew: Crew) -> None:
        for number in range(kills):
            crew.stay(every_s / 2)
            crew.remove(signal.SIGKILL, number % 4)
            crew.stay(later_s)
            crew.add()
            crew.stay(every_s / 2 - later_s)

    worker = [*worker, epochs(lab, 4, 2 * every_s * kills)]
    moments = play(lab, "goodput", 4, server, worker, act, ends=False)
    until = moments[-1][1]
    return share_of_fixed(lab.folder / "goodput", until, rates), kills


# ---- The page


def run(lab: Lab) -> Page:
    rates = {mode: fixed_rates(lab, mode) for mode in MODES}
    ours = {mode: change_size(lab, mode, rates[mode]) for mode in MODES}
    fixed = [fixed_losses(lab, "bsp", count) for count in (min(COUNTS), 3)]
    torchrun = change_torchrun(lab)
    cost = costs(lab)
    good, kills = goodput(lab, rates["bsp"])
    phase_s = lab.pick(*PHASE_S)
    sizes = Table("While the number of workers changes", ["job", "samples/s, of those of fixed sizes",
                  "longest time without a step, s", "samples repeated or lost"])  # fmt: skip
    for mode in MODES:
        repeated = f"{ours[mode].repeated:,}"
        sizes.rows.append([ours[mode].name, f"{ours[mode].share:.3f}", f"{ours[mode].still_s:.2f}", repeated])
    if torchrun is None:
        sizes.rows.append(["torchrun", "not measured: no PyTorch", "", ""])
    else:
        share = torchrun_share(torchrun, rates["bsp"], phase_s)
        sizes.rows.append(["torchrun", f"{share:.3f}", f"{torchrun.still_s:.2f}", f"{torchrun.repeated:,}"])
    finding = (
        f"From 2 to 5, 1 and 3 workers, bsp makes {ours['bsp'].share:.1%} and asp {ours['asp'].share:.1%} of the steps "
        f"of jobs of these sizes; a newcomer's first push into a model of 100 MB counts {cost['join']:.1f} s after it "
        f"has joined."
    )
    return Page(
        "Workers that come and go",
        finding,
        "elastic.md.j2",
        expected=_claims(ours, cost, good, kills),
        expected_column="target",
        tables={"sizes": sizes, "rates": _rates(rates)},
        figures=[_figure([ours["bsp"], ours["asp"], *fixed, *([torchrun] if torchrun else [])], phase_s)],
        values={"phase_s": phase_s, "step_ms": lab.pick(*STEP_MS), "torchrun": torchrun, "kills": kills, "cost": cost,
                "every_s": lab.pick(*KILL_EVERY_S), "later_s": lab.pick(*COMES_AFTER_S),
                "large": lab.pick(*LARGE), "large_step_ms": lab.pick(*LARGE_STEP_MS)},
    )  # fmt: skip


def _rates(rates: dict[str, dict[int, float]]) -> Table:
    table = Table("Jobs of fixed sizes, samples/s", ["workers", *rates])
    for count in rates[MODES[0]]:
        table.rows.append([str(count), *(f"{own[count]:,.0f}" for own in rates.values())])
    return table


def _claims(ours: dict[str, Changing], cost: dict[str, float], good: float, kills: int) -> list[Claim]:
    median, three = cost["median"], cost["three"]
    at_most = [
        ("100 MB: a newcomer, from its join to its first push that counts", 0.5 + 3 * three, cost["join"],
         f"500 ms + 3 steps of {three:.2f} s"),
        ("the others' longest step meanwhile", 1.3 * max(median, three) + 0.05, cost["longest_in_join"],
         f"1.3 steps of {max(median, three):.2f} s + 50 ms"),
        ("the longest step while one is asked to leave", 1.2 * three, cost["longest_in_drain"], "1.2 steps"),
        ("the longest time between two steps around a SIGKILL", GRACE_S + 0.1 + three, cost["kill"],
         "the grace of 1 s, 100 ms and the step"),
        ("a standby in the place of a lost one, after the loss was noticed", 0.3, cost["standby"], "300 ms"),
    ]  # fmt: skip
    claims = [
        Claim(what, f"at most {most:.2f} s", f"{is_s:.2f} s", is_s <= most, f"{why}.")
        for what, most, is_s, why in at_most
    ]
    for mode, found in ours.items():
        assert found.share is not None
        what = f"{mode}, {' → '.join(map(str, COUNTS))} workers: samples, of those of jobs of fixed sizes"
        claims.append(
            Claim(what, "at least 0.95", f"{found.share:.3f}", found.share >= 0.95, "Two leave, two are killed.")
        )
        what = f"{mode}, the same: samples repeated or lost"
        claims.append(Claim(what, "0", f"{found.repeated}", found.repeated == 0, "All versions, beside the budget."))
    what = f"bsp, four workers and {kills} kills: samples, of what those who were alive could do"
    claims.append(Claim(what, "at least 0.95", f"{good:.3f}", good >= 0.95, "Each costs the others the grace."))
    return claims


def _figure(found: list[Changing], phase_s: float) -> Figure:
    length = phase_s * len(COUNTS)

    def draw(panels: Any, colours: Colours) -> None:
        above, below = panels
        for one, name in zip(found, SERIES, strict=False):
            at, counts = one.counts()
            style = DASHED if "always" in one.name else "-"
            below.step(at, counts, where="post", color=colours[name], linewidth=1.2, linestyle=style, label=one.name)
            loss = loss_over_time(one.made, one.begin)
            loss = loss[loss["s"].between(0, length)]
            above.plot(loss["s"], loss["loss"], color=colours[name], linewidth=1.2, linestyle=style)
        above.set_ylabel("training loss")
        above.set_yscale("log")
        below.set_ylabel("workers that train")
        below.set_xlim(0, length)
        below.set_ylim(0, max(COUNTS) + 0.5)

    caption = "Losses are means over half a second; a worker trains from its first batch to its last."
    return Figure("sizes", "Loss and workers over time", caption, "seconds", "", draw, 4.6, 2, 2)
