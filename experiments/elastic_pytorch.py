"""The elastic experiment by plain PyTorch: a script for torchrun, which starts it anew whenever the members change.

As PyTorch's own tutorials have it: the lowest rank saves a snapshot now and then, and all begin with the last one. Each
process writes a line for each step to FOLDER/steps-*.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.shared.data import mnist_files, read_idx
from experiments.shared.torch_models import make_model

_SNAPSHOT_EVERY = 50  # Steps.
_MOMENTUM = 0.9


def main() -> int:
    options = _parser().parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    images, labels = _training_data()
    model = make_model([784, 128, 10], "relu", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=_MOMENTUM)
    snapshot = options.folder / "snapshot.pt"
    position = step = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        position = saved["position"]
    round_number = int(time.time() * 1000)
    shared = torch.tensor([round_number, position])
    distributed.broadcast(shared, 0)  # All are in one round.
    round_number, position = (int(value) for value in shared)
    with (options.folder / f"steps-{round_number}-{rank}-{os.getpid()}.jsonl").open("w", buffering=1) as lines:
        while True:
            began = time.monotonic()
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(position // len(labels)))
            first = position % len(labels) + rank * options.batch
            chosen = order[first : first + options.batch]
            if len(chosen) == 0:  # An epoch's last batch is left to the others.
                chosen = order[: options.batch]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            time.sleep(max(0.0, options.step_ms / 1e3 - (time.monotonic() - began)))
            flat = torch.cat([weight.grad.reshape(-1) for weight in model.parameters()])
            distributed.all_reduce(flat)
            flat /= world
            offset = 0
            for weight in model.parameters():
                weight.grad.copy_(flat[offset : offset + weight.numel()].reshape(weight.shape))
                offset += weight.numel()
            optimizer.step()
            position += world * options.batch
            step += 1
            line = {"round": round_number, "worker": f"{os.getpid()}", "unix_s": time.time(), "loss": loss.item()}
            lines.write(json.dumps({**line, "samples": options.batch, "position": position}) + "\n")
            if rank == 0 and step % _SNAPSHOT_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": position}
                torch.save(state, snapshot.with_suffix(".new"))
                snapshot.with_suffix(".new").rename(snapshot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--step_ms", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    return parser


def _training_data() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = mnist_files("fashion-mnist", "")["train"]
    shape, pixels = read_idx(images)
    _, classes = read_idx(labels)
    values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(shape[0], -1).float() / 255
    return (values - values.mean()) / values.std(), torch.frombuffer(bytearray(classes), dtype=torch.uint8).long()


if __name__ == "__main__":
    sys.exit(main())
