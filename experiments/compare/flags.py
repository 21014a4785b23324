"""The flags of deploy/compare.sh, as --help has them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]


class UsageError(Exception):
    """What is wrong with the flags, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    """Its errors are UsageError. Values are text, but for those that are true or false."""
    parser = _Parser(
        prog="deploy/compare.sh",
        usage="deploy/compare.sh [--no-build] [--FLAG=VALUE …]\n       deploy/compare.sh report OUTPUT",
        description="Trains one job under several modes and conditions and writes a report that compares them. Stop it "
        "with Ctrl-C; the same command goes on where it stopped, and makes runs that failed again. "
        "The second form writes a comparison's report anew.",
        epilog="--no-build takes the programs as they are. Exit status: 0 all runs are made (one that diverged or "
        "did not learn is a result); 1 a run failed or timed out, or nothing could be run; 2 wrong flags; 130 stopped "
        "by Ctrl-C, 143 by SIGTERM.",
        allow_abbrev=False,
    )
    _add_what_is_compared(parser)
    _add_training(parser)
    _add_how(parser)
    return parser


def _add_what_is_compared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--modes",
        default="bsp,ssp:2,asp,backup:1,local_sgd:8,easgd:8",
        help="modes, with their numbers (%(default)s)",
    )
    add("--workers", default="4", help="worker processes (%(default)s)")
    add(
        "--conditions",
        help="even: all workers are alike; straggler: the last one takes four times as long; transient: 5 %% of all "
        "batches take ten times as long (all three; with --real or --command only even)",
    )
    add("--seeds", default="2", help="how many runs of each, with seeds 1, 2, … (%(default)s)")
    add(
        "--staleness",
        default="0,1,2,4,8,16,32",
        help="enforced staleness of the runs that show its price; empty: none (%(default)s)",
    )
    add(
        "--references",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one worker with batches of the same size, and of the size of all workers' together; the latter by plain "
        "PyTorch too, where --python has it",
    )
    add("--python", default="python3", help="program with PyTorch, for its reference curve (%(default)s)")
    add("--tune", action="store_true", help="first give each mode equally many trials over learning rate and momentum")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--epochs", default="4", help="passes over the training samples in each run (%(default)s)")
    add("--batch_size", default="64", help="samples of a worker's batch (%(default)s)")
    add(
        "--learning_rate",
        default="0.05",
        help="bsp's (%(default)s). Without --tune, backup:B gets (N - B) N-ths of it for N workers; asp and ssp, which "
        "apply each worker's batch by itself, have no momentum, and get an N-th of learning rate / (1 - momentum), "
        "and for N > 2 of that 2/N; others by name, as in 0.05,asp=0.01, and then with --momentum",
    )
    add("--momentum", default="0.9", help="bsp's momentum; 0: none (%(default)s)")
    add("--model", default="mlp:784,128,10", help="as ps_worker has it (%(default)s)")
    add("--activation", default="relu", help="as ps_worker has it (%(default)s)")
    add("--dataset", default="fashion-mnist", help="as ps_worker has it (%(default)s)")
    add("--data_dir", default="", help="as ps_worker has it")
    add("--eval_every", default="0.25", help="epochs between two evaluations (%(default)s)")
    add("--servers", default="1", help="server processes that the model is spread over (%(default)s)")
    add(
        "--command",
        default="",
        help="compare the modes on a psgrad script, as in 'python train.py', that psrun starts. Its metrics are "
        "read (PS_METRICS_FILE is set for it), and it may seed itself with PS_SEED; "
        "rates, data and epochs are its own, and the flags for them are refused; so are other conditions than even",
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", default=str(REPOSITORY / "runs/compare"), help="folder of the runs and the report (%(default)s)")
    add("--bin", default=str(REPOSITORY / "build/bin"), help="folder of ps_server and ps_worker (%(default)s)")
    add(
        "--step_time",
        default="",
        help="how long each batch lasts at least: workers are idle for the rest, so that modes are compared and not "
        "the scheduler (four times the measured compute)",
    )
    add(
        "--real",
        action="store_true",
        help="without idle time, where the machine has a core for each process; the only condition is then even",
    )
    add("--run_timeout", default="", help="after so long a run counts as timed out (by the estimate)")
