"""PyTorch on psgrad: a training loop becomes a worker by wrapping its optimizer.

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = psgrad.torch.DistributedOptimizer(opt, model)

Needs PyTorch 2.1 or later: gradients leave from `Tensor.register_post_accumulate_grad_hook`, which 2.0 does not have.
What differs from DistributedDataParallel is in docs/pytorch.md.
"""

from __future__ import annotations

import torch


def _check_version(version: str) -> None:
    """ImportError, naming the version that is installed, if it is older than 2.1."""
    numbers = version.split("+")[0].split(".")[:2]
    if tuple(int(number) for number in numbers) < (2, 1):
        raise ImportError(
            f"psgrad.torch needs PyTorch 2.1 or later, for Tensor.register_post_accumulate_grad_hook; this is "
            f"{version}. Install a newer one in a virtual environment: pip install 'torch>=2.1'"
        )


_check_version(torch.__version__)

from psgrad.torch.node import NodeOptimizer  # noqa: E402  (an old PyTorch is to be refused by name first)
from psgrad.torch.observing import load_into  # noqa: E402
from psgrad.torch.optimizer import DistributedOptimizer  # noqa: E402

__all__ = ["DistributedOptimizer", "NodeOptimizer", "load_into"]
