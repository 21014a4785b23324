"""What pushes carry in two bytes, or in part, against a simulation in NumPy, to the bit, over both links."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import psgrad
from conftest import ServerProcesses
from psgrad._supervisor import find_program

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))

from wire_simulation import SLICE, Compressor, Server, rounded

SIZES = [SLICE, 5000, 10]  # The slices of two tensors have these.
LAYOUT = [psgrad.Tensor("w", (SLICE + 5000,)), psgrad.Tensor("b", (10,))]
SAMPLES = [3, 5]
STEPS = 6
RATE = 0.5
HALF = ("--wire_dtype=bfloat16", "--weights_wire_dtype=bfloat16")

CASES = [
    (HALF, {"kind": "bfloat16"}, "bfloat16"),
    ((*HALF, "--error_feedback"), {"kind": "bfloat16", "feedback": True}, "bfloat16"),
    (("--wire_dtype=float16", "--error_feedback"), {"kind": "float16", "feedback": True}, "float32"),
    (("--compress=topk:0.01",), {"kind": "float32", "top_k": 328}, "float32"),
    (("--compress=topk:0.01", "--weights_delta"), {"kind": "float32", "top_k": 328}, "float32"),
    (
        ("--compress=topk:0.02", "--momentum_correction=0.9", "--weights_delta", *HALF),
        {"kind": "bfloat16", "top_k": 655, "momentum": 0.9},
        "bfloat16",
    ),
    (("--wire_dtype=e3m0", "--weights_wire_dtype=bfloat16"), {"kind": "e3m0"}, "bfloat16"),
    (
        ("--wire_dtype=e3m0", "--error_feedback", "--error_feedback_decay=0.95"),
        {"kind": "e3m0", "feedback": True, "decay": 0.95},
        "float32",
    ),
    (("--compress=topk:0.02", "--wire_dtype=e3m0"), {"kind": "e3m0", "top_k": 655}, "float32"),
]


def tensors(slices: list[Any]) -> list[Any]:
    """The arrays of the model that have these slices."""
    return [np.concatenate(slices[:2]), slices[2]]


@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize(("flags", "options", "weights_kind"), CASES)
def test_jobs_end_where_the_simulation_does(
    servers: ServerProcesses, flags: tuple[str, ...], options: dict[str, Any], weights_kind: str, memory: str
) -> None:
    """Weights that a push brings are rounded; the last ones are the servers' own."""
    address = servers.start(2, "--optimizer=sgd", f"--learning_rate={RATE}", *flags, shards=2)
    # One of the two over gRPC: mixed links give the same bits.
    clients = [
        psgrad.Client.join(address, LAYOUT, rank=0, shared_memory=memory),
        psgrad.Client.join(address, LAYOUT, rank=1, shared_memory="off"),
    ]
    random = np.random.default_rng(3)
    initial = [random.normal(size=n).astype(np.float32) for n in SIZES]
    simulated = [Server(values, RATE) for values in initial]
    compressors = [[Compressor(n, **options) for n in SIZES] for _ in clients]
    coefficients = [np.float32(np.float64(n) / sum(SAMPLES)) for n in SAMPLES]
    weights = [tensors([np.zeros(n, np.float32) for n in SIZES]) for _ in clients]
    for client, into in zip(clients, weights, strict=True):
        client.start(tensors(initial), into)
        for array, expected in zip(into, tensors(initial), strict=True):
            assert (array == rounded(expected, weights_kind)).all()
    for step in range(STEPS):
        exchanges, arrived = [], [[] for _ in SIZES]
        for client, mine, into, samples in zip(clients, compressors, weights, SAMPLES, strict=True):
            gradients = [random.normal(scale=0.1, size=n).astype(np.float32) for n in SIZES]
            for index, gradient in enumerate(gradients):
                arrived[index].append(mine[index].dense(*mine[index].push(gradient)))
                mine[index].counts()
            for array in into:
                array.fill(7)  # The caller's memory is its own.
            exchanges.append(client.begin(step, tensors(gradients), into, samples=samples, version=step))
        for server, pushed in zip(simulated, arrived, strict=True):
            server.step(pushed, coefficients)
        for exchange, into in zip(exchanges, weights, strict=True):
            assert exchange.wait().answers == ["applied", "applied"]
            for array, expected in zip(into, tensors([server.weights for server in simulated]), strict=True):
                assert (array == rounded(expected, weights_kind)).all(), f"step {step}"
    last = tensors([np.zeros(n, np.float32) for n in SIZES])
    clients[0].pull(last, float32=True)
    for array, expected in zip(last, tensors([server.weights for server in simulated]), strict=True):
        assert (array == expected).all()


@pytest.mark.parametrize(
    ("flags", "options", "differences"),
    [
        (
            ("--mode=easgd", "--wire_dtype=bfloat16", "--error_feedback"),
            {"kind": "bfloat16", "feedback": True},
            (1, 1, 1, 1),
        ),
        (("--mode=easgd", "--compress=topk:0.01"), {"kind": "float32", "top_k": 328}, (1, 1, 1, 1)),
        (("--mode=local_sgd", "--compress=topk:0.01"), {"kind": "float32", "top_k": 328}, (1, 1, 1, 1)),
        (
            ("--mode=diloco", "--outer_lr=1", "--outer_momentum=0", "--wire_dtype=e3m0", "--error_feedback"),
            {"kind": "e3m0", "feedback": True},
            (1, 1, 1, 1),
        ),
        (
            (
                "--mode=local_sgd",
                "--local_sync=gradients",
                "--average_every=9",
                "--compress=topk:0.01",
                "--wire_dtype=bfloat16",
            ),
            {"kind": "bfloat16", "top_k": 328},
            (0, 1, 0, 0, 1, 1, 0, 1),
        ),
    ],
)
def test_gradients_and_differences_of_weights_leave_residuals_each_of_their_own(
    servers: ServerProcesses, flags: tuple[str, ...], options: dict[str, Any], differences: tuple[int, ...]
) -> None:
    """Servers add differences to their weights, and apply their optimizer to gradients."""
    address = servers.start(1, "--optimizer=sgd", f"--learning_rate={RATE}", *flags, shards=2)
    random = np.random.default_rng(11)
    initial = [random.normal(size=n).astype(np.float32) for n in SIZES]
    simulated = [values.copy() for values in initial]
    compressors = [[Compressor(n, **options) for n in SIZES] for _ in range(2)]  # For gradients, and for differences.
    into = tensors([np.zeros(n, np.float32) for n in SIZES])
    with psgrad.Client.join(address, LAYOUT) as client:
        client.start(tensors(initial), into)
        for step, is_difference in enumerate(differences):
            values = [random.normal(scale=0.1, size=n).astype(np.float32) for n in SIZES]
            for index, value in enumerate(values):
                compressor = compressors[is_difference][index]
                sent = compressor.dense(*compressor.push(value))
                compressor.counts()
                simulated[index] = simulated[index] + (sent if is_difference else -np.float32(RATE) * sent)
            result = client.push_pull(
                step, tensors(values), into, samples=3, version=step, difference=bool(is_difference)
            )
            assert result.answers == ["applied", "applied"]
            for array, expected in zip(into, tensors(simulated), strict=True):
                assert (array == expected).all(), f"step {step}"


def test_a_gradient_that_does_not_fit_float16_is_refused_by_its_tensor(servers: ServerProcesses) -> None:
    """As one that is not finite."""
    address = servers.start(1, "--optimizer=sgd", "--wire_dtype=float16")
    layout = [psgrad.Tensor("w", (4,))]
    with psgrad.Client.join(address, layout) as client:
        weights = [np.zeros(4, np.float32)]
        client.start([np.zeros(4, np.float32)], weights)
        large = [np.full(4, 1e6, np.float32)]
        skipped = client.push_pull(0, large, weights, skip_not_finite=True)
        assert skipped.skipped == "w"
        assert skipped.why_skipped == "is not finite, or too large for --wire_dtype=float16"
        with pytest.raises(ValueError, match=r"tensor w is not finite, or too large for --wire_dtype=float16"):
            client.push_pull(1, large, weights, version=1)


def test_a_checkpoint_whose_weights_do_not_fit_float16_is_not_gone_on_from(
    servers: ServerProcesses, tmp_path: pathlib.Path
) -> None:
    """The server says so by the tensor's name, and keeps it: in float32 the job goes on from there."""
    folder = f"--checkpoint_dir={tmp_path}"
    layout = [psgrad.Tensor("w", (4,))]
    weights = [np.zeros(4, np.float32)]
    address = servers.start(1, "--optimizer=sgd", folder)
    with psgrad.Client.join(address, layout) as client:
        client.start([np.full(4, 1e6, np.float32)], weights)
        client.push_pull(0, [np.ones(4, np.float32)], weights)
        client.done()
    assert servers.processes[0].wait(timeout=60) == 0
    command = [find_program("ps_server"), "--num_workers=1", "--optimizer=sgd", folder, "--restore=latest"]
    ended = subprocess.run(
        [*command, "--weights_wire_dtype=float16"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "tensor w: a value is not finite, or too large for --weights_wire_dtype=float16; give the job" in last
    assert "goes back" not in ended.stderr
    address = servers.start(1, "--optimizer=sgd", folder, "--restore=latest")
    with psgrad.Client.join(address, layout) as client:
        assert client.start([np.zeros(4, np.float32)], weights).version == 1
        assert (weights[0] > 9e5).all()


def test_servers_that_take_the_optimizer_from_workers_take_only_sgd_with_top_k(servers: ServerProcesses) -> None:
    """Another one would take elements that were not sent for gradients of zero."""
    address = servers.start(1, "--compress=topk:0.01")
    layout = [psgrad.Tensor("w", (4,))]
    adam = psgrad.OptimizerSettings("adam", {"learning_rate": 0.1})
    with pytest.raises(psgrad.Error, match=r"the worker's optimizer is adam: with --compress servers apply sgd"):
        psgrad.Client.join(address, layout, optimizer=adam)
    with psgrad.Client.join(
        address, layout, optimizer=psgrad.OptimizerSettings("sgd", {"learning_rate": 0.1})
    ) as client:
        client.start([np.zeros(4, np.float32)], [np.zeros(4, np.float32)])
        client.done()


@pytest.mark.parametrize("weights_kind", ["float32", "bfloat16"])
def test_what_has_changed_is_all_that_a_worker_lacks_however_far_it_is_behind(
    servers: ServerProcesses, weights_kind: str
) -> None:
    """Where every push makes a version: with and without gradients of a tensor, and after pulls that came between."""
    flags = ("--optimizer=sgd", "--compress=topk:0.01", "--weights_delta", f"--weights_wire_dtype={weights_kind}")
    address = servers.start(2, *flags, mode="asp", shards=2)
    clients = [psgrad.Client.join(address, LAYOUT, rank=rank, shared_memory="off") for rank in (0, 1)]
    random = np.random.default_rng(9)
    initial = tensors([random.normal(size=n).astype(np.float32) for n in SIZES])
    weights = [[np.zeros_like(array) for array in initial] for _ in clients]
    versions = [client.start(initial, into).versions for client, into in zip(clients, weights, strict=True)]
    steps = [0, 0]
    for turn in range(120):
        # The second is up to 30 versions behind, and once more than are known of.
        rank = 1 if turn in (3, 10, 40, 112) else 0
        gradients = tensors([random.normal(scale=0.1, size=n).astype(np.float32) for n in SIZES])
        into = weights[rank]
        exchange = clients[rank].begin(steps[rank], gradients, into, versions=versions[rank], deferred=True)
        exchange.ready(0)
        exchange.absent(1) if turn % 5 == 0 else exchange.ready(1)
        versions[rank] = exchange.wait().versions
        steps[rank] += 1
        if turn % 7 == 0:
            versions[rank] = clients[rank].pull(into).versions
        own = [np.zeros_like(array) for array in initial]
        clients[rank].pull(own, float32=True)
        for array, expected in zip(into, own, strict=True):
            assert (array == rounded(expected, weights_kind)).all(), f"turn {turn}"
