"""Readers of a model's files: what they hold of a folder, and which file cannot be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from checkpoints.gguf.reader import GgufError, read_gguf
from engine.load.quantized_checkpoint import read_tensors
from protocol.errors import ConfigError
from speculation.checkpoint import Checkpoint
from tests.checkpoints.gguf_writer import write_raw

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
METADATA: dict[str, Any] = {
    "llama.block_count": 3,
    "rate": 0.5,
    "yes": True,
    "names": ["ä", "b"],
    "ids": [1, -2],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors: dict[str, Any] = {
        "a.weight": (np.arange(6, dtype=np.float32).reshape(2, 3), F32),
        "b.weight": (np.arange(2 * 34, dtype=np.uint8).reshape(2, 34), Q8_0),
    }
    write_raw(tmp_path / "model.gguf", "llama", METADATA, tensors)
    return tmp_path / "model.gguf"


def test_it_reads_files_of_the_gguf_package(path: Path) -> None:
    file = read_gguf(path)
    assert file.metadata == {"general.architecture": "llama", **METADATA}
    assert file.get("block_count") == 3
    a, b = file.tensors["a.weight"], file.tensors["b.weight"]
    assert (a.shape, a.type, b.shape, b.type) == ((2, 3), F32, (2, 32), Q8_0)
    assert a.data.view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert b.data.tolist() == np.arange(68).reshape(2, 34).tolist()


def test_a_file_cut_anywhere_names_itself_and_the_cause(path: Path) -> None:
    content = path.read_bytes()
    cut = path.with_name("cut.gguf")
    end = content.rindex(bytes(range(60, 68))) + 8  # padding follows
    for length in [*range(1, end, 7), end - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf: .*(truncated|no GGUF file)"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"GGML", "it is no GGUF file"),
        (4, struct.pack("<I", 1), "has GGUF version 1, not 2 or 3"),
        (4, struct.pack(">I", 3), "it is big-endian"),
    ],
)
def test_a_wrong_header_is_refused(path: Path, place: int, value: bytes, reason: str) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(GgufError, match=reason):
        read_gguf(path)


def test_an_unknown_tensor_type_is_refused(path: Path) -> None:
    content = path.read_bytes()
    described = struct.pack("<Q", 8) + b"b.weight" + struct.pack("<IQQI", 2, 32, 2, Q8_0)
    assert described in content
    path.write_bytes(content.replace(described, described[:-4] + struct.pack("<I", 999)))
    with pytest.raises(GgufError, match=r"tensor b\.weight: has type 999"):
        read_gguf(path)


def test_arrays_in_arrays_are_refused(path: Path) -> None:
    """They may be nested without end."""
    nested = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9) + nested)
    with pytest.raises(GgufError, match=r"a: has arrays in an array"):
        read_gguf(path)


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    for number in (1, 2):
        tensors = {f"{number}.weight": (np.zeros((1, 4), np.float32), F32)}
        write_raw(tmp_path / f"m-{number:05}-of-00002.gguf", "llama", {"split.count": 2}, tensors)
    assert {*read_gguf(tmp_path / "m-00001-of-00002.gguf").tensors} == {"1.weight", "2.weight"}
    with pytest.raises(GgufError, match="name the first shard"):
        read_gguf(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf: cannot be read"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_count_of_shards_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "m-00001-of-00002.gguf", "llama", {"split.count": [2]}, {})
    with pytest.raises(GgufError, match=r"split\.count: is \[2\], not a number"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_file_with_a_tensor_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(ConfigError, match=r"^--model: \S*model\.safetensors: cannot be read: .*F6_E2M3"):
        read_tensors(str(tmp_path), None)


def test_a_file_without_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"there": "model-1.safetensors", "absent": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"there": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.tensor("there").tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"model-1\.safetensors: cannot be read: .*absent"):
        checkpoint.tensor("absent")
