"""Runs the PyTorch/Gloo program (function_pytorch.py) with the code's setting, and reads what it wrote."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from events import named, read_events

from .function_runs import WORKERS, Plan
from .lab import ExperimentFailed, Lab
from .made import read_mark
from .network import MODEL
from .program import run_program

_PROGRAM = Path(__file__).with_name("function_pytorch.py")
_IMPORT_LIMIT_S = 120


@dataclass
class Gloo:
    """What came of it, by interval."""

    missing: str = ""  # Why there is nothing.
    version: str = ""  # Of PyTorch.
    batch_losses: dict[int, list[float]] = field(default_factory=dict)  # Of rank 0, before each of its steps.
    thousand_epochs_s: dict[int, float] = field(default_factory=dict)


def run_gloo(lab: Lab, plan: Plan) -> Gloo:
    """All intervals of the plan, with its first seed; or what an earlier call left."""
    folder = lab.folder / "gloo"
    try:
        imported = run_program(
            lab, "import", [lab.python, "-c", "import torch; print(torch.__version__)"], folder, _IMPORT_LIMIT_S
        )
    except ExperimentFailed as failed:
        return Gloo(missing="PyTorch is not installed" if "No module named" in str(failed) else str(failed))
    gloo = Gloo(version=imported.out.read_text().strip())
    for interval in plan.gloo_intervals:
        try:
            steps = _steps(lab, plan, interval, folder / f"every{interval}", gloo.version)
        except ExperimentFailed as failed:
            return Gloo(missing=str(failed))
        gloo.batch_losses[interval] = [step["loss"] for step in steps]
        batch_s = (steps[-1]["t"] - steps[0]["t"]) / (len(steps) - 1)
        gloo.thousand_epochs_s[interval] = 1000 * plan.batches_per_epoch * batch_s
    return gloo


def _steps(lab: Lab, plan: Plan, interval: int, folder: Path, version: str) -> list[dict[str, Any]]:
    """Of rank 0."""
    flags = [
        *(f"--widths={MODEL.removeprefix('mlp:')}", f"--workers={WORKERS}", f"--samples={plan.samples}"),
        *(f"--batch_size={plan.batch}", f"--epochs={plan.gloo_epochs}", f"--seed={plan.seeds[0]}"),
        *(f"--local_steps={interval}", f"--learning_rate={plan.code.learning_rate}"),
        f"--average_every={int(plan.code.average_every.removesuffix('epochs')) * plan.batches_per_epoch}",
    ]
    identity = {"program": hashlib.sha256(_PROGRAM.read_bytes()).hexdigest(), "flags": flags, "version": version}
    mark, name = folder / "program.json", f"gloo-{folder.name}"
    done = read_mark(mark, identity) if lab.may_keep(name) else None
    if done is None:
        mark.unlink(missing_ok=True)
        began = time.monotonic()
        run_program(lab, "gloo", [lab.python, "-B", str(_PROGRAM), f"--folder={folder}", *flags], folder)
        made = lab.note_made(name, time.monotonic() - began)
        mark.write_text(json.dumps({**identity, **made}, indent=1) + "\n")
        lab.say(f"PyTorch/Gloo, gradients every {interval}: done")
    else:
        lab.note_kept(name, done, mark)
    return named(read_events(folder / "torch0.jsonl"), "step")
