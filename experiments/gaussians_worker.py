"""A worker of the Gaussians experiment, for psrun and a Python that has PyTorch: rounds of AdamW on one shard.

What the seed decides is drawn in the order in which asyncdiloco's notebook draws it, so that data, weights and batches
are those of the losses that it prints.

    psrun --workers=4 --mode=diloco --optimizer=local … experiments/gaussians_worker.py --output=FILE --rounds=5
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from psgrad.torch import DistributedOptimizer

SEED = 42
FEATURES, CLASSES, CENTRES = 512, 4, 8  # So many centres a class.
NOISE = 0.5
SAMPLES, SHARDS, EVALUATED = 128_000, 4, 10_000
BATCH, STEPS = 32, 20  # A round has so many steps.
FEW = 500
RATE, LEAST_RATE, DECAY = 2e-4, 1e-6, 1e-3


class Samples(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def mixture() -> tuple[list[Samples], Samples]:
    """The shards, and what is evaluated on."""
    random.seed(SEED)
    generator = np.random.RandomState(SEED)
    centres = generator.randn(CENTRES * CLASSES, FEATURES)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    each = SAMPLES // len(centres)
    x = np.concatenate([(NOISE * generator.randn(each, FEATURES) + centre).astype(np.float32) for centre in centres])
    all_samples = Samples(torch.from_numpy(x), torch.arange(CLASSES).repeat_interleave(each * CENTRES))
    order = list(range(SAMPLES))
    random.shuffle(order)
    of_shard = SAMPLES // SHARDS
    shards = [order[first : first + of_shard] for first in range(0, SAMPLES, of_shard)]
    evaluated = random.sample(list(range(SAMPLES)), EVALUATED)
    chosen = [Samples(all_samples.x[indices], all_samples.y[indices]) for indices in (*shards, evaluated)]
    return chosen[:-1], chosen[-1]


def batches(updates: int) -> list[np.ndarray]:
    """By shard: the order of its samples, of which each update takes the next."""
    random.seed(SEED)
    of_shard = SAMPLES // SHARDS
    orders = []
    for _ in range(SHARDS):
        passes = []
        for _ in range(max(updates * BATCH // of_shard * 2, 1)):
            order = np.arange(of_shard)
            random.shuffle(order)
            passes.append(order)
        orders.append(np.concatenate(passes))
    return orders


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
    )  # fmt: skip


def rate_of(update: int, updates: int) -> float:
    """Each round's first step has the whole rate, as there."""
    if update % STEPS == 0:
        return RATE
    return LEAST_RATE + (RATE - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(update / updates, 1.0)))


@torch.no_grad()
def loss_of(model: torch.nn.Module, samples: Samples) -> float:
    total = 0.0
    for x, y in zip(samples.x.split(256), samples.y.split(256), strict=True):
        total += float(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"))
    return total / len(samples.y)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="a file for rank 0's losses")
    parser.add_argument("--width", type=int, default=65_000)
    parser.add_argument("--updates", type=int, required=True, help="of each shard, for the schedule")
    parser.add_argument("--rounds", type=int, default=0, help="of each worker")
    parser.add_argument("--seconds", type=float, default=0, help="in place of rounds; not for a barrier")
    parser.add_argument("--step_ms", default="0", help="what a step takes at least, by rank: 5.8,7.5,15.1,33.3")
    options = parser.parse_args()
    torch.set_num_threads(1)  # There are more workers than processors.
    shards, evaluated = mixture()
    orders = batches(options.updates)
    model = network(options.width)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    with DistributedOptimizer(adamw, model) as optimizer:
        rank = optimizer.rank
        shard, order = shards[rank], orders[rank]
        paces = [float(ms) / 1e3 for ms in options.step_ms.split(",")]
        pace = paces[rank % len(paces)]
        # A part of them, which takes no time worth counting, where the clock decides.
        on_the_way = Samples(evaluated.x[:FEW], evaluated.y[:FEW]) if options.seconds else evaluated
        losses = [(0.0, loss_of(model, on_the_way))] if rank == 0 else []
        began, update = time.monotonic(), 0
        while update < options.rounds * STEPS if options.rounds else time.monotonic() - began < options.seconds:
            step_began = time.monotonic()
            chosen = torch.from_numpy(order[update * BATCH % len(order) :][:BATCH])
            adamw.param_groups[0]["lr"] = rate_of(update, options.updates)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(shard.x[chosen]), shard.y[chosen]).backward()
            time.sleep(max(0.0, pace - (time.monotonic() - step_began)))  # It stands for a slower machine.
            optimizer.step()
            update += 1
            if update % STEPS:
                continue
            adamw.state.clear()  # It begins anew in each round there.
            if rank == 0:
                now = time.monotonic() - began
                with optimizer.global_weights():
                    losses.append((now, loss_of(model, on_the_way)))
        took = time.monotonic() - began
        with optimizer.global_weights():  # Of that time, whatever the others still push.
            last = loss_of(model, evaluated) if rank == 0 else 0.0
    if rank == 0:
        options.output.write_text(json.dumps({"losses": losses, "last": last, "seconds": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
