"""Drafting with the model itself: with some of its layers, or with its weights rounded.

After Draft & Verify (Zhang et al. 2023), LayerSkip (Elhoushi et al. 2024) and SWIFT (Xia et al. 2024). The
draft has no KV of its own. Committed tokens have the model's KV in each layer that drafts: that is better
than the draft's, and no prompt need be read. Draft tokens get the draft's KV, at places that the verification
computes again before anything else reads them, so no bit of the model's KV is the draft's. The same holds for
what recurrent layers keep of each token; their states do not advance.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch.runner import Runner
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over, select_backend
from engine.devices.cpu.decoder.native_model import PRODUCTS, LayerArgs, ModelArgs, NativeModel, WeightsArgs
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.linear.packed import PackedLinear, kernel_fault, linear_of, unpacked
from engine.linear.packed_quantized import fits, packed
from engine.linear.quantized import group_size, round_to_nearest
from engine.load.select import runner_of
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig
from speculation.chains import ChainDrafting, DraftRows
from speculation.checkpoint import FIELD, round_draft
from speculation.drafter import Drafter


class SelfDrafter(Drafter):
    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        """Prepare `target`, whose weights are packed, to draft. Raise `ConfigError` that names the field."""
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        is_quantized = config.quantization is not None or bool(target.checkpoint)
        multiplies = kernel_fault(target.device, target.dtype) is None and not is_quantized
        options = with_defaults(options, num_layers, can_round=multiplies)
        self._options, self._config = options, config
        self._kept = kept_layers(options, num_layers)
        recurrent = target.recurrent.hooks.layers if target.recurrent is not None else []
        places = [place for layer, place in enumerate(target.kv_group.layers) if layer not in recurrent]
        if len(self._kept) < num_layers and len({*places}) < len(places):
            raise ConfigError(
                f"--speculative-config: skip_layers: {target.model.config.model_type} has layers that share "
                "their KV, so it cannot draft with only some of its layers"
            )
        self._format = None if options.quantization is None else CodeFormat(options.quantization)
        if self._format is not None and is_quantized:
            raise ConfigError(f"{FIELD}: the model's weights are already quantized: remove this option")
        is_plain = self._format is None and target.recurrent is None
        self._is_made_late = is_plain and target.device.type != "cpu"
        self._loaded = target if self._is_made_late else self._part(target)

    def _part(self, target: LoadedModel) -> LoadedModel:
        if target.description is not None:
            described = PartialDescription(target.description, self._kept, self._format)
            if self._format is not None and not described.num_rounded:
                raise ConfigError(f"{FIELD}: {self._format.value} fits none of the model's layers")
            return replace(target, description=described, adapters=None)
        model = with_layers(target.model, self._kept)
        if self._format is not None:
            _unpack(model)
            round_draft(model, self._format, target, model.get_output_embeddings())
        return replace(target, model=model, adapters=None)

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        if self._is_made_late:  # shares the weights that the model's runner has joined
            self._loaded = self._part(loaded)
        self._runner = self._build_runner(pool)
        self._state_slots = pool.state_slots
        self._sampler = Sampler(loaded.vocab_size, loaded.device, loaded.eos_token_ids)
        self._drafting = ChainDrafting(self._runner, self._options, self._draft_rows, self._sampler)

    def _build_runner(self, pool: KVPool) -> Runner:
        loaded, group = self._loaded, pool.groups[TARGET]
        layers = pool.layers(TARGET)
        if loaded.description is not None:  # a description numbers its own layers
            layers = [layers[layer] for layer in self._kept]
            group = replace(group, layers=tuple(group.layers[layer] for layer in self._kept))
        backend_class, _ = select_backend(loaded.device, loaded.dtype, self._config.attention_backend)
        backend = backend_over(backend_class, layers, group)
        return runner_of(self._config, loaded, backend, state_slots=pool.state_slots, drafts=True)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        rows = [self._draft_rows(each, DraftRows(0, each.token_ids[-1:])) for each in sequences]
        return [*self._drafting.draft(sequences, rows, self._fitting(sequences, counts))]

    def _draft_rows(self, sequence: SequenceState, rows: DraftRows) -> SequenceRows:
        start, blocks = len(sequence.token_ids) - 1 + rows.first, sequence.held.blocks
        certain = self._num_settled(sequence)
        return SequenceRows(rows.token_ids, start, blocks, state_slot=sequence.state_slot, certain=certain)

    def _num_settled(self, sequence: SequenceState) -> int:
        """Return the tokens in recurrent layers' states, to which drafting adds none."""
        return self._state_slots.position(sequence.state_slot) if self._state_slots is not None else 0

    def _fitting(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> Sequence[int]:
        """Limit the counts to the room that recurrent layers have after the tokens that they keep already."""
        if self._state_slots is None:
            return counts
        window = self._state_slots.layout.window
        most = min(window - (len(each.token_ids) - 1 - self._num_settled(each)) for each in sequences)
        return [min(count, most) for count in counts]

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Do nothing: the drafter needs only the model's KV."""

    def forget(self, request_id: str) -> None:
        self._sampler.forget(request_id)


def _unpack(model: PreTrainedModel) -> None:
    """Unpack packed layers, so that they can be rounded; the head stays packed."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if isinstance(module, PackedLinear) and module is not head:
            plain = linear_of(unpacked(module.weight)[: module.out_features], module.bias)
            model.set_submodule(path, plain)


class PartialDescription(NativeModel):
    """Some of a model's layers for the native decoder, `num_rounded` of the products rounded."""

    def __init__(self, whole: NativeModel, kept: Sequence[int], format: CodeFormat | None) -> None:
        super().__init__(whole.dtype)
        self._whole = whole  # the owner of most of the memory
        self.num_rounded = 0
        layers = [self._layer(whole.layers[layer], format) for layer in kept]
        self.model = ModelArgs.from_buffer_copy(whole.model)
        self.model.num_layers = len(layers)
        for layer in layers[:]:
            if layer.beside:
                second = self._layer(whole.layers[layer.beside], format)
                layer.beside = len(layers)
                layers.append(second)
        self.model.num_beside = len(layers) - len(kept)
        self.layers = (LayerArgs * len(layers))(*layers)
        self.model.layers = ctypes.addressof(self.layers)
        self.count_products()

    def _layer(self, whole: LayerArgs, format: CodeFormat | None) -> LayerArgs:
        layer = LayerArgs.from_buffer_copy(whole)
        if format is not None:
            for name in PRODUCTS:
                setattr(layer, name, self._rounded(getattr(whole, name), format))
        return layer

    def _rounded(self, whole: WeightsArgs, format: CodeFormat) -> WeightsArgs:
        """Round weights, or return them unchanged if the format does not fit them."""
        group = group_size(format, whole.inputs)
        if group is None or whole.values is None:  # quantized already, or no such product
            return whole
        weight = unpacked(self._whole.kept(whole.values))[: whole.outputs]
        rounded = round_to_nearest(weight, format, group)
        bias = None if whole.bias is None else self._whole.kept(whole.bias)
        if self.dtype is not torch.bfloat16:  # the kernel of rounded weights takes bf16 only
            args = self.matrix(rounded.dequantized(), bias)
        elif fits(rounded):
            args = self.keep_quantized(packed(rounded), bias)
        else:
            return whole
        self.num_rounded += 1
        args.multipliers = whole.multipliers
        return args


_FLAG = "--speculative-config"


def with_defaults(options: SpeculativeConfig, num_layers: int, *, can_round: bool) -> SpeculativeConfig:
    """Fill in the layers and the format that draft, if the configuration names none.

    All layers in int4, if it `can_round` them: an untrained model bears that much better than losing layers.
    Otherwise every second layer, with the first and the last, which matter most.
    """
    if options.skip_layers or options.exit_layer is not None or options.quantization is not None:
        return options
    if can_round:
        return msgspec.structs.replace(options, quantization="int4")
    return msgspec.structs.replace(options, skip_layers=list(range(1, num_layers - 1, 2)))


def kept_layers(options: SpeculativeConfig, num_layers: int) -> list[int]:
    """Return the numbers of drafting layers, ascending. Raise `ConfigError` that names field and limit."""
    if options.exit_layer is not None:
        if options.exit_layer >= num_layers:
            raise ConfigError(
                f"{_FLAG}: exit_layer: must be below the model's {num_layers} layers, "
                f"got {options.exit_layer}"
            )
        return list(range(options.exit_layer))
    skipped = set(options.skip_layers)
    if beyond := sorted(layer for layer in skipped if layer >= num_layers):
        raise ConfigError(
            f"{_FLAG}: skip_layers: the model's layers are 0 to {num_layers - 1}, got {beyond[0]}"
        )
    if len(skipped) == num_layers:
        raise ConfigError(f"{_FLAG}: skip_layers: at least one of the model's {num_layers} layers must draft")
    return [layer for layer in range(num_layers) if layer not in skipped]


def with_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return the model with only the layers `kept`, which share its weights and keep their numbers in its KV.

    Raise `ConfigError` for a model whose layers are not in one list, or whose configuration does not list
    their kinds.
    """
    tensors = [*model.parameters(), *model.buffers()]
    part = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    config = part.config.get_text_config(decoder=True)
    stacks = [
        module
        for module in part.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise ConfigError(f"{_FLAG}: method: {model.config.model_type} has no list of layers to draft with")
    stacks[0]._modules = {str(place): stacks[0][layer] for place, layer in enumerate(kept)}
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(kept)
    kept_kinds = [kinds[layer] for layer in kept] if kinds is not None else None
    if kept_kinds is not None and [*config.layer_types] != kept_kinds:
        try:
            config.layer_types = kept_kinds
        except AttributeError as error:
            raise ConfigError(
                f"{_FLAG}: skip_layers: the kinds of {model.config.model_type}'s layers follow from their "
                "numbers, so only its last layers can be skipped"
            ) from error
    return part
