"""Drafting with Gemma 4's assistants: small decoders whose layers attend to the target's own keys and values.

An assistant's layer has no keys: it reads those of the target's last layer of the same kind. All draft tokens
have the position of the sequence's last token, and see the tokens before it. The first input is that token's
embedding in the target and the target's hidden state before it; further inputs are the draft token's
embedding and the assistant's own output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import TablesBackend, backend_over, by_table, select_backend
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from engine.devices.torch.runner import HeadModules, TorchRunner
from engine.kv.attention import AttentionBackend, AttentionMetadata, AttentionOptions
from engine.kv.layout import TARGET, LayerShape
from engine.kv.pool import KVPool
from engine.light_imports import load_kernels
from engine.linear.packed import kernel_fault, pack_linears
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig
from speculation.chains import ChainDrafting, DraftRows
from speculation.checkpoint import Checkpoint, round_draft
from speculation.target_states import LastStateDrafter


class AssistantDrafter(LastStateDrafter):
    """A drafter with an assistant. Its rows write zeros as keys and values at the place of the sequence's
    last token. The target writes its own there before anything reads them.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel
    ) -> None:
        super().__init__()
        if options.tree:
            raise ConfigError("--speculative-config: tree: an assistant drafts no tree")
        self._options, self._config = options, config
        self.hidden_layers = (target.num_layers,)
        self._assistant = _load(checkpoint, target)
        if options.quantization is not None:
            round_draft(self._assistant, CodeFormat(options.quantization), target)
        if kernel_fault(target.device, target.dtype) is None:
            pack_linears(self._assistant.model)

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        device, group = loaded.device, pool.groups[TARGET]
        kind, _ = select_backend(device, loaded.dtype, self._config.attention_backend)
        backend = _Before(backend_over(kind, pool.layers(TARGET), group), len(group.layers))
        theirs = loaded.model.config.get_text_config(decoder=True).layer_types
        last_of_kind = {kind: layer for layer, kind in enumerate(theirs)}
        for layer in self._assistant.model.layers:
            layer.self_attn.layer_idx = last_of_kind[layer.self_attn.layer_type]
        shapes = {kind: group.layer_shape(layer) for kind, layer in last_of_kind.items()}
        forward = _Modules(self._assistant, loaded.model, shapes, backend)
        self._runner = TorchRunner(forward, backend, device, "off", products="", packed=False)
        self._sampler = Sampler(loaded.vocab_size, device, loaded.eos_token_ids)
        self._drafting = ChainDrafting(self._runner, self._options, self._rows, self._sampler)

    def warm_up(self) -> None:
        self._runner.warm_up()

    @torch.inference_mode()
    def _draft(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        rows = [self._rows(each, DraftRows(0, each.token_ids[-1:])) for each in sequences]
        return self._drafting.draft(sequences, rows, rooms, self._last_states(sequences))

    def _rows(self, sequence: SequenceState, rows: DraftRows) -> SequenceRows:
        return SequenceRows(rows.token_ids, len(sequence.token_ids) - 1, sequence.held.blocks)


class _Before(TablesBackend):
    """Attention of single rows to the keys before their own."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        backends, tables = by_table(backend)
        super().__init__(backends, tables or [0] * num_layers)
        self.can_capture = False

    def begin_step(self, metadata: AttentionMetadata) -> None:
        before = replace(metadata, context_len=(metadata.context_len - 1).clamp(min=0))
        if self.num_tables > 1:
            super().begin_step(before)
        else:
            self.backends[0].begin_step(before)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if options.window:  # the window includes the row's own key
            options = options._replace(window=options.window - 1)
        return super().forward(layer, query, key, value, options)


class _Modules(HeadModules):
    """The assistant's modules. `shapes` has the shape of the target's keys and values by kind of layer."""

    def __init__(
        self,
        assistant: PreTrainedModel,
        target: PreTrainedModel,
        shapes: Mapping[str, LayerShape],
        backend: AttentionBackend,
    ) -> None:
        super().__init__(assistant, backend, target.get_input_embeddings())
        self._shapes = shapes

    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the requested rows, and the hidden states for the rows after them."""
        token_ids, positions, rows, before = inputs
        assistant, count = self._model, len(token_ids)
        entered = assistant.pre_projection(torch.cat([self._embeddings(token_ids), before], dim=-1))
        shared = {
            kind: tuple(
                entered.new_zeros((1, shape.num_kv_heads, count, dim))
                for dim in (shape.key_dim, shape.value_dim)
            )
            for kind, shape in self._shapes.items()
        }
        states = assistant.model(
            inputs_embeds=entered.unsqueeze(0),
            attention_mask=dict.fromkeys(shared),
            position_ids=positions.unsqueeze(0),
            shared_kv_states=shared,
            use_cache=False,
        )
        last = states.last_hidden_state[:, rows]
        if assistant.masked_embedding is None:
            logits = assistant.lm_head(last)
        else:
            logits = assistant.masked_embedding(last, assistant.lm_head.weight)
        return logits[0], assistant.post_projection(last)[0]


def _load(checkpoint: Checkpoint, target: LoadedModel) -> Any:
    """Load the assistant. Raise ConfigError that names the field that does not fit the target."""
    folder, theirs = checkpoint.folder, target.model.config.get_text_config(decoder=True)
    load_kernels()
    try:
        config = AutoConfig.from_pretrained(folder)
        assistant: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=target.dtype, attn_implementation=transformers_hook.NAME
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--speculative-config: model: cannot load {folder}: {error}") from error
    text = config.get_text_config(decoder=True)
    for name, own, wanted in (
        ("backbone_hidden_size", config.backbone_hidden_size, target.hidden_size),
        ("vocab_size", text.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise checkpoint.error(name, f"must be the model's {wanted}, got {own}")
    kinds = getattr(theirs, "layer_types", None) or ()
    if not set(text.layer_types) <= set(kinds):
        raise checkpoint.error("layer_types", f"{text.layer_types} are not all among the model's")
    return assistant.to(target.device).eval().requires_grad_(False)
