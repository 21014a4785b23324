"""Weights in files: between torch, numpy and the C++ worker."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from psgrad.weights import load, save

np: Any = pytest.importorskip("numpy")


def floats(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


def mlp() -> dict[str, Any]:
    first = {"layer0.weight": floats(3, 2), "layer0.bias": floats(3)}
    return {**first, "layer1.weight": -floats(1, 3), "layer1.bias": floats(1)}


# ---- By name, by order


def test_what_was_saved_is_loaded_into_the_same_memory(file: Path) -> None:
    save(file, mlp(), metadata={"version": "7"})
    model = {name: zeros(*array.shape) for name, array in mlp().items()}
    bias = model["layer0.bias"]
    assert load(file, model) == {"version": "7"}
    assert all((model[name] == array).all() for name, array in mlp().items())
    assert bias is model["layer0.bias"]


def test_names_decide_before_the_order_does(file: Path) -> None:
    save(file, {"a": floats(2), "b": -floats(2)})
    model = {"b": zeros(2), "a": zeros(2)}
    load(file, model)
    assert model["a"].tolist() == [0, 1]
    assert model["b"].tolist() == [0, -1]


def test_other_names_are_matched_in_order_where_all_shapes_agree(file: Path) -> None:
    save(file, mlp())
    model = {"1.weight": zeros(3, 2), "1.bias": zeros(3), "3.weight": zeros(1, 3), "3.bias": zeros(1)}
    load(file, model)
    assert (model["3.weight"] == mlp()["layer1.weight"]).all()


def test_names_can_be_given(file: Path) -> None:
    save(file, {"a": floats(2), "b": -floats(2)})
    model = {"x": zeros(2), "b": zeros(2)}
    load(file, model, names={"x": "a"})
    assert model["x"].tolist() == [0, 1]


def test_matrices_the_other_way_round_are_transposed_when_asked_to(file: Path) -> None:
    save(file, {"dense/kernel": floats(2, 3), "dense/bias": zeros(3)}, names="layers", transposed=["dense/kernel"])
    model = {"layer0.weight": zeros(3, 2), "layer0.bias": zeros(3)}
    load(file, model)
    assert (model["layer0.weight"] == floats(2, 3).T).all()
    back = {"dense/kernel": zeros(2, 3), "dense/bias": zeros(3)}
    load(file, back, transposed=["dense/kernel"])
    assert (back["dense/kernel"] == floats(2, 3)).all()


def test_layers_get_the_names_of_the_cpp_worker(file: Path) -> None:
    save(
        file,
        {"1.weight": floats(3, 2), "1.bias": zeros(3), "3.weight": zeros(4, 3), "3.bias": zeros(4)},
        names="layers",
    )
    model = {f"layer{layer}.{kind}": zeros(*shape) for layer, kind, shape in
             [(0, "weight", (3, 2)), (0, "bias", (3,)), (1, "weight", (4, 3)), (1, "bias", (4,))]}  # fmt: skip
    load(file, model)
    assert (model["layer0.weight"] == floats(3, 2)).all()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (3,)}, r"tensor a is \[3\]; expected the weight \[out, in\] of layer 0"),
        ({"a": (3, 2), "b": (2,)}, r"tensor b is \[2\]; expected the bias \[3\] of layer 0"),
        ({"a": (3, 2), "b": (3,), "c": (3, 2), "d": (3,)}, r"tensor c is \[3, 2\]; expected the weight \[out, 3\]"),
        ({"a": (3, 2)}, "tensor a: the bias of its layer is missing"),
    ],
)
def test_a_model_that_is_no_linear_layers_has_no_such_names(
    file: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save(file, {name: zeros(*shape) for name, shape in shapes.items()}, names="layers")
    assert not file.exists()


# ---- What does not fit


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            {"a": zeros(2), "c": zeros(3)},
            {},
            "the model's tensor c is not in the file; it has b, which the model does not",
        ),
        ({"a": zeros(2)}, {}, "the model does not have the file's b"),
        ({"a": zeros(2), "b": zeros(3)}, {}, r"tensor b is \[2, 3\] in the file and \[3\] in the model"),
        ({"a": zeros(2), "x": zeros(2, 2)}, {"names": {"x": "b"}}, r"tensor x \(b in the file\) is \[2, 3\]"),
        ({"a": zeros(2), "b": zeros(2, 3)}, {"names": {"x": "b"}}, "names: the model has no tensor x; it has a, b"),
        (
            {"a": zeros(2), "b": zeros(2, 3)},
            {"transposed": ["b"]},
            r"is \[2, 3\] in the file and \[2, 3\] .*transposed",
        ),
        ({"a": zeros(2), "b": zeros(2, 3)}, {"transposed": ["a"]}, "transposed: a is not a matrix of the model"),
        ({"a": np.zeros(2, np.int64), "b": zeros(2, 3)}, {}, "tensor a is float32 in the file and int64 in the model"),
        ({"a": "text", "b": zeros(2, 3)}, {}, "tensor a is a str; expected a tensor of torch or an array of numpy"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_tensor_and_changes_nothing(
    file: Path, model: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    save(file, {"a": floats(2) + 1, "b": floats(2, 3)})
    with pytest.raises(ValueError, match=message):
        load(file, model, **options)
    assert not any(array.any() for array in model.values() if not isinstance(array, str))


def test_types_are_kept_and_floats_converted(file: Path) -> None:
    save(file, {"a": floats(2), "n": np.array(5, np.int64)})
    model = {"a": np.zeros(2, np.float64), "n": np.array(0, np.int64)}
    load(file, model)
    assert model["a"].tolist() == [0, 1]
    assert model["n"] == 5


def test_a_read_only_array_and_a_type_that_the_format_lacks_are_refused(file: Path) -> None:
    save(file, {"a": floats(2)})
    array = zeros(2)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="tensor a: the array is read-only"):
        load(file, {"a": array})
    with pytest.raises(ValueError, match="tensor a is complex64"):
        save(file, {"a": np.zeros(2, np.complex64)})
    with pytest.raises(TypeError, match="model is a list"):
        load(file, [])


# ---- Files of somebody else's


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"a": {}, "a": {}}', b"", "a name twice"),
        ({"__metadata__": {"x": 1}}, b"", "__metadata__"),
        ({"a": 1}, b"", "tensor a: expected dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "shape": [True]}}, bytes(8), "tensor a: expected dtype"),
        ({"a": {**ENTRY, "shape": [-2]}}, bytes(8), "tensor a: expected dtype"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 9]}}, bytes(8), "tensor a: expected dtype"),
        ({"a": {**ENTRY, "dtype": "F8"}}, bytes(8), "tensor a: type F8 is not supported"),
        ({"a": {**ENTRY, "shape": [3]}}, bytes(8), "tensor a: data_offsets do not fit the shape"),
        ({"a": {**ENTRY, "shape": [2**62, 4]}}, bytes(8), "tensor a: data_offsets do not fit the shape"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16), "tensor a: its data overlaps or leaves a gap"),
        ({"a": ENTRY, "b": ENTRY}, bytes(16), "tensor b: its data overlaps or leaves a gap"),
        ({"a": ENTRY}, bytes(7), "truncated, or too long"),
        ({"a": ENTRY}, bytes(9), "truncated, or too long"),
    ],
)
def test_a_damaged_file_is_refused(file: Path, header: object, data: bytes, message: str) -> None:
    write(file, header, data)
    with pytest.raises(ValueError, match=message) as raised:
        load(file, {"a": zeros(2)})
    assert str(raised.value).startswith(f"{file}: ")


@pytest.mark.parametrize("content", [b"", b"1234567", bytes([255] * 8), (1000).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_too_short_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file, or truncated"):
        load(file, {"a": zeros(2)})


def test_a_failed_save_leaves_the_old_file_and_no_other(file: Path) -> None:
    save(file, {"a": floats(2)})
    before = file.read_bytes()
    with pytest.raises(ValueError, match="complex64"):
        save(file, {"a": np.zeros(2, np.complex64)})
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


# ---- torch and the C++ worker


def test_a_torch_module_is_saved_and_loaded_in_its_own_memory(file: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    save(file, model)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    load(file, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert addresses == [parameter.data_ptr() for parameter in other.parameters()]
    half = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    save(file, half)
    load(file, model[0])
    assert torch.equal(model[0].weight, half.weight.float())


def test_the_cpp_worker_and_torch_exchange_networks(file: Path, tmp_path: Path) -> None:
    """ps_worker takes a torch module's weights, changes none at this learning rate, and saves them."""
    torch: Any = pytest.importorskip("torch")
    programs = os.environ.get("PSGRAD_BIN", "/none")
    if not os.access(f"{programs}/ps_worker", os.X_OK):
        pytest.skip("$PSGRAD_BIN does not name a folder with ps_server and ps_worker")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    save(file, model, names="layers")
    trained = tmp_path / "trained.safetensors"
    with subprocess.Popen(
        [f"{programs}/ps_server", "--learning_rate=1e-30"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("listening on ").strip()
        subprocess.run(
            [f"{programs}/ps_worker", f"--server={address}", "--model=mlp:10,4,3", "--steps=2",
             "--dataset=synthetic:samples=200,features=10,classes=3", f"--init_weights={file}",
             f"--save_weights={trained}"], check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        assert server.wait(60) == 0
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    metadata = load(trained, other)
    assert metadata["version"] == "2"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
