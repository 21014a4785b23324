"""Jobs in which things go wrong, from a seed each:

    chaos BUILD_FOLDER [--seed=1] [--runs=20] [--mode=MODE] [--plan=FILE] [--shrink] [--keep=FOLDER]

Each run is a plan of events, which the seed gives (plan.py), carried out with real programs (run.py) and judged by
what they recorded (checker.py). What a run finds may depend on the moment, so a seed that failed need not fail again;
--shrink looks for fewer events that still fail.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # job.py

import clock
import doubles
import packets
import plan as plans
import run as runs
from shrink import shrink

SHOWN = 5  # Findings of a run; --keep writes all of them.


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", help="the build folder; its bin/ has the programs")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one has the next")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--mode", choices=plans.MODES, help="of all runs (default: one after another)")
    parser.add_argument("--plan", type=pathlib.Path, help="carry out this plan instead")
    parser.add_argument("--shrink", action="store_true", help="look for fewer events that still fail")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the plans and logs of failed runs")
    return parser.parse_args()


class Expected:
    """What jobs without events come to, where the weights do not depend on the moment."""

    def __init__(self):
        self._of_form = {}

    def of(self, plan):
        if plan.mode != "bsp" or plan.on_loss != "wait" or plan.elastic or plan.form not in plans.WHOLE:
            return None
        if plan.form not in self._of_form:
            outcome = runs.run(plan.undisturbed())
            if outcome.found:
                raise SystemExit(f"chaos: a run without events failed: {outcome.found}")
            self._of_form[plan.form] = outcome
        return self._of_form[plan.form]


def keep(folder, plan, outcome):
    place = folder / f"seed-{plan.seed}-{plan.mode}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "plan.json").write_text(plan.text())
    (place / "found.txt").write_text("\n".join(outcome.found) + "\n")
    for name, text in outcome.said.items():
        (place / name).write_text(text)


def prepare():
    """Says what cannot be played here."""
    why_not = None if packets.are_own() else packets.enter()
    if why_not is not None:
        print(f"no network of its own ({why_not}): instead of dropped packets, proxies hold them back", flush=True)
    if not clock.can_jump():
        print(f"no jumps of the clock: there is no {clock.LIBRARY}", flush=True)
    if not doubles.can_be():
        print(f"no doubled calls: {sys.executable} has no module grpc (python3-grpcio)", flush=True)


def show(plan, outcome, seconds):
    events = ", ".join(f"{event.what} {event.target}" for event in plan.events)
    came = f"{outcome.happened} of {len(plan.events)} events{outcome.compared}"
    counted = "".join(f", {count} {what}" for what, count in outcome.counted.items() if count > 0)
    job = f"{plan.mode}, {'workers come and go' if plan.elastic else plan.on_loss}, {plan.form}"
    print(f"seed {plan.seed}: {job}, {seconds:.1f} s, {came}{counted}: {events}", flush=True)
    for text in outcome.found[:SHOWN]:
        print(f"    {text}", flush=True)
    if len(outcome.found) > SHOWN:
        print(f"    and {len(outcome.found) - SHOWN} more", flush=True)


def main():
    asked = arguments()
    prepare()
    if asked.plan:
        todo = [plans.read(asked.plan.read_text())]
    else:
        todo = [plans.make(seed, asked.mode) for seed in range(asked.seed, asked.seed + asked.runs)]
    expected, failed = Expected(), 0
    for plan in todo:
        began = time.monotonic()
        outcome = runs.run(plan, expected.of(plan))
        show(plan, outcome, time.monotonic() - began)
        if not outcome.found:
            continue
        failed += 1
        if asked.keep:
            keep(asked.keep, plan, outcome)
        if asked.shrink:
            plan = shrink(plan, lambda fewer: bool(runs.run(fewer, expected.of(fewer)).found))
            print(plan.text(), flush=True)
    print(f"{len(todo) - failed} of {len(todo)} runs without a finding", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
