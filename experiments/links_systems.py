"""What is compared over links: who sums gradients, where servers are, and what a step must move."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .lab import Lab

WORKERS = 4
LOCAL_STEPS = 8
BATCH = 64  # Of each worker.
LEARNING_RATE = 0.04
_SLICE_ELEMENTS = 262_144  # The most that one server has in a piece.


@dataclass(frozen=True)
class Network:
    """A fully connected one, on the central pixels of Fashion-MNIST's images."""

    crop: int
    widths: tuple[int, ...]

    @property
    def flags(self) -> list[str]:
        """Of ps_worker."""
        return [f"--model={self.model}", "--dataset=fashion-mnist", f"--crop={self.crop}", f"--batch_size={BATCH}"]

    @property
    def model(self) -> str:
        """As --model has it."""
        return "mlp:" + ",".join(map(str, self.widths))

    @property
    def model_bytes(self) -> int:
        """Of float32 weights, and as many of gradients."""
        return 4 * sum(inputs * outputs + outputs for inputs, outputs in pairwise(self.widths))

    def fullest_share(self, servers: int) -> float:
        """Of the model, on the server that has most: slices go to the server with least so far, the largest first."""
        tensors = [size for inputs, outputs in pairwise(self.widths) for size in (inputs * outputs, outputs)]
        slices = [min(_SLICE_ELEMENTS, size - begin) for size in tensors for begin in range(0, size, _SLICE_ELEMENTS)]
        load = [0] * servers
        for size in sorted(slices, reverse=True):
            load[load.index(min(load))] += size
        return max(load) / sum(load)


def network(lab: Lab) -> Network:
    """Four equal layers and a small one, so that four servers have equally much."""
    return lab.pick(Network(16, (256, 256, 256, 256, 256, 10)), Network(8, (64, 64, 64, 64, 64, 10)))


@dataclass(frozen=True)
class System:
    """A way to train with four workers."""

    name: str  # Of folders.
    title: str
    mode: tuple[str, ...] = ()  # ps_server's flags; of MPI none.
    servers: int = 0
    colocated: bool = False  # Server k runs on the host of worker k.
    mpi: tuple[str, ...] = ()  # mpirun's options.
    overlap: bool = True
    batches_per_exchange: int = 1

    @property
    def is_mpi(self) -> bool:
        """Ranks that sum among themselves."""
        return self.servers == 0

    @property
    def hosts(self) -> int:
        """That it needs."""
        return WORKERS if self.is_mpi or self.colocated else WORKERS + self.servers

    @property
    def steps_alike(self) -> bool:
        """Whether each step is that of one large batch of all workers: the weights are those of all other such."""
        return self.is_mpi or "--mode=bsp" in self.mode


@dataclass(frozen=True)
class Theory:
    """What the fullest link carries for a batch of each worker, in models."""

    one_way: float  # And as much the other way. The time of a step, too, if both ways are used at once.
    in_turn: float  # The time of a step if weights are sent when the gradients that they are made of have arrived.


def theory(system: System, of: Network) -> Theory | None:
    """None where nothing says which algorithm is used."""
    if system.is_mpi:
        ring = 2 * (WORKERS - 1) / WORKERS
        return Theory(ring, ring) if system.name == "mpi-ring" else None
    share = of.fullest_share(system.servers)
    if system.colocated:
        # As a worker it sends what others serve, and then as a server its part to all others; and receives as much.
        both = (1 - 1 / WORKERS) + (WORKERS - 1) * share
        return Theory(both, both)
    busiest = max(1.0, WORKERS * share)  # A worker's link, or a server's.
    if "--mode=asp" in system.mode:
        # A worker sends, and then receives; others may do the opposite meanwhile.
        return Theory(busiest, max(2.0, busiest))
    return Theory(busiest / system.batches_per_exchange, 2 * busiest / system.batches_per_exchange)


_MOMENTUM = ("--optimizer=momentum", "--momentum=0.9")
_BSP = ("--mode=bsp", *_MOMENTUM, f"--learning_rate={LEARNING_RATE}")
# Every push is a step, of which there are four times as many.
_ASP = ("--mode=asp", *_MOMENTUM, f"--learning_rate={LEARNING_RATE / WORKERS:g}")
_LOCAL = ("--mode=local_sgd", f"--local_steps={LOCAL_STEPS}", *_MOMENTUM, f"--learning_rate={LEARNING_RATE}")

SYSTEMS = (
    System("bsp-1", "bsp, 1 server", _BSP, servers=1),
    System("asp-1", "asp, 1 server", _ASP, servers=1),
    System("bsp-4", "bsp, 4 servers", _BSP, servers=4),
    System("bsp-4-colocated", "bsp, 4 servers on the workers' hosts", _BSP, servers=4, colocated=True),
    System("local-sgd-4", f"local_sgd:{LOCAL_STEPS}, 4 servers", _LOCAL, servers=4, batches_per_exchange=LOCAL_STEPS),
    System("mpi-own", "MPI, its own choice", overlap=False),
    System("mpi-ring", "MPI, ring", mpi=("ring",), overlap=False),
    System("mpi-overlapped", "MPI, a sum for each tensor", overlap=True),
)


def by_name(name: str) -> System:
    """One of SYSTEMS."""
    return next(system for system in SYSTEMS if system.name == name)
