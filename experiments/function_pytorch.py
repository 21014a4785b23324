"""The function experiment by plain PyTorch: processes that average gradients and weights over Gloo.

A program of its own, for a Python that has PyTorch, and independent of the system: it shares only the definition of
what a seed decides (shared/data.py, shared/torch_models.py). Each process writes a line for each of its batches, with
the loss on the weights before it, to FOLDER/torchRANK.jsonl.

    python3 experiments/function_pytorch.py --folder=DIR --local_steps=2 --average_every=4000 --epochs=40 …
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.shared.data import stream
from experiments.shared.torch_models import make_model

_FUNCTION_STREAM = 3 << 48  # A seed has this stream for the points.
_HIGHEST_X = 20.0


def main() -> int:
    options = _parser().parse_args()
    rendezvous = options.folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    multiprocessing.spawn(_worker, (options, f"file://{rendezvous.resolve()}"), nprocs=options.workers)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--widths", required=True, help="as in 1,80,80,40,1")
    for name in ("workers", "samples", "batch_size", "epochs", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--local_steps", type=int, required=True, help="every so many gradients are averaged; 0: none")
    parser.add_argument("--average_every", type=int, required=True, help="batches between two averagings of weights")
    parser.add_argument("--learning_rate", type=float, required=True)
    return parser


def points(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y = √x·sin(3.14·x/5), [samples, 1] each."""
    numbers = stream(seed, _FUNCTION_STREAM)
    x = torch.tensor([(next(numbers) >> 40) / 2**24 * _HIGHEST_X for _ in range(samples)], dtype=torch.float32)
    y = [math.sqrt(value) * math.sin(3.14 * value / 5) for value in x.tolist()]
    return x.reshape(-1, 1), torch.tensor(y, dtype=torch.float32).reshape(-1, 1)


def _average(tensors: list[torch.Tensor], workers: int) -> None:
    """Over all processes, in place, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= workers
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.reshape(tensor.shape))


def _worker(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)  # There are more processes than processors.
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.workers)
    x, y = points(options.samples, options.seed)
    model = make_model([int(width) for width in options.widths.split(",")], "relu", options.seed, glorot=True)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=options.learning_rate)
    per_epoch = options.samples // (options.batch_size * options.workers)
    batches = options.epochs * per_epoch
    lines = []
    distributed.barrier()
    for number in range(1, batches + 1):
        # In each epoch, batch t of all processes together is the next run of samples, in rank order.
        first = ((number - 1) % per_epoch * options.workers + rank) * options.batch_size
        chosen = slice(first, first + options.batch_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
        loss.backward()
        with torch.no_grad():
            averages_weights = number % options.average_every == 0 or number == batches
            if not averages_weights and options.local_steps and number % options.local_steps == 0:
                _average([weight.grad for weight in weights], options.workers)
            optimizer.step()
            if averages_weights:
                _average([weight.data for weight in weights], options.workers)
        lines.append({"event": "step", "t": time.time(), "rank": rank, "step": number - 1, "loss": loss.item()})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.folder / f"torch{rank}.jsonl").write_text(text, encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
