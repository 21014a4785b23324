"""Judges a run by what servers and workers have recorded. It shares no code with the product.

The line of descent of a shard is what its weights are made of: each generation begins with the version of a checkpoint,
so of an earlier one only versions up to that belong to it.
"""

import dataclasses
import itertools

GATHERING = ["bsp", "backup", "local_sgd", "diloco"]


@dataclasses.dataclass
class Records:
    mode: str
    on_loss: str
    workers: int
    served: list  # Of each shard, its parts in the order of generations.
    pushed: list  # Of all workers.
    samples: int | None = None  # Where workers come and go: so many count, each once. Else it depends on who was lost.


def problems(records):
    """Sentences; empty if all is well."""
    found = []
    lines = [line_of_descent(served) for served in records.served]
    for shard, served in enumerate(records.served):
        where = f"shard {shard}"
        found += [f"{where}: {text}" for text in _versions_grow(served)]
        found += [f"{where}: {text}" for text in _counted_once(lines[shard])]
        found += [f"{where}: {text}" for text in _answers_are_true(shard, served, records.pushed)]
        found += [f"{where}: {text}" for text in _no_version_is_lost(served, lines[shard])]
        if records.samples is None:  # Else a rank has many owners, and what counts are the samples.
            found += [f"{where}: {text}" for text in _no_step_is_lost(served, lines[shard], records.pushed)]
        if records.mode in GATHERING:
            found += [f"{where}: {text}" for text in _steps_are_versions(records, lines[shard])]
    if records.mode in [*GATHERING, "diloco_quorum"]:
        found += _same_sets(records.served)
    if records.mode not in GATHERING:
        found += _computed_on(records)
    if records.samples is not None:
        found += _each_sample_counts(records, lines)
    found += _workers_see_versions_grow(records.pushed)
    return found


def _base(part):
    return part.applied[0]["version"] - 1


def line_of_descent(served):
    line, limit = [], None
    for part in reversed(served):
        belongs = [apply for apply in part.applied if limit is None or apply["version"] <= limit]
        line = belongs + line
        if part.applied:
            limit = _base(part) if limit is None else min(limit, _base(part))
    return line


def _versions_grow(served):
    for part in served:
        versions = [apply["version"] for apply in part.applied]
        if versions != list(range(versions[0], versions[0] + len(versions))) if versions else False:
            yield f"generation {part.generation}: versions do not grow by one: {_around_a_jump(versions)}"


def _around_a_jump(versions):
    jump = next(i for i in range(1, len(versions)) if versions[i] != versions[i - 1] + 1)
    return versions[max(0, jump - 2) : jump + 2]


def _counted_once(line):
    counted = {}
    for apply in line:
        for rank, step in zip(apply["ranks"], apply["steps"], strict=True):
            if (rank, step) in counted:
                yield f"rank {rank}'s push of step {step} counts twice: {counted[rank, step]} and {apply['version']}"
            counted[rank, step] = apply["version"]


def _answers_are_true(shard, served, pushed):
    """What was APPLIED is in the record of its generation, and what was STALE is not."""
    parts = {part.generation: part for part in served}
    pushes = {generation: part.pushes() for generation, part in parts.items()}
    before = {part.generation: {push for other in _until(served, part) for push in other.pushes()} for part in served}
    for push in pushed:
        part = parts.get(push.generation)
        identity, answer = (push.rank, push.step), push.answers[shard]
        what = f"{push.worker}: rank {push.rank}'s push of step {push.step} in generation {push.generation}"
        if answer == "STALE" and part is not None and identity in pushes[push.generation]:
            yield f"{what} was STALE, and was applied"
        known = part is not None and part.ended and push.samples > 0
        if answer == "APPLIED" and known and identity not in pushes[push.generation]:
            yield f"{what} was APPLIED, and is not in the record"
        if answer == "DUPLICATE" and known and identity not in before[push.generation]:
            yield f"{what} was a DUPLICATE, and is in no record"


def _until(served, part):
    return [other for other in served if other.generation <= part.generation]


def _cut_off(served):
    """The last versions of servers that were killed and have not written their last lines."""
    return {part.applied[-1]["version"] for part in served if part.applied and not part.ended}


def _no_version_is_lost(served, line):
    cut_off = _cut_off(served)
    for before, after in itertools.pairwise([0] + [apply["version"] for apply in line]):
        if after != before + 1 and before not in cut_off:
            yield f"version {after} comes after {before} in the line of descent"


def _no_step_is_lost(served, line, pushed):
    owners = {}
    for push in pushed:
        owners.setdefault(push.rank, set()).add((push.worker, push.incarnation))
    steps = {}
    for apply in line:
        for rank, step in zip(apply["ranks"], apply["steps"], strict=True):
            steps.setdefault(rank, []).append(step)
    for rank, made in steps.items():
        # Whoever takes over a rank may begin at a later step. In backup a push that came too late is refused.
        holes = [pair for pair in itertools.pairwise([-1, *made]) if pair[1] != pair[0] + 1]
        refused = any(push.rank == rank and "STALE" in push.answers for push in pushed)
        if holes and len(owners.get(rank, ())) == 1 and not refused and not _cut_off(served):
            yield f"rank {rank}'s steps have holes in the line of descent: {holes[:3]}"


def _each_sample_counts(records, lines):
    """A push counts that any shard has applied; what its worker was lost with before that is another worker's.

    So is one that every shard refused (--stale_runs=return), unless the worker was lost before it could say so.
    """
    counted = {}
    for line in lines:
        for apply in line:
            for rank, step, samples in zip(apply["ranks"], apply["steps"], apply["samples"], strict=True):
                if counted.setdefault((rank, step), samples) != samples:
                    elsewhere = counted[rank, step]
                    yield f"rank {rank}'s push of step {step} has {samples} samples, and {elsewhere} elsewhere"
    whole = all(_is_whole(line) for line in lines)
    owned = {}
    for push in records.pushed:
        owned.setdefault((push.worker, push.incarnation, push.generation), []).append(push)
    untold = any(set(push.answers) == {"STALE"} for pushes in owned.values() for push in pushes[-2:])
    total = sum(counted.values())
    if total > records.samples or (whole and not untold and total < records.samples):
        yield f"{total} samples count, and not {records.samples}"


def _is_whole(line):
    """No server was killed before it had written what it applied."""
    return [apply["version"] for apply in line] == list(range(1, len(line) + 1))


def _steps_are_versions(records, line):
    for apply in line:
        version = apply["version"]
        if any(step != version - 1 for step in apply["steps"]):
            yield f"version {version} is made of steps {apply['steps']}"
        if apply["ranks"] != sorted(set(apply["ranks"])):
            yield f"version {version} is made of ranks {apply['ranks']}, which are not in their order"
        whole = records.mode != "backup" and records.on_loss == "wait"
        if whole and apply["ranks"] != list(range(records.workers)):
            yield f"version {version} is made of ranks {apply['ranks']}, though lost ones are waited for"


def _same_sets(served):
    """Every shard makes a version of the same pushes."""
    sets = {}
    for shard, parts in enumerate(served):
        for part in parts:
            for apply in part.applied:
                pushes = list(zip(apply["ranks"], apply["steps"], strict=True))
                made_of = sets.setdefault((part.generation, apply["version"]), (shard, pushes))
                if made_of[1] != pushes:
                    yield (
                        f"generation {part.generation}, version {apply['version']}: shard {made_of[0]} has taken the "
                        f"pushes (rank, step) {made_of[1]}, shard {shard} {pushes}"
                    )


def _computed_on(records):
    """The staleness of a push is of the version that the worker says it computed on: the lowest of all shards'."""
    told = {(push.generation, push.rank, push.step): push.version for push in records.pushed}
    computed_on = {}
    for served in records.served:
        for part in served:
            for apply in part.applied:
                for rank, step, staleness in zip(apply["ranks"], apply["steps"], apply["staleness"], strict=True):
                    if staleness < 0:
                        push = f"rank {rank}'s push of step {step}"
                        yield f"version {apply['version']}: {push} is {staleness} versions old"
                    pushed_on = computed_on.setdefault((part.generation, rank, step), [])
                    pushed_on.append(apply["version"] - 1 - staleness)
    for (generation, rank, step), versions in computed_on.items():
        version = told.get((generation, rank, step))
        if version is not None and len(versions) == len(records.served) and version != min(versions):
            yield (
                f"generation {generation}: rank {rank}'s push of step {step} was computed on version {version}, "
                f"as its worker says, and on {versions}, as the servers say"
            )


def _workers_see_versions_grow(pushed):
    seen = {}
    for push in pushed:
        key = (push.worker, push.generation)
        if push.version < seen.get(key, 0):
            yield f"{push.worker}, generation {push.generation}: version {push.version} came after {seen[key]}"
        seen[key] = push.version
