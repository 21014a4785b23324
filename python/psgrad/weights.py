"""Weights in safetensors files: from a torch module to the C++ worker, and back.

    psgrad.load("trained.safetensors", model)                  # ps_worker --save_weights=trained.safetensors
    psgrad.save("begin.safetensors", model, names="layers")    # ps_worker --init_weights=begin.safetensors

The C++ worker's networks are layer0.weight [out, in], layer0.bias [out], layer1.weight, …: these are torch.nn.Linear's
shapes, so nothing is transposed unless that is asked for. Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

_HEADER_BYTES_MAX = 100 << 20  # As the reference implementation and the C++ programs have it.
# The format's names of types, by torch's and numpy's.
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _TYPES.items()}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = ("F64", "F32", "F16", "BF16")

Names = Mapping[str, str] | Literal["layers"] | None


def load(
    file: str | os.PathLike[str], model: Any, *, names: Names = None, transposed: Collection[str] = ()
) -> dict[str, str]:
    """Copies a file's tensors into the model's memory; returns the file's metadata.

    model: a torch.nn.Module, or a dict of torch tensors or writable numpy arrays by name. Floating-point types are
        converted to the model's (from float32, which the C++ worker writes); others have to be the same.
    names: the file's name for the model's, as in {"fc.weight": "layer0.weight"}; a name that is not in it stands for
        itself; "layers" is what save() makes of it. None: the same names; or, if not all of the model's names are in
        the file, the same order, where all shapes agree in it: so an nn.Sequential of nn.Linear layers takes the C++
        worker's file.
    transposed: names of the model's matrices that are [in, out] where the file has [out, in].

    ValueError, naming the tensor, if the model's tensors and the file's are not the same or the file is none; then
    nothing was copied. OSError if it cannot be read.
    """
    tensors = _tensors_of(model)
    path = os.fspath(file)
    with open(path, "rb") as stream:
        try:
            entries, metadata = _read_header(stream)
            pairs = _pair(tensors, entries, names, transposed)
            for name, entry in pairs.items():
                _check_type(name, tensors[name], entry)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for name, entry in pairs.items():
            stream.seek(entry.begin)
            data = bytearray(entry.bytes)
            if stream.readinto(data) != entry.bytes:
                raise ValueError(f"{path}: tensor {entry.name}: truncated while it was read")
            tensors[name].assign(data, entry, name in transposed)
    return metadata


def save(
    file: str | os.PathLike[str],
    model: Any,
    *,
    names: Names = None,
    transposed: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the model's tensors, in their order. The file appears whole or not at all.

    model, names, transposed: as of load(). names="layers" gives the names that the C++ worker expects (layer0.weight,
        layer0.bias, …) to a model that is nothing but linear layers with biases, each of which takes what the one
        before it gives.

    ValueError, naming the tensor, for a type that the format does not have, two tensors of one name, or a model that
    has no "layers". OSError if it cannot be written.
    """
    tensors = _tensors_of(model)
    _check_transposed(tensors, transposed)
    by_name = _file_names(tensors, names, transposed)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.type is None:
            raise ValueError(f"tensor {name} is {tensor.type_name}, which a safetensors file does not have")
        if by_name[name] in header:
            raise ValueError(f"tensor {name}: another one is called {by_name[name]} in the file, too")
        shape = list(reversed(tensor.shape)) if name in transposed else list(tensor.shape)
        size = math.prod(shape) * _BYTES[tensor.type]
        header[by_name[name]] = {"dtype": tensor.type, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (tensor.data(name in transposed) for name, tensor in tensors.items())
    _write_whole(os.fspath(file), len(text).to_bytes(8, "little"), text, data)


# ---- The file


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int  # In the file.
    bytes: int


def _read_header(stream: BinaryIO) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Tensors in the order of their data, and metadata. Nothing in the file is trusted."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _HEADER_BYTES_MAX):
        raise ValueError("not a safetensors file, or truncated")
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError):
        raise ValueError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of texts")
    begin = 8 + length
    entries = sorted((_entry(name, value, begin) for name, value in header.items()), key=lambda entry: entry.begin)
    for entry in entries:
        if entry.begin != begin:
            raise ValueError(f"tensor {entry.name}: its data overlaps or leaves a gap")
        begin += entry.bytes
    if begin != size:
        raise ValueError(f"truncated, or too long: {size} bytes, expected {begin}")
    return {entry.name: entry for entry in entries}, metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the header has a name twice")
    return found


def _entry(name: str, value: Any, data: int) -> _Entry:
    fields = value if isinstance(value, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name}: expected dtype, shape and data_offsets")
    if kind not in _BYTES:
        raise ValueError(f"tensor {name}: type {kind} is not supported")
    begin, end = offsets
    if end - begin != math.prod(shape) * _BYTES[kind]:
        raise ValueError(f"tensor {name}: data_offsets do not fit the shape")
    return _Entry(name, kind, tuple(shape), data + begin, end - begin)


def _sizes(value: Any) -> list[int] | None:
    # true and false are numbers to Python.
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return value
    return None


def _write_whole(path: str, length: bytes, header: bytes, data: Iterable[memoryview]) -> None:
    """Writes under a temporary name first, as the C++ programs do."""
    folder = os.path.dirname(path) or "."
    temporary = f"{path}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as stream:
            stream.write(length + header)
            for part in data:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Which is which


def _pair(
    tensors: Mapping[str, _Tensor], entries: Mapping[str, _Entry], names: Names, transposed: Collection[str]
) -> dict[str, _Entry]:
    """The file's tensor for each of the model's."""
    _check_transposed(tensors, transposed)
    expected = {
        name: tuple(reversed(tensor.shape)) if name in transposed else tensor.shape for name, tensor in tensors.items()
    }
    if names is None and not all(name in entries for name in tensors):
        shapes = [entry.shape for entry in entries.values()]
        if list(expected.values()) == shapes:
            return dict(zip(tensors, entries.values(), strict=True))
    by_name = _file_names(tensors, names, transposed)
    unused = [name for name in entries if name not in by_name.values()]
    for name, in_file in by_name.items():
        if in_file not in entries:
            there = f"; it has {_some(unused)}, which the model does not" if unused else ""
            raise ValueError(
                f"the model's tensor {_called(name, in_file)} is not in the file{there} (names= maps them)"
            )
        if entries[in_file].shape != expected[name]:
            how = ", transposed" if name in transposed else ""
            raise ValueError(
                f"tensor {_called(name, in_file)} is {list(entries[in_file].shape)} in the file "
                f"and {list(tensors[name].shape)} in the model{how}"
            )
    if unused:
        raise ValueError(f"the model does not have the file's {_some(unused)}")
    return {name: entries[in_file] for name, in_file in by_name.items()}


def _file_names(tensors: Mapping[str, _Tensor], names: Names, transposed: Collection[str]) -> dict[str, str]:
    """The file's names by the model's."""
    if names == "layers":
        return _layer_names(tensors, transposed)
    given = names or {}
    for name in given:
        if name not in tensors:
            raise ValueError(f"names: the model has no tensor {name}; it has {_some(list(tensors))}")
    return {name: given.get(name, name) for name in tensors}


def _layer_names(tensors: Mapping[str, _Tensor], transposed: Collection[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    width: int | None = None  # What the layer before gives.
    for number, (name, tensor) in enumerate(tensors.items()):
        shape = tuple(reversed(tensor.shape)) if name in transposed else tensor.shape
        is_weight = number % 2 == 0
        if is_weight and (len(shape) != 2 or width not in (None, shape[1])):
            expected = "[out, in]" if width is None else f"[out, {width}]"
            raise ValueError(f"tensor {name} is {list(shape)}; expected the weight {expected} of layer {number // 2}")
        if not is_weight and shape != (width,):
            raise ValueError(f"tensor {name} is {list(shape)}; expected the bias [{width}] of layer {number // 2}")
        width = shape[0]
        names[name] = f"layer{number // 2}.{'weight' if is_weight else 'bias'}"
    if len(names) % 2:
        raise ValueError(f"tensor {next(reversed(names))}: the bias of its layer is missing")
    return names


def _check_transposed(tensors: Mapping[str, _Tensor], transposed: Collection[str]) -> None:
    for name in transposed:
        if name not in tensors or len(tensors[name].shape) != 2:
            raise ValueError(f"transposed: {name} is not a matrix of the model")


def _check_type(name: str, tensor: _Tensor, entry: _Entry) -> None:
    both_floats = tensor.type in _FLOATS and entry.type in _FLOATS
    if tensor.type != entry.type and not both_floats:
        there, here = _NAMES[entry.type], tensor.type_name
        raise ValueError(f"tensor {_called(name, entry.name)} is {there} in the file and {here} in the model")
    tensor.check_readable(entry)


def _called(name: str, in_file: str) -> str:
    return name if name == in_file else f"{name} ({in_file} in the file)"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- The model


class _Tensor:
    """A model's: one of torch, or an array of numpy."""

    def __init__(self, name: str, of: Any) -> None:
        self._of = of
        self._library: Any = _library_of(of)
        if self._library is None:
            raise ValueError(f"tensor {name} is a {type(of).__name__}; expected a tensor of torch or an array of numpy")
        self.shape = tuple(int(size) for size in of.shape)
        self.type_name = str(of.dtype).removeprefix("torch.")
        self.type = _TYPES.get(self.type_name)

    @property
    def _is_torch(self) -> bool:
        return bool(self._library.__name__ == "torch")

    def check_readable(self, entry: _Entry) -> None:
        if not self._is_torch and entry.type == "BF16":
            raise ValueError(f"tensor {entry.name} is bfloat16, which numpy does not have")
        if not self._is_torch and not self._of.flags.writeable:
            raise ValueError(f"tensor {entry.name}: the array is read-only")

    def assign(self, data: bytearray, entry: _Entry, transposed: bool) -> None:
        """Copies the values, in the order of the file, into the tensor's own memory."""
        library = self._library
        kind = getattr(library, _NAMES[entry.type])
        if not data:
            return
        source = library.frombuffer(data, dtype=kind).reshape(entry.shape)
        source = source.T if transposed else source
        if self._is_torch:
            with library.no_grad():
                self._of.copy_(source)
        else:
            self._of[...] = source

    def data(self, transposed: bool) -> memoryview:
        """The values in the order of the file."""
        if not self._is_torch:
            array = self._of.T if transposed else self._of
            return memoryview(self._library.ascontiguousarray(array).reshape(-1).view("uint8"))
        tensor = self._of.detach().cpu()
        tensor = (tensor.T if transposed else tensor).contiguous()
        size = tensor.numel() * tensor.element_size()
        # Not every type of torch is one of numpy, and numpy need not be there.
        block: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else (ctypes.c_ubyte * 0)()
        block.viewed = tensor  # Lives as long as the view.
        return memoryview(block).cast("B")


def _library_of(tensor: Any) -> Any:
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray")):
        library: Any = sys.modules.get(name)  # Whoever has a tensor of it has imported it.
        if library is not None and isinstance(tensor, getattr(library, kind)):
            return importlib.import_module(name)
    return None


def _tensors_of(model: Any) -> dict[str, _Tensor]:
    if sys.byteorder != "little":
        raise ValueError("safetensors files are read and written on little-endian machines only")
    tensors = model.state_dict() if hasattr(model, "state_dict") else model
    if not isinstance(tensors, Mapping):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module or a dict of tensors by name")
    return {str(name): _Tensor(str(name), tensor) for name, tensor in tensors.items()}
