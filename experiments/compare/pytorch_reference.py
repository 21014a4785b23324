"""A job's curve by plain PyTorch: one process, whole batches, from the initial weights and in the order of the samples
that the job's seed gives them. A program of its own, for a Python that has PyTorch; it writes the metrics files of a
server and a worker, of which the report reads what it reads of any run.

    python3 experiments/compare/pytorch_reference.py --folder=DIR --batch_size=256 --seed=1 …
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.shared.data import IdxError, mnist_files, permutation, read_idx
from experiments.shared.torch_models import make_model

_EVALUATED_AT_ONCE = 2000  # Samples.


def main() -> int:
    options = _parser().parse_args()
    torch.set_num_threads(1)
    try:
        files = mnist_files(options.dataset, options.data_dir)
        train, test = (_tensors(*files[split]) for split in ("train", "t10k"))
    except (OSError, IdxError) as error:
        print(f"pytorch_reference: {error}", file=sys.stderr)
        return 1
    widths = [int(width) for width in options.model.removeprefix("mlp:").split(",")]
    Training(options, make_model(widths, options.activation, options.seed), train, test).run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("dataset", "data_dir", "model", "activation"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("batch_size", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("epochs", "eval_every", "learning_rate", "momentum"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return parser


def _tensors(images: Path, labels: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, pixels] in [0, 1], and [n]."""
    (samples, *_), pixels = read_idx(images)
    _, classes = read_idx(labels)
    x = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(samples, -1)
    return x.float() / 255, torch.frombuffer(bytearray(classes), dtype=torch.uint8).long()


class Metrics:
    """Lines of a metrics file (docs/metrics.md)."""

    def __init__(self, path: Path, **of_each: Any) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._of_each = of_each
        self.write("start", 0.0, unix_time=time.time(), program_version=f"PyTorch {torch.__version__}")

    def write(self, event: str, t: float, **values: Any) -> None:
        line = {"event": event, "t": round(t, 6), **self._of_each, **values}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


class Training:
    """Evaluations are off its clock, as they are off the job's."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: nn.Sequential,
        train: tuple[torch.Tensor, torch.Tensor],
        test: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._options = options
        self._model = model
        self._train = train
        self._test = test
        self._optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=options.momentum)
        self._server = Metrics(options.folder / "server0.jsonl", shard=0)
        self._worker = Metrics(options.folder / "worker0.jsonl", rank=0)
        self._began = time.perf_counter()

    def run(self) -> None:
        """The whole budget."""
        options = self._options
        samples = len(self._train[0])
        per_epoch = math.ceil(samples / options.batch_size)
        total = max(1, math.floor(options.epochs * per_epoch + 0.5))
        due = marks(options.eval_every, per_epoch, total)
        for step in range(total):
            if step % per_epoch == 0:
                order = torch.tensor(permutation(samples, options.seed, step // per_epoch))
            begin = step % per_epoch * options.batch_size
            self._step(step, order[begin : begin + options.batch_size])
            if step + 1 in due:
                self._evaluate(step + 1)
        self._server.write("end", self._now_s(), version=total)
        self._worker.write("end", self._now_s(), steps=total, status="OK")
        self._server.close()
        self._worker.close()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began

    def _step(self, step: int, chosen: torch.Tensor) -> None:
        began_s = self._now_s()
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(self._train[0][chosen]), self._train[1][chosen])
        forward_s = self._now_s() - began_s
        loss.backward()
        self._optimizer.step()
        now_s = self._now_s()
        self._worker.write(
            "step", now_s, step=step, version=step, loss=loss.item(), samples=len(chosen),
            forward_s=forward_s, backward_s=now_s - began_s - forward_s, push_s=0, wait_s=0, pull_s=0,
        )  # fmt: skip
        self._server.write(
            "apply", now_s, version=step + 1, contributions=1, ranks=[0], staleness=[0], samples=[len(chosen)]
        )

    @torch.no_grad()
    def _evaluate(self, version: int) -> None:
        began = time.perf_counter()
        loss, correct = 0.0, 0
        for x, labels in zip(*(each.split(_EVALUATED_AT_ONCE) for each in self._test), strict=True):
            outputs = self._model(x)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += int((outputs.argmax(dim=1) == labels).sum())
        count = len(self._test[1])
        self._began += time.perf_counter() - began
        finite = loss / count if math.isfinite(loss) else None
        self._worker.write(
            "eval", self._now_s(), step=version, version=version, split="test", loss=finite, accuracy=correct / count
        )


def marks(every: float, per_epoch: int, total: int) -> set[int]:
    """After how many batches to evaluate, as ps_worker's --eval_every has it: the first batch at or beyond each
    multiple of so many epochs, and the last one of all.
    """
    multiples = range(1, math.ceil(total / per_epoch / every) + 1)
    return {batch for k in multiples if (batch := math.ceil(k * every * per_epoch - 1e-6)) < total} | {total}


if __name__ == "__main__":
    sys.exit(main())
