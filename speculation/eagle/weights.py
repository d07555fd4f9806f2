"""Reads published heads: EAGLE-1 and 2, EAGLE-3 (official, SpecForge, `speculators`), EAGLE-3.1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend
from engine.kv.layout import DRAFT, Group, Segment
from engine.linear.packed import linear_of
from engine.linear.packed_quantized import with_outputs
from engine.load.select import runner_of_head
from engine.model.describe import ACTIVATIONS
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.speculation import Quantization
from speculation.checkpoint import Checkpoint, round_draft
from speculation.draft_head import DraftHead
from speculation.eagle.head import Head, HeadShape, head_program

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_NOT_OURS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""`t2d` follows from `d2t`; the rest are the target's own."""


class EagleHead(DraftHead):
    """`embedding` [vocab_size, hidden_size] and `lm_head`, of `draft_vocab_size` outputs, are None where the
    target's serve.
    """

    def __init__(
        self,
        head: Head,
        embedding: Tensor | None,
        lm_head: nn.Module | None,
        draft_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.head, self.embedding, self.lm_head, self.draft_ids = head, embedding, lm_head, draft_ids
        shape = head.shape
        self.hidden_layers, self.feature_size = shape.captured, shape.feature_size
        self.kv_group = Group.uniform(DRAFT, Segment(1, shape.num_kv_heads, shape.head_dim, dtype))
        self.mixes_in_program = head.mixing is not None
        self.combine = head.combine  # type: ignore[method-assign]

    def tables(self, target: LoadedModel) -> tuple[nn.Module, nn.Module]:
        """Return embedding and LM head: the target's where the file has none of its own."""
        embedding, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        if self.embedding is not None:
            embedding = nn.Embedding.from_pretrained(self.embedding)
        return embedding, lm_head if self.lm_head is None else self.lm_head

    def runner(self, config: ServeConfig, target: LoadedModel, backend: AttentionBackend) -> Runner:
        embedding, lm_head = self.tables(target)
        parts = nn.ModuleList([self.head, lm_head])
        return runner_of_head(
            config,
            lambda: head_program(self.head, embedding, parts[1], self.draft_ids),
            parts,
            self.head.shape.max_positions,
            target,
            backend,
        )

    def round(self, format: CodeFormat, target: LoadedModel) -> None:
        """The layers that are not the target's own. Raises ConfigError where the format fits none."""
        own = nn.ModuleList([self.head] if self.lm_head is None else [self.head, self.lm_head])
        round_draft(own, format, target)
        self.lm_head = own[1] if len(own) > 1 else None


def load_eagle(model: str, target: LoadedModel, quantization: Quantization | None = None) -> EagleHead:
    """Load a head in the target's dtype, on its device. Raises `ConfigError` that names the file and the
    tensor or field that does not fit.
    """
    checkpoint = Checkpoint(model)
    shape = read_shape(checkpoint, target)
    head = Head(shape)
    tensors = {
        _our_name(name): name
        for name in checkpoint.names
        if name not in (EMBEDDING, LM_HEAD, "d2t", *_NOT_OURS)
    }
    _fill(head, checkpoint, tensors)
    draft_ids = _draft_ids(checkpoint, shape, target.vocab_size)
    if draft_ids is not None:
        draft_ids = draft_ids.to(target.device)
    for parameter in head.parameters():  # as in Transformers the rotation's frequencies stay float32
        parameter.data = parameter.data.to(target.dtype)
    loaded = EagleHead(
        head=head.to(target.device).eval().requires_grad_(False),
        embedding=_own(checkpoint, EMBEDDING, target.vocab_size, shape, target),
        lm_head=_lm_head(checkpoint, shape, draft_ids, target) if shape.is_eagle3 else None,
        draft_ids=draft_ids,
        dtype=target.dtype,
    )
    if quantization is not None:
        loaded.round(CodeFormat(quantization), target)
    return loaded


def _our_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _fill(head: Head, checkpoint: Checkpoint, tensors: dict[str, str]) -> None:
    """`tensors`: the file's names by ours."""
    expected = head.state_dict()
    for ours in expected.keys() - tensors.keys():
        raise checkpoint.error(ours, "is missing")
    for ours, name in tensors.items():
        if ours not in expected:
            raise checkpoint.error(
                name, "is no part of a head of one decoder layer as its config.json describes it"
            )
    with torch.no_grad():
        for ours, name in tensors.items():
            tensor = checkpoint.tensor(name)
            _check_shape(checkpoint, name, tensor, expected[ours].shape)
            expected[ours].copy_(tensor)


def _check_shape(checkpoint: Checkpoint, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise checkpoint.error(name, f"has the shape {list(tensor.shape)}, not {list(expected)}")


def _lm_head(
    checkpoint: Checkpoint, shape: HeadShape, draft_ids: Tensor | None, target: LoadedModel
) -> nn.Module | None:
    """The file's; else the target's, as far as it is needed."""
    rows = target.vocab_size if draft_ids is None else len(draft_ids)
    own = _own(checkpoint, LM_HEAD, rows, shape, target)
    if own is not None:
        return linear_of(own)
    return None if draft_ids is None else with_outputs(target.model.get_output_embeddings(), draft_ids)


def _own(
    checkpoint: Checkpoint, name: str, rows: int, shape: HeadShape, target: LoadedModel
) -> Tensor | None:
    """The file's embedding or LM head, unless it is the target's."""
    if name not in checkpoint.names:
        theirs = target.model.get_input_embeddings().weight
        if theirs.shape[1] != shape.hidden_size:
            raise checkpoint.error(
                name,
                f"is missing, and the model's does not fit: {theirs.shape[1]} wide, not {shape.hidden_size}",
            )
        return None
    tensor = checkpoint.tensor(name).to(target.device, target.dtype)
    if tensor.ndim == 2 and tensor.shape[0] > rows:
        tensor = tensor[:rows]  # padding
    _check_shape(checkpoint, name, tensor, (rows, shape.hidden_size))
    if name == EMBEDDING and torch.equal(tensor, target.model.get_input_embeddings().weight[:rows]):
        return None
    return tensor


def _draft_ids(checkpoint: Checkpoint, shape: HeadShape, vocab_size: int) -> Tensor | None:
    """`d2t` holds offsets: draft token i is the target's token i + d2t[i]."""
    size = shape.draft_vocab_size
    if "d2t" not in checkpoint.names:
        if size is not None and size != vocab_size:
            raise checkpoint.error(
                "d2t", f"is missing, and draft_vocab_size {size} is not the model's {vocab_size}"
            )
        return None
    offsets = checkpoint.tensor("d2t")
    _check_shape(checkpoint, "d2t", offsets, (len(offsets) if size is None else size,))
    ids = torch.arange(len(offsets)) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise checkpoint.error("d2t", f"leads to token ids outside the model's {vocab_size}")
    return ids


def read_shape(checkpoint: Checkpoint, target: LoadedModel) -> HeadShape:
    """From config.json and the tensors' names and shapes."""
    config = checkpoint.config
    layer = config.get("transformer_layer_config", config)
    if layer.get("num_hidden_layers", 1) != 1:
        raise checkpoint.error("num_hidden_layers", f"must be 1, got {layer['num_hidden_layers']}")
    theirs = target.model.config.get_text_config(decoder=True)
    hidden_size = _number(checkpoint, layer, "hidden_size")
    num_heads = _number(checkpoint, layer, "num_attention_heads")
    is_eagle3 = _is_eagle3(checkpoint)
    captured, mixes = _captured(checkpoint, theirs) if is_eagle3 else ((theirs.num_hidden_layers,), True)
    options = {**(config.get("eagle_config") or {}), **config}
    return HeadShape(
        is_eagle3=is_eagle3,
        captured=captured,
        feature_size=len(captured) * theirs.hidden_size,
        hidden_size=hidden_size,
        intermediate_size=_number(checkpoint, layer, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        max_positions=max(layer.get("max_position_embeddings") or 0, target.max_model_len),
        rope=_rope(checkpoint, layer, theirs),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        hidden_act=_activation(checkpoint, layer),
        draft_vocab_size=config.get("draft_vocab_size") if is_eagle3 else None,
        mixes=mixes,
        fc_norm=bool(options.get("fc_norm")),
        norm_before_fc=bool(options.get("norm_before_fc")),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        logit_scale=float(config.get("logit_scale") or 1.0),
        sliding_window=_sliding_window(layer),
        head_norms=any(name.endswith("self_attn.q_norm.weight") for name in checkpoint.names),
        biases=frozenset(
            _our_name(name).removesuffix(".bias") for name in checkpoint.names if name.endswith(".bias")
        ),
    )


def _number(checkpoint: Checkpoint, layer: dict[str, Any], name: str) -> int:
    value = layer.get(name)
    if not isinstance(value, int) or value < 1:
        raise checkpoint.error(name, f"must be a positive whole number, got {value!r}")
    return value


def _activation(checkpoint: Checkpoint, layer: dict[str, Any]) -> str:
    name = layer.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise checkpoint.error("hidden_act", f"is {name!r}, not one of {', '.join(ACTIVATIONS)}")
    return str(name)


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    """EAGLE-3 norms the feature before attention, which EAGLE-1 and 2 do not."""
    return any(_our_name(name) == "midlayer.hidden_norm.weight" for name in checkpoint.names)


def _captured(checkpoint: Checkpoint, theirs: Any) -> tuple[tuple[int, ...], bool]:
    """The hidden states that make the feature, and whether `fc` mixes them.

    At the top level the ids are Transformers' (and vLLM's and speculators'), in `eagle_config` they mean the
    output of that layer (SpecForge, SGLang, ModelOpt), which Transformers numbers one higher.
    """
    config, layers = checkpoint.config, theirs.num_hidden_layers
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        return (layers,), "fc.weight" in checkpoint.names
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        ids = [layer + 1 for layer in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
    ids = ids or [2, layers // 2, layers - 3]
    if not all(isinstance(layer, int) and 0 <= layer <= layers for layer in ids):
        raise checkpoint.error(
            "eagle_aux_hidden_state_layer_ids", f"{ids} are not among the model's {layers} layers"
        )
    width = checkpoint.tensor("fc.weight").shape[-1]
    if width != len(ids) * theirs.hidden_size:
        raise checkpoint.error(
            "fc.weight", f"takes {width} features, not the {theirs.hidden_size} of each of {len(ids)} layers"
        )
    return tuple(ids), True


def _rope(checkpoint: Checkpoint, layer: dict[str, Any], theirs: Any) -> dict[str, Any]:
    """The file's parameters in whichever of the three places it has them; the base is the model's if it has
    none.
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


def _sliding_window(layer: dict[str, Any]) -> int | None:
    slides = layer.get("use_sliding_window", True) and "sliding_attention" in (layer.get("layer_types") or ())
    return layer.get("sliding_window") if slides else None
