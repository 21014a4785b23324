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
        waiting()
        if wait == "pull":
            client.pull(values, version=1)
        client.done()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if client is not None:
            client.leave("interrupted")


main(*sys.argv[1:])
