"""A small transformer that learns to write a text letter by letter, with as many workers as there are.

    psrun --workers=2 --mode=asp python/examples/transformer.py

The text is one that every Debian system has, the GNU General Public License; --text=FILE takes another. The loss falls
from about 4.3 to 2.1 nats a letter in 300 steps of two workers: it has learnt where words end, and some of them.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

import psgrad.torch


class Writer(torch.nn.Module):
    """Gives the scores of the letters that follow, [n, length, letters], from letters [n, length]."""

    def __init__(self, letters: int, length: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(letters, width)
        self.places = torch.nn.Parameter(torch.zeros(length, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.out = torch.nn.Linear(width, letters, bias=False)
        self.out.weight = self.letters.weight  # One parameter, used twice.
        torch.nn.init.normal_(self.letters.weight, std=0.05)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        length = letters.shape[1]
        x = self.letters(letters) + self.places[:length]
        mask = self.get_buffer("mask")[:length, :length]
        scores: torch.Tensor = self.out(self.norm(self.layers(x, mask=mask, is_causal=True)))
        return scores


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices, none for the rest."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def write(model: Writer, text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`text` [n] and `count` letters more."""
    for _ in range(count):
        scores = model(text[-length:].unsqueeze(0))[0, -1]
        text = torch.cat([text, torch.multinomial(torch.softmax(scores / 0.8, 0), 1, generator=generator)])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="samples of a worker's batch")
    parser.add_argument("--length", type=int, default=64, help="letters of a sample")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", help="HOST:PORT; else $PS_SERVER")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    text = arguments.text.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    number = {letter: place for place, letter in enumerate(alphabet)}
    data = torch.tensor([number[letter] for letter in text])
    model = Writer(len(alphabet), arguments.length)
    optimizer = torch.optim.AdamW(groups(model), lr=arguments.lr)
    opt = psgrad.torch.DistributedOptimizer(optimizer, model, server=arguments.server, clip_norm=1.0)

    def warmed_cosine(step: int) -> float:
        return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / arguments.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, warmed_cosine)
    own = torch.Generator().manual_seed(1000 * arguments.seed + opt.rank)  # Each worker reads at other places.
    with opt:
        for step in range(arguments.steps):
            starts = torch.randint(0, len(data) - arguments.length - 1, (arguments.batch,), generator=own)
            pieces = torch.stack([data[start : start + arguments.length + 1] for start in starts.tolist()])
            opt.zero_grad()
            scores = model(pieces[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
            loss.backward()
            opt.step()
            scheduler.step()
            if opt.lead and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    if opt.rank == 0:
        model.eval()
        start = data[: arguments.length]
        written = write(model, start, 200, arguments.length, own)[arguments.length :]
        print(f"final loss {loss.item():.2f}\n" + "".join(alphabet[place] for place in written.tolist()))


if __name__ == "__main__":
    main()
