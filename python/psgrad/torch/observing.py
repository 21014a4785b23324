"""load_into: a job's weights in a module that is not trained here."""

from __future__ import annotations

import dataclasses

import torch

import psgrad
from psgrad.torch.tensors import eager_name, shortened


def load_into(model: torch.nn.Module, observer: psgrad.Observer, *, version: int | None = None) -> psgrad.Observed:
    """Copies a job's newest weights, or those of this version, into a model, and says which they are.

    The model is of the workers' kind: each tensor that they train is found by its name in `state_dict`, and keeps its
    type, its device and its memory. What the job does not have (buffers with persistent=False) stays as it is.

        observer = psgrad.Observer("127.0.0.1:5000")
        while …:
            seen = psgrad.torch.load_into(model, observer)
            print(seen.version, evaluate(model))

    Raises:
        ValueError: the model lacks a tensor of the job's, has one more, or one of another shape; the text names it.
        psgrad.Error: as of psgrad.Observer.pull. After any exception the model is as it was.
    """
    into = {eager_name(name): tensor for name, tensor in model.state_dict().items()}
    layout = observer.layout
    if missing := [tensor.name for tensor in layout if tensor.name not in into]:
        raise ValueError(f"the model has no {shortened(missing)}, which the job at {observer.server} has")
    known = {tensor.name for tensor in layout}
    if unknown := [name for name, tensor in into.items() if name not in known and tensor.numel() > 0]:
        raise ValueError(f"the job at {observer.server} has no {shortened(unknown)}, which the model has")
    for tensor in layout:
        if tuple(into[tensor.name].shape) != tensor.shape:
            raise ValueError(
                f"{tensor.name} is {list(into[tensor.name].shape)} here, and {list(tensor.shape)} in the job at "
                f"{observer.server}"
            )
    with observer.staging, torch.no_grad():
        if observer.staged is None:
            observer.staged = {tensor.name: torch.empty(tensor.shape) for tensor in layout}
        seen = observer.pull(observer.staged, version=version)
        for name, values in seen.weights.items():
            into[name].copy_(values)
    return dataclasses.replace(seen, weights={name: into[name] for name in seen.weights})
