"""Parts of config.json and of the tensors that published heads and block drafters have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import linear_of
from engine.linear.packed_quantized import with_outputs
from engine.model.describe import ACTIVATIONS
from speculation.checkpoint import Checkpoint

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
TABLES = (EMBEDDING, LM_HEAD, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors beside the layers. `t2d` follows from `d2t`; the verifier's are the target's own."""


def read_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the tensors of a module with this state. `names` has the file's names by the module's. Raises
    ConfigError for a tensor that is missing, of another shape or no part of the module.
    """
    for ours in expected.keys() - names.keys():
        raise checkpoint.error(ours, "is missing")
    for ours, name in names.items():
        if ours not in expected:
            raise checkpoint.error(name, "is no part of the draft that config.json describes")
    tensors = {ours: checkpoint.tensor(name) for ours, name in names.items()}
    for ours, tensor in tensors.items():
        check_shape(checkpoint, names[ours], tensor, expected[ours].shape)
    return tensors


def check_shape(checkpoint: Checkpoint, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise checkpoint.error(name, f"has the shape {list(tensor.shape)}, not {list(expected)}")


def own_table(
    checkpoint: Checkpoint, name: str, rows: int, hidden_size: int, target: LoadedModel
) -> Tensor | None:
    """Return the file's embedding or LM head, unless it is the target's."""
    theirs = target.model.get_input_embeddings().weight
    if name not in checkpoint.names:
        if theirs.shape[1] != hidden_size:
            raise checkpoint.error(
                name, f"is missing, and the model's does not fit: {theirs.shape[1]} wide, not {hidden_size}"
            )
        return None
    tensor = checkpoint.tensor(name).to(target.device, target.dtype)
    if tensor.ndim == 2 and tensor.shape[0] > rows:
        tensor = tensor[:rows]  # padding
    check_shape(checkpoint, name, tensor, (rows, hidden_size))
    return None if name == EMBEDDING and torch.equal(tensor, theirs[:rows]) else tensor


def lm_head_of(
    checkpoint: Checkpoint, hidden_size: int, draft_ids: Tensor | None, target: LoadedModel
) -> nn.Module | None:
    """Return the file's LM head, else the target's rows of the draft's tokens; None if these are all."""
    rows = target.vocab_size if draft_ids is None else len(draft_ids)
    own = own_table(checkpoint, LM_HEAD, rows, hidden_size, target)
    if own is not None:
        return linear_of(own)
    return None if draft_ids is None else with_outputs(target.model.get_output_embeddings(), draft_ids)


def draft_ids_of(checkpoint: Checkpoint, size: int | None, target: LoadedModel) -> Tensor | None:
    """Return the target's ids of the `size` tokens that can be drafted, by `d2t`: draft token i is the
    target's token i + d2t[i]. None if all can be drafted.
    """
    vocab_size = target.vocab_size
    if "d2t" not in checkpoint.names:
        if size is not None and size != vocab_size:
            raise checkpoint.error(
                "d2t", f"is missing, and draft_vocab_size {size} is not the model's {vocab_size}"
            )
        return None
    offsets = checkpoint.tensor("d2t")
    check_shape(checkpoint, "d2t", offsets, (len(offsets) if size is None else size,))
    ids = torch.arange(len(offsets)) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise checkpoint.error("d2t", f"leads to token ids outside the model's {vocab_size}")
    return ids.to(target.device)


def number(checkpoint: Checkpoint, fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Return a field that must be a whole number."""
    value = fields.get(name)
    if not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise checkpoint.error(name, f"must be {kind}, got {value!r}")
    return value


def activation(checkpoint: Checkpoint, layer: Mapping[str, Any]) -> str:
    name = layer.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise checkpoint.error("hidden_act", f"is {name!r}, not one of {', '.join(ACTIVATIONS)}")
    return str(name)


def rope(checkpoint: Checkpoint, layer: Mapping[str, Any], theirs: Any) -> dict[str, Any]:
    """Return the file's parameters of the rotation, from any of the three places where it may have them. The
    base is the model's if the file has none.
    """
    given = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    given = dict(given.get("sliding_attention") or given)  # as speculators reads parameters by layer type
    if (factor := given.get("partial_rotary_factor", layer.get("partial_rotary_factor", 1))) != 1:
        raise checkpoint.error("partial_rotary_factor", f"must be 1, got {factor}")
    given["rope_type"] = given.pop("type", None) or given.get("rope_type") or "default"
    base = given.get("rope_theta") or layer.get("rope_theta")
    if base is None:
        base = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    return {**given, "rope_theta": float(base)}
