"""What a job's weights are, and what they are compared with."""

import re
import subprocess

import checker
import plan as plans
from job import BIN, MODEL
from places import LEARNING_RATE


def _tensors_of(path):
    """What follows the header of a safetensors file."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def model(folder):
    """The tensors of the last checkpoint, as bytes; None: the job has not come to its end."""
    output = folder / "model.safetensors"
    command = [str(BIN / "ps_ctl"), "export", f"--from={folder}/checkpoints", f"--output={output}"]
    if subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0:
        return None
    return _tensors_of(output)


def replayed(folder, served):
    """The tensors that the recorded sets must have made (replay.cc); None: the record has holes."""
    lines = [checker.line_of_descent(parts) for parts in served]
    whole = [line for line in lines if [apply["version"] for apply in line] == list(range(1, plans.STEPS + 1))]
    if not whole:
        return None
    sets = "".join(" ".join(map(str, apply["ranks"])) + "\n" for apply in whole[0])
    output = folder / "replayed.safetensors"
    flags = [*MODEL, f"--steps={plans.STEPS}"]
    command = [str(BIN / "ps_replay"), str(plans.WORKERS), LEARNING_RATE, str(output), *flags]
    subprocess.run(command, input=sets, text=True, capture_output=True, timeout=60, check=True)
    return _tensors_of(output)


def hashes(folder):
    printed = "".join(path.read_text() for path in folder.glob("worker-*.out"))
    return set(re.findall(r"weights hash: (\w+)", printed))


def compare(one, outcome, undisturbed):
    """Adds to the outcome what is wrong, and what the weights were compared with."""
    if outcome.model is None:
        outcome.found.append("there is no checkpoint that can be exported")
    if len(outcome.hashes) > 1:
        outcome.found.append(f"several hashes were printed: {outcome.hashes}")
    # Replayed are gradients in float32.
    replayable = one.plan.mode == "bsp" and one.plan.form == "float32" and not one.plan.elastic
    if replayable and (again := replayed(one.folder, one.served)) is not None:
        outcome.compared = "; weights as replayed"
        if again != outcome.model:
            outcome.found.append("the weights are not those that the recorded sets of pushes make")
    if undisturbed is None:
        return
    outcome.compared += "; weights as of an undisturbed job"
    if outcome.model != undisturbed.model:
        outcome.found.append("the weights are not those of an undisturbed job")
    if not outcome.hashes <= undisturbed.hashes:
        outcome.found.append(f"the hash {outcome.hashes} is not that of an undisturbed job, {undisturbed.hashes}")
