"""A process of a node, for test_torch_node.py: node_process.py WHAT FOLDER NODE PROCESS PROCESSES ADDRESS.

It writes what it has seen to FOLDER/NODE.PROCESS.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import psgrad.torch
from torch_support import batch, mlp, seeded, weights_of

STEPS = 6


def wrapped(model: torch.nn.Module, address: str, make: Any = None, **options: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model)
    optimizer = (make or momentum)(model.parameters())
    os.environ["PS_SERVER"] = address
    return ddp, psgrad.torch.NodeOptimizer(optimizer, ddp, **options)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def normed() -> torch.nn.Sequential:
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)))
    assert isinstance(model, torch.nn.Sequential)
    return model


def backward(ddp: torch.nn.Module, step: int, replica: int) -> None:
    x, y = batch(step, replica)
    torch.nn.functional.mse_loss(ddp(x), y).backward()


def train(ddp: torch.nn.Module, opt: Any, scheduled: bool = False) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5) if scheduled else None
    for step in range(STEPS):
        opt.zero_grad()
        backward(ddp, step, opt.replica)
        opt.step()
        if scheduler is not None:
            scheduler.step()


def trains(addresses: str, process: int) -> dict[str, Any]:
    """Several jobs, one after the other: starting processes takes longer than all of them."""
    one, two, asp = addresses.split(",")
    seen: dict[str, Any] = {}
    # Process 1's initial weights are others; DistributedDataParallel gives it those of process 0.
    ddp, opt = wrapped(mlp(process), one)
    with opt:
        seen["replica"], seen["replicas"] = opt.replica, opt.num_replicas
        train(ddp, opt, scheduled=True)
        seen["step"], seen["lead"] = opt.step_number, opt.lead
    seen["bsp"] = weights_of(ddp.module)
    ddp, opt = wrapped(mlp(), two, adamw)
    with opt:
        train(ddp, opt)
        opt.zero_grad()
        try:
            opt.step()
        except RuntimeError as error:
            seen["raised"] = str(error)
        opt.empty_step()
    seen["two servers"] = weights_of(ddp.module)
    ddp, opt = wrapped(normed(), asp, samples=8)
    with opt:
        for step in range(STEPS):
            opt.zero_grad()
            backward(ddp, step, opt.replica)
            opt.set_samples(8)
            opt.step()
    seen["asp"] = weights_of(ddp.module)
    return seen


def fails(address: str, process: int) -> dict[str, Any]:
    """Process 1 of node 0 raises in step 2, before it comes to the node's all-reduce."""
    ddp, opt = wrapped(mlp(), address)
    with opt:
        for step in range(STEPS):
            if opt.rank == 0 and process == 1 and step == 2:
                raise ValueError("no data")
            backward(ddp, step, opt.replica)
            opt.step()
    return {}


def killed(address: str, process: int) -> dict[str, Any]:
    """Process 1 is killed while process 0 waits for a node that never comes to this step."""
    ddp, opt = wrapped(mlp(), address)
    if opt.rank == 1:
        print("waits", flush=True)
        sys.stdin.read()
    with opt:
        backward(ddp, 0, opt.replica)
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.step()
    return {}


def loses_process_0(address: str, process: int) -> dict[str, Any]:
    """Process 0 never comes to step(), and then is gone."""
    ddp, opt = wrapped(mlp(), address, timeout_s=0.2)
    backward(ddp, 0, opt.replica)
    seen: dict[str, Any] = {}
    if process == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    for name in ("late", "other"):
        try:
            opt.step()
        except (RuntimeError, TimeoutError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
        if name == "late":
            try:
                dist.barrier()
                opt._channel.expect("begins", "step", bounded=False)
            except RuntimeError as error:
                seen["gone"] = str(error)
    torch.save(seen, sys.argv[2] + "/seen")
    os._exit(0)


def overlaps(address: str, process: int) -> dict[str, Any]:
    """DistributedOptimizer over the module in a DistributedDataParallel: each node's process 0 has one."""
    auto, strict = address.split(",")
    seen: dict[str, Any] = {}
    for name, server, views in (("auto", auto, True), ("backward", strict, False)):
        model = mlp()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = momentum(model.parameters())
        opt: Any = None
        if process == 0:
            opt = psgrad.torch.DistributedOptimizer(optimizer, model, server=server, overlap=name)
        for step in range(2 if name == "auto" else 1):
            model.zero_grad()
            backward(ddp, step, process)
            try:
                if opt is not None:
                    opt.step()
            except RuntimeError as error:
                seen["raised"] = str(error)
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        if opt is not None and name == "auto":
            opt.finish()
            seen["weights"] = weights_of(model)
        elif opt is not None:
            opt.leave("seen")
    return seen


def main() -> None:
    what, folder, node, process, processes, address = sys.argv[1:]
    os.environ["PS_RANK"] = node
    torch.set_num_threads(1)
    store = f"file://{folder}/group{node}"
    dist.init_process_group("gloo", init_method=store, rank=int(process), world_size=int(processes))
    seen = globals()[what](address, int(process))
    torch.save(seen, Path(folder) / f"{node}.{process}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
