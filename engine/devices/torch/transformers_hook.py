"""Registration of the paged attention with Transformers under the name "tandem".

The model's attention layers call `paged_attention_forward`. It refuses arguments that the backends do not
support, and then calls our own operator, so that torch.compile(fullgraph=True) sees one opaque node. The
operator runs the backend last set by `set_current_backend`; the caller of the forward sets it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.kv.attention import AttentionBackend, AttentionOptions
from engine.linear.packed import operator
from protocol.errors import UnsupportedModelError

NAME = "tandem"
PROBE_NAME = "tandem_probe"
"""The name with a mask function, which reads the device in each forward: see `refuse_masks`."""

# Keyword arguments that Transformers passes to attention and that do not alter our result.
_HARMLESS = frozenset(
    {
        "is_causal",  # False is refused
        "output_attentions",  # True is refused
        "position_ids",
        "cache_position",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


class _Current(threading.local):
    backend: AttentionBackend | None = None


_current = _Current()


def set_current_backend(backend: AttentionBackend | None) -> None:
    _current.backend = backend


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    backend = _current.backend
    if backend is None:
        raise RuntimeError("no attention backend is set: call set_current_backend before the forward")
    return backend.forward(layer, query, key, value, AttentionOptions(scale, window, softcap, sinks))


paged_attention = operator(
    "paged_attention(Tensor query, Tensor key, Tensor value, int layer, float scale, int window,"
    " float softcap, Tensor? sinks=None) -> Tensor",
    _run,
    lambda query, key, value, *_: query.new_empty((*query.shape[:2], value.shape[2])),
)
"""Attention of packed rows over the current backend's pool.

query [rows, num_heads, key_dim], key [rows, num_kv_heads, key_dim], value [rows, num_kv_heads, value_dim],
layer, scale, sliding window (0: none), soft cap (0: none), sinks [num_heads] or None.
"""


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend for packed rows, as Transformers' attention function.

    query is [1, num_heads, total_tokens, head_dim], key and value the same with num_kv_heads; values may have
    another head_dim. The result is [1, total_tokens, num_heads, value's head_dim]. `s_aux` are the heads'
    attention sinks. A module with latent attention (`latent_attention`) may pass latents as keys and values
    of one head. Raises UnsupportedModelError for arguments that would be computed wrongly.
    """
    if refusal := _refusal(module, query, attention_mask, dropout, s_aux, kwargs):
        raise UnsupportedModelError(f"{type(module).__name__}: {refusal}")
    absorbed = getattr(module, "absorbed", None)
    rows = query.squeeze(0).transpose(0, 1)
    out = paged_attention(
        rows if absorbed is None else absorbed.queries(rows),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        module.layer_idx,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return (out if absorbed is None else absorbed.values(out)).unsqueeze(0), None


def _refusal(
    module: torch.nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> str:
    """Return why attention with these arguments would be computed wrongly, or ""."""
    if query.shape[0] != 1:
        return f"rows must be packed as [1, total_tokens], got a batch of {query.shape[0]}"
    if attention_mask is not None:
        return "an attention mask of its own is not supported"
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        return "attention that is not causal is not supported"
    if dropout or kwargs.get("output_attentions"):
        return "attention dropout and output_attentions are not supported"
    if sinks is None and getattr(module, "sinks", None) is not None:
        return "attention sinks that are not passed to the attention function are not supported"
    if sinks is not None and sinks.shape != (query.shape[1],):
        return (
            f"attention sinks of shape {list(sinks.shape)}, not one for each of {query.shape[1]} heads, are "
            "not supported"
        )
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if unknown:
        return f"attention argument {unknown[0]!r} is not supported"
    has_number = isinstance(getattr(module, "layer_idx", None), int)
    return "" if has_number else "layers without a number are not supported"


def refuse_masks(*args: Any, config: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """Refuse mask patterns that the backends do not support, as the mask function of the load probe.

    Serving has no mask function, so Transformers prepares no masks: the backends mask by position.
    """
    if use_vmap:
        raise UnsupportedModelError(
            "overlaying the causal mask with a mask of the model's own is not supported"
        )
    for field in ("index_topk", "indexer_budget"):
        if getattr(config, field, None) is not None:
            raise UnsupportedModelError(
                f"sparse attention to keys that an indexer chooses ({field}) is not supported"
            )


def register() -> None:
    """Register both names with Transformers as attention implementations. May be called repeatedly."""
    AttentionInterface.register(NAME, paged_attention_forward)
    AttentionInterface.register(PROBE_NAME, paged_attention_forward)
    AttentionMaskInterface.register(PROBE_NAME, refuse_masks)
