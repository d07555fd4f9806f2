"""Reading published EAGLE heads, and the errors for heads that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.devices.loaded_model import LoadedModel
from engine.load.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from speculation.eagle import load_eagle
from tests.speculation import eagle_files as files
from tests.speculation.eagle_files import Published


@pytest.fixture(scope="module")
def target(deep_target: Path) -> LoadedModel:
    return load_model(ServeConfig(model=str(deep_target), dtype="float32", device="cpu"))


def test_empty_layer_ids_mean_the_default(target: LoadedModel, tmp_path: Path) -> None:
    published = files.eagle3(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}
    )
    assert load_eagle(str(published.write(tmp_path)), target).head.shape.captured == (2, 4, 5)


def test_positions_come_from_the_longer_model_and_the_rope_base_from_the_target(
    target: LoadedModel, tmp_path: Path
) -> None:
    published = files.eagle3(theta=None)
    shape = load_eagle(str(published.write(tmp_path)), target).head.shape
    assert published.config["max_position_embeddings"] < shape.max_positions == files.MAX_POSITIONS
    assert shape.rope["rope_theta"] == files.THETA


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 7e3},
        {"rope_parameters": {"rope_theta": 7e3, "rope_type": "default"}},
        {"rope_theta": 7e3, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}, "full_attention": {}}},
    ],
)
def test_rope_parameters_of_the_head(target: LoadedModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    head = load_eagle(str(files.eagle3(theta=None, **fields).write(tmp_path)), target).head
    half = files.HEAD_DIM // 2
    expected = 1 / 7e3 ** (torch.arange(half) / half) / (2 if "rope_scaling" in fields else 1)
    torch.testing.assert_close(head.rotary.inv_freq, expected)


def test_the_rotation_is_not_rounded_to_the_targets_dtype(target: LoadedModel, tmp_path: Path) -> None:
    """Rounded, distant positions would be rotated by other angles than in training."""
    folder = str(files.eagle3().write(tmp_path))
    exact, halves = (
        load_eagle(folder, replace(target, dtype=dtype)).head for dtype in (torch.float32, torch.bfloat16)
    )
    assert {parameter.dtype for parameter in halves.parameters()} == {torch.bfloat16}
    assert torch.equal(halves.rotary.inv_freq, exact.rotary.inv_freq)


def test_the_targets_embedding_is_shared(target: LoadedModel, tmp_path: Path) -> None:
    published = files.eagle3()
    theirs = target.model.get_input_embeddings().weight
    published.tensors["embed_tokens.weight"] = theirs.detach().clone()
    assert load_eagle(str(published.write(tmp_path / "same")), target).embedding is None
    published.tensors["embed_tokens.weight"][3] += 1
    own = load_eagle(str(published.write(tmp_path / "own")), target).embedding
    assert own is not None and not torch.equal(own, theirs)


def test_without_an_lm_head_the_targets_rows_are_used(target: LoadedModel, tmp_path: Path) -> None:
    published = files.eagle3()
    del published.tensors["lm_head.weight"]
    loaded = load_eagle(str(published.write(tmp_path)), target)
    assert loaded.draft_ids is not None and loaded.lm_head is not None
    assert loaded.draft_ids.tolist() == published.tensors["t2d"].nonzero()[:, 0].tolist()
    expected = target.model.get_output_embeddings().weight[loaded.draft_ids]
    torch.testing.assert_close(loaded.lm_head.weight, expected)


def drop(name: str) -> Callable[[Published], object]:
    return lambda published: published.tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Published], object]:
    return lambda published: published.tensors.update({name: tensor})


def say(**fields: Any) -> Callable[[Published], object]:
    return lambda published: published.config.update(fields)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (drop("midlayer.self_attn.k_proj.weight"), r"midlayer\.self_attn\.k_proj\.weight is missing"),
        (drop("norm.weight"), r"norm\.weight is missing"),
        (drop("fc.weight"), r"fc\.weight is missing"),
        (
            put("midlayer.self_attn.q_proj.weight", torch.zeros(32, 32)),
            r"safetensors: midlayer\.self_attn\.q_proj\.weight has the shape \[32, 32\], not \[32, 64\]",
        ),
        (
            put("midlayer.self_attn.q_norm.weight", torch.ones(8)),
            r"midlayer\.self_attn\.k_norm\.weight is missing",
        ),
        (put("fc.weight", torch.zeros(32, 64)), r"fc\.weight takes 64 features"),
        (
            put("lm_head.weight", torch.zeros(50, 32)),
            r"lm_head\.weight has the shape \[50, 32\], not \[60, 32\]",
        ),
        (put("d2t", torch.full((60,), 150)), r"d2t leads to token ids outside the model's 160"),
        (put("d2t", torch.zeros(7, dtype=torch.int64)), r"d2t has the shape \[7\], not \[60\]"),
        (drop("d2t"), r"d2t is missing, and draft_vocab_size 60"),
        (say(num_hidden_layers=2), r"config\.json: num_hidden_layers must be 1, got 2"),
        (say(hidden_size="wide"), r"config\.json: hidden_size must be a positive whole number, got 'wide'"),
        (
            say(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
            r"eagle_aux_hidden_state_layer_ids \[2, 4, 9\] are not among the model's 8 layers",
        ),
        (say(hidden_size=40), r"hidden_size|40"),
        (say(partial_rotary_factor=0.5), r"config\.json: partial_rotary_factor must be 1, got 0\.5"),
        (
            say(speculators_model_type="peagle"),
            r"config\.json: speculators_model_type 'peagle' is a head that drafts in one pass, which vLLM",
        ),
    ],
)
def test_heads_that_do_not_fit_are_named(
    spoil: Callable[[Published], object], complaint: str, target: LoadedModel, tmp_path: Path
) -> None:
    published = files.eagle3()
    spoil(published)
    with pytest.raises(ConfigError, match=complaint):
        load_eagle(str(published.write(tmp_path)), target)


def test_eagle1_of_another_width_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    files.write_target(tmp_path / "target")
    published = files.eagle1(tmp_path / "target")
    published.tensors["fc.weight"] = torch.zeros(files.WIDTH, 3 * files.WIDTH)
    with pytest.raises(
        ConfigError, match=r"pytorch_model\.bin: fc\.weight has the shape \[32, 96\], not \[32, 64\]"
    ):
        load_eagle(str(published.write(tmp_path / "head")), target)
