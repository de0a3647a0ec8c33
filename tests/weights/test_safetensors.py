"""Directories of safetensors files, whole and damaged."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.safetensors import INDEX, SafetensorsCheckpoint

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(3.0, np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    return tmp_path


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_single_file(directory):
    save_file(TENSORS, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(directory)
    assert set(checkpoint.names()) == set(TENSORS)
    for name, want in TENSORS.items():
        got = checkpoint.read(name)
        assert got.dtype == want.dtype
        assert got.shape == checkpoint.shape(name) == want.shape
        assert checkpoint.dtype(name) == want.dtype.name
        np.testing.assert_array_equal(got, want)
    assert checkpoint.where("a") == str(directory / "model.safetensors")


def test_reading_maps_the_file_and_cannot_change_it(directory):
    save_file(TENSORS, directory / "model.safetensors")
    assert not SafetensorsCheckpoint(directory).read("a").flags.writeable


def test_configs_come_along(directory):
    save_file(TENSORS, directory / "model.safetensors")
    assert SafetensorsCheckpoint(directory).config == {"hidden_size": 3}
    assert SafetensorsCheckpoint(directory).generation_config == {}
    (directory / "generation_config.json").write_text('{"top_k": 5}')
    assert SafetensorsCheckpoint(directory).generation_config == {"top_k": 5}


def test_the_index_decides(directory):
    save_file({"a": TENSORS["a"], "b": TENSORS["b"] * 0}, directory / "one.safetensors")
    save_file({"b": TENSORS["b"]}, directory / "two.safetensors")
    write_index(directory, {"a": "one.safetensors", "b": "two.safetensors"})
    for stray in ("model.safetensors", "consolidated.safetensors"):
        save_file({name: np.zeros_like(values) for name, values in TENSORS.items()}, directory / stray)
    checkpoint = SafetensorsCheckpoint(directory)
    for name in ("a", "b"):
        np.testing.assert_array_equal(checkpoint.read(name), TENSORS[name])
    assert checkpoint.where("b").endswith("two.safetensors")


def test_several_files_without_an_index(directory):
    save_file({"a": TENSORS["a"]}, directory / "one.safetensors")
    save_file({"b": TENSORS["b"]}, directory / "two.safetensors")
    save_file({"a": TENSORS["a"]}, directory / "consolidated.safetensors")
    assert set(SafetensorsCheckpoint(directory).names()) == {"a", "b"}
    save_file({"b": TENSORS["b"]}, directory / "three.safetensors")
    with pytest.raises(LoadError, match="tensor b is in both"):
        SafetensorsCheckpoint(directory)


def test_missing_files_are_named(directory):
    with pytest.raises(LoadError, match=r"holds no \.safetensors"):
        SafetensorsCheckpoint(directory)
    write_index(directory, {"a": "gone.safetensors"})
    with pytest.raises(LoadError, match=r"gone\.safetensors is missing"):
        SafetensorsCheckpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json does not exist"):
        SafetensorsCheckpoint(directory)


def test_a_tensor_the_index_promises(directory):
    save_file({"a": TENSORS["a"]}, directory / "one.safetensors")
    write_index(directory, {"a": "one.safetensors", "z": "one.safetensors"})
    with pytest.raises(LoadError, match=r"one\.safetensors lacks tensor z"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("text", ["[1]", "{", "\x00"])
def test_a_config_that_is_no_object(directory, text):
    (directory / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        SafetensorsCheckpoint(directory)


def test_an_index_without_a_map(directory):
    (directory / INDEX).write_text("{}")
    with pytest.raises(LoadError, match="has no weight_map"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("keep", [0, 4, 8, 40])
def test_a_file_cut_off_in_its_header(directory, keep):
    save_file(TENSORS, directory / "model.safetensors")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors is cut off"):
        SafetensorsCheckpoint(directory)


def test_a_file_cut_off_in_its_data(directory):
    save_file({"a": TENSORS["a"]}, directory / "model.safetensors")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LoadError, match="cut off: tensor a ends"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "malformed"),
        ([1], "malformed"),
        ({"a": {"dtype": "F32"}}, "malformed"),
        ({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, "dtype Q9"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "cannot take 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "impossible"),
    ],
)
def test_a_header_that_lies(directory, header, message):
    write_raw(directory / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(LoadError, match=message):
        SafetensorsCheckpoint(directory)
