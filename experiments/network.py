"""The network and its data of the experiments with a function: as published, and in ps_worker's flags."""

from __future__ import annotations

SAMPLES = 80_000  # Points of sqrt(x)·sin(3.14·x/5), x uniform from 0 to 20.
BATCH = 1_000  # Of each worker.
LEARNING_RATE = 0.001
MODEL = "mlp:1,80,80,40,1"
FLAGS = (
    "--dataset=function:sqrt_sin",
    f"--model={MODEL}",
    "--activation=relu",
    "--loss=mse",
    "--shuffle=false",
    "--normalize=none",
    "--init=glorot",  # With he's, which is larger, the losses grow without bound at this learning rate.
)
SERVER_FLAGS = ("--mode=bsp", "--optimizer=sgd", f"--learning_rate={LEARNING_RATE}")
DESCRIPTION = (
    f"The network is `{MODEL}` with relu and the mean squared error, fitted to {SAMPLES:,} points of "
    "√x·sin(3.14·x/5), in batches of 1,000 a worker, without shuffling, by SGD at a learning rate of 0.001"
)
