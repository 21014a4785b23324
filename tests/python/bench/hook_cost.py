"""What a hook costs: a backward pass over many small tensors, bare and with psgrad's hooks, in µs a tensor.

    python tests/python/bench/hook_cost.py [--tensors=1000] [--server=HOST:PORT]

Without a server pushes go to a client that does nothing with them, so the figure is that of Python and PyTorch alone.
One thread; the bare and the hooked pass take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import fake_client
from torch_support import psgrad


class NullExchange:
    """Takes gradients and forgets them."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.ready_at = max  # The cheapest of the built-in functions of two numbers.

    def set_samples(self, samples: int) -> None:
        pass

    def wait(self) -> fake_client.FakeResult:
        return fake_client.FakeResult(self.step + 1, [self.step + 1], ["applied"], self.step + 1)


class NullClient(fake_client.FakeClient):
    """A job of one worker, whose servers do nothing."""

    def begin(self, step: int, *arguments: Any, **options: Any) -> Any:
        return NullExchange(step)


def model_of(tensors: int) -> torch.nn.ParameterList:
    torch.manual_seed(0)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(8)) for _ in range(tensors)])


def loss_of(model: torch.nn.ParameterList) -> torch.Tensor:
    return torch.cat(list(model)).square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--server", default="")
    arguments = parser.parse_args()
    bare, hooked = model_of(arguments.tensors), model_of(arguments.tensors)
    server = arguments.server
    if not server:
        psgrad.Client = NullClient  # type: ignore[assignment, misc]
        server = fake_client.FakeServer().address
    torch.set_num_threads(1)
    optimizer = psgrad.torch.DistributedOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=0.0001), hooked, server=server
    )
    times: dict[str, list[float]] = {"bare backward": [], "hooked backward": [], "step": []}
    for _ in range(arguments.repeats):
        bare.zero_grad()
        loss = loss_of(bare)
        began = time.perf_counter()
        loss.backward()
        times["bare backward"].append(time.perf_counter() - began)
        optimizer.zero_grad()
        loss = loss_of(hooked)
        began = time.perf_counter()
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        times["hooked backward"].append(middle - began)
        times["step"].append(time.perf_counter() - middle)
    print(f"{arguments.tensors} tensors{'':10} median ms   least ms   median µs a tensor   least")
    rows = {name: (statistics.median(values), min(values)) for name, values in times.items()}
    bare_s, hooked_s = rows["bare backward"], rows["hooked backward"]
    rows["hooks"] = (hooked_s[0] - bare_s[0], hooked_s[1] - bare_s[1])
    for name, (median, least) in rows.items():
        each = 1e6 / arguments.tensors
        print(f"{name:20} {1e3 * median:12.3f} {1e3 * least:10.3f} {each * median:14.2f} {each * least:14.2f}")
    optimizer.finish()


if __name__ == "__main__":
    main()
