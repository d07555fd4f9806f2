"""Readers of a model's files name the file that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.load.quantized_checkpoint import read_tensors
from protocol.errors import ConfigError
from speculation.checkpoint import Checkpoint


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
