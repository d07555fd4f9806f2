"""Published layouts of Medusa heads load unchanged, and compute the same as a plain reference."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.load.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from speculation.medusa import MedusaHeads, read_heads
from tests.speculation.medusa_files import (
    PlainHeads,
    own_names,
    random_heads,
    vllm_names,
    write_config,
    write_v1,
    write_vllm,
)
from tests.worker.tiny_model import VOCAB_SIZE

HIDDEN_SIZE = 64


@pytest.fixture(scope="module")
def loaded(target: Path) -> LoadedModel:
    return load_model(ServeConfig(model=str(target), dtype="float32", device="cpu"))


def computed(folder: Path, loaded: LoadedModel, features: Tensor) -> Tensor:
    weights = read_heads(str(folder), HIDDEN_SIZE, VOCAB_SIZE)
    return MedusaHeads(weights, loaded).logits(features, weights.num_heads)


def assert_computes(folder: Path, loaded: LoadedModel, heads: PlainHeads) -> None:
    for batch in (1, 3):
        features = torch.randn(batch, HIDDEN_SIZE, generator=torch.Generator().manual_seed(batch))
        found, expected = computed(folder, loaded, features), heads.logits(features)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(5, 1), (3, 2), (1, 0)])
def test_v1_layout(tmp_path: Path, loaded: LoadedModel, suffix: str, num_heads: int, num_layers: int) -> None:
    """config.json always says 2 heads of 1 layer."""
    heads = random_heads(num_heads, num_layers, HIDDEN_SIZE, VOCAB_SIZE)
    write_v1(tmp_path, own_names(heads), suffix)
    assert_computes(tmp_path, loaded, heads)


def test_v1_blocks_that_are_one_object_are_stored_once(tmp_path: Path, loaded: LoadedModel) -> None:
    heads = random_heads(3, 1, HIDDEN_SIZE, VOCAB_SIZE)
    tensors = {}
    for head, (((weight, bias),), lm_head) in enumerate(zip(heads.layers, heads.lm_heads, strict=True)):
        tensors |= {
            f"{head}.0.linear.weight": weight,
            f"{head}.0.linear.bias": bias,
            f"{head}.3.weight": lm_head,
        }
    write_v1(tmp_path, tensors, ".safetensors", medusa_num_layers=3)
    heads.layers = [layers * 3 for layers in heads.layers]
    assert_computes(tmp_path, loaded, heads)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_medusa_2_heads_within_sharded_base_weights(
    tmp_path: Path, loaded: LoadedModel, target: Path, kind: str
) -> None:
    heads = random_heads(4, 1, HIDDEN_SIZE, VOCAB_SIZE)
    base = load_file(target / "model.safetensors")
    shards = [base, {f"medusa_head.{name}": tensor for name, tensor in own_names(heads).items()}]
    write_config(tmp_path, medusa_num_heads=5, **json.loads((target / "config.json").read_text()))
    weight_map = {}
    stem, index = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    for number, tensors in enumerate(shards, start=1):
        name = f"{stem}-0000{number}-of-00002.{index}"
        weight_map |= dict.fromkeys(tensors, name)
        if kind == "bin":
            torch.save(tensors, tmp_path / name)
        else:
            save_file(tensors, tmp_path / name)
    (tmp_path / f"{stem}.{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_computes(tmp_path, loaded, heads)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_vllm_layout(tmp_path: Path, loaded: LoadedModel, bias: bool, prefix: str) -> None:
    heads = random_heads(3, 2, HIDDEN_SIZE, VOCAB_SIZE, bias=bias)
    tensors = {prefix + name: tensor for name, tensor in vllm_names(heads).items()}
    write_vllm(tmp_path, tensors, num_heads=9, num_hidden_layers=1, medusa_fc_bias=bias)
    assert_computes(tmp_path, loaded, heads)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_vllm_with_a_truncated_vocabulary(tmp_path: Path, loaded: LoadedModel, whole_rows: bool) -> None:
    heads = random_heads(3, 1, HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    heads.token_map = torch.tensor([7, 3, 250, 0, 42])
    rows = [lm_head[heads.token_map] for lm_head in heads.lm_heads]
    if not whole_rows:
        heads.lm_heads = rows
    tensors = vllm_names(heads) | {"token_map": heads.token_map}
    write_vllm(tmp_path, tensors, num_heads=3, truncated_vocab_size=5, vocab_size=VOCAB_SIZE)
    heads.lm_heads = rows
    assert_computes(tmp_path, loaded, heads)


def shared(heads: PlainHeads, lm_head: Tensor) -> dict[str, Tensor]:
    heads.lm_heads = [lm_head] * len(heads.layers)
    return {name: tensor for name, tensor in vllm_names(heads).items() if "lm_heads" not in name}


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllm_with_one_lm_head_for_all(tmp_path: Path, loaded: LoadedModel, name: str) -> None:
    heads = random_heads(3, 1, HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    tensors = shared(heads, heads.lm_heads[0]) | {name: heads.lm_heads[0]}
    write_vllm(tmp_path, tensors, num_heads=3, original_lm_head=True)
    assert_computes(tmp_path, loaded, heads)


def test_logits_are_scaled_without_padding_rows(tmp_path: Path, loaded: LoadedModel) -> None:
    heads = random_heads(2, 1, HIDDEN_SIZE, VOCAB_SIZE + 4)
    write_vllm(tmp_path, vllm_names(heads), num_heads=2, logit_scale=0.25)
    heads.lm_heads = [lm_head[:VOCAB_SIZE] * 0.25 for lm_head in heads.lm_heads]
    assert_computes(tmp_path, loaded, heads)


@pytest.mark.parametrize("is_shared", [False, True])
def test_bfloat16(tmp_path: Path, target: Path, is_shared: bool) -> None:
    loaded = load_model(ServeConfig(model=str(target), dtype="bfloat16", device="cpu"))
    heads = random_heads(3, 2, HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    if is_shared:
        heads.lm_heads = heads.lm_heads[:1] * 3
    tensors = {name: tensor.clone() for name, tensor in vllm_names(heads).items()}
    write_vllm(tmp_path, tensors, original_lm_head=is_shared)
    features = torch.randn(5, HIDDEN_SIZE).bfloat16()
    found = computed(tmp_path, loaded, features)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), heads.logits(features.float()), rtol=0.05, atol=0.1)


# --- what does not fit ------------------------------------------------------------------------------


def fault(folder: Path, hidden_size: int = HIDDEN_SIZE, vocab_size: int = VOCAB_SIZE) -> str:
    with pytest.raises(ConfigError) as error:
        read_heads(str(folder), hidden_size, vocab_size)
    assert "--speculative-config: model" in str(error.value)
    return str(error.value)


def heads_but(change: Any) -> dict[str, Tensor]:
    tensors = own_names(random_heads(3, 1, HIDDEN_SIZE, VOCAB_SIZE))
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("1.1.weight"), "head 1 has no LM head"),
        (lambda t: t.pop("2.0.linear.weight"), "head 2 has no weight for its layer 0"),
        (lambda t: t.pop("2.0.linear.bias"), "head 2 has no bias for its layer 0"),
        (
            lambda t: t.update({"0.0.linear.weight": torch.zeros(64, 63)}),
            "medusa_lm_head.pt: 0.0.linear.weight",
        ),
        (lambda t: t.update({"1.1.weight": torch.zeros(300, 63)}), "medusa_lm_head.pt: 1.1.weight"),
        (lambda t: t.update({"1.1.weight": torch.zeros(299, 64)}), "299 rows for a vocabulary of 300"),
        (lambda t: t.clear(), "no Medusa head"),
    ],
)
def test_faults_name_the_file_and_the_tensor(tmp_path: Path, change: Any, said: str) -> None:
    write_v1(tmp_path, heads_but(change))
    message = fault(tmp_path)
    assert said in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("config", "size", "token_map", "said"),
    [
        ({"original_lm_head": True}, VOCAB_SIZE, None, "head 0 has no LM head"),
        ({"truncated_vocab_size": 3}, 3, [1, 2, 300], "token_map must be a list of token ids below 300"),
        ({"truncated_vocab_size": 5}, 5, None, "truncated_vocab_size is 5"),
        *(
            ({"rank_acceptance": table}, VOCAB_SIZE, None, "rank_acceptance must have")
            for table in ([[0.5]], [[0.5], ["x"]], [[0.5], [1.5]], 3, [[0.5, 0.1], [0.5]])
        ),
    ],
    ids=str,
)
def test_faults_of_vllms_layout(
    tmp_path: Path, config: dict[str, Any], size: int, token_map: list[int] | None, said: str
) -> None:
    heads = random_heads(2, 1, HIDDEN_SIZE, size, bias=False)
    tensors = shared(heads, heads.lm_heads[0]) if "original_lm_head" in config else vllm_names(heads)
    if token_map is not None:
        tensors["token_map"] = torch.tensor(token_map)
    write_vllm(tmp_path, tensors, **config)
    assert said in fault(tmp_path)


class Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("medusa-was-here"),))


def test_a_pickle_with_more_than_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.1.weight": Malicious()}, path)
    assert "medusa_lm_head.pt: not a file of only tensors" in fault(tmp_path)
    path.write_bytes(pickle.dumps(Malicious()))
    assert "medusa_lm_head.pt: not a file of only tensors" in fault(tmp_path)
    assert not (tmp_path / "medusa-was-here").exists()


def test_missing_or_damaged_files(tmp_path: Path) -> None:
    assert "config.json: cannot be read" in fault(tmp_path)
    write_config(tmp_path)
    assert "has none of medusa_lm_head.safetensors, medusa_lm_head.pt" in fault(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"no tensors")
    assert "medusa_lm_head.safetensors: cannot be read" in fault(tmp_path)
