"""DistributedDataParallel within each node, psgrad between the nodes: the servers see a worker a node.

    psrun --workers=2 --mode=asp -m torch.distributed.run --standalone --nproc_per_node=2 python/examples/hybrid.py

starts two such nodes on one machine, for a try. On machines of their own, with servers that run (docs/pytorch.md):

    PS_SERVER=HOST:5000 PS_RANK=NODE torchrun --standalone --nproc_per_node=CARDS python/examples/hybrid.py

A network with a BatchNorm learns which of the first four of eight numbers is the largest. With cards, each process has
one, and they average their gradients through NCCL.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psgrad.torch


def network() -> torch.nn.Sequential:
    """Scores [n, 4] of numbers [n, 8]."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples of a process's batch")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    card = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if card else torch.device("cpu")
    if card:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if card else "gloo")  # Of this node's processes alone.

    torch.manual_seed(arguments.seed)
    x = torch.randn(arguments.samples, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    with psgrad.torch.NodeOptimizer(optimizer, model) as opt:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, arguments.epochs)
        sampler = DistributedSampler(data, opt.num_replicas, opt.replica, seed=arguments.seed)
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for inputs, classes in DataLoader(data, arguments.batch, sampler=sampler):
                opt.zero_grad()
                value = torch.nn.functional.cross_entropy(model(inputs.to(device)), classes.to(device))
                value.backward()
                opt.step()
            scheduler.step()
            if opt.lead:
                print(f"epoch {epoch + 1}: loss {value.item():.3f}", flush=True)
    if opt.rank == 0 and dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            inputs = torch.randn(2048, 8, device=device)
            accuracy = (model.module(inputs).argmax(1) == inputs[:, :4].argmax(1)).float().mean().item()
        print(
            f"{opt.mode}, {opt.num_workers} nodes, {opt.num_replicas} processes: test accuracy {100 * accuracy:.1f} %"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
