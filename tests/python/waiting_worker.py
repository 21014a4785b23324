"""Waits for what does not come, until it is interrupted: ``waiting_worker.py WAIT ADDRESS``."""

from __future__ import annotations

import sys
import threading

import numpy as np

import psgrad


def main(wait: str, address: str) -> None:
    """Says when it is about to wait, and when it was interrupted."""
    layout = [psgrad.Tensor("w", (3, 4))]
    values = [np.zeros((3, 4), np.float32)]

    def waiting() -> None:
        # Said from a thread, so that the wait has begun, or is about to, when it is read.
        threading.Timer(0.1, lambda: print("waiting", flush=True)).start()

    client = None
    try:
        if wait == "join":
            waiting()
        client = psgrad.Client.join(address, layout, optimizer=psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5}))
        if wait == "start":
            waiting()
        client.start(values, values)
        if wait in ("exchange", "tensor"):
            exchange = client.begin(0, values, values, deferred=True)
            waiting()
            if wait == "tensor":
                exchange.wait_tensor(0)
            exchange.wait()
        if wait == "weights_hash":
            print("ready", flush=True)
            sys.stdin.readline()  # Until the server is stopped.
        waiting()
        if wait == "run":
            client.take_run(1, 0, samples=4, batch_size=4, runs=1)
        if wait == "reduction":
            client.all_mean(1.0)
        if wait == "weights_hash":
            client.weights_hash()
        if wait == "pull":
            client.pull(values, version=1)
        client.done()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if client is not None:
            client.leave("interrupted")


main(*sys.argv[1:])
