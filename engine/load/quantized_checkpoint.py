"""Loading of checkpoints with quantized linear layers, without the packages that made them.

Transformers loads everything else as usual. For a quantized layer's weight it gets a placeholder without
memory; a `QuantizedLinear` replaces the layer afterwards. Experts that the model holds as one tensor either
stay quantized one by one or are dequantized into this tensor.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from checkpoints.source import open_tensors, read_object
from engine.linear.experts import Pack, fused_experts, split_experts
from engine.linear.packed import plain_weight
from engine.linear.quantized import QuantizedLinear
from engine.model.text_half import as_causal, make_model, named_as_in
from engine.quantization.formats import MXFP4_METHOD, split_mxfp4
from engine.quantization.layout import Layout, parse_layout
from engine.quantization.weight import QuantizedWeight, StoredLayer, StoredWeights, placeholder, same_order
from protocol.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger("tandem.engine")


def quantization_config(hf_config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of config.json, or None if the checkpoint is not quantized."""
    return getattr(hf_config, "quantization_config", None) or None


def describe_checkpoint(model: PreTrainedModel, hf_config: Any, run_as: str) -> str:
    """Return a loaded checkpoint's quantization method, formats and `run_as`; "" if it is not quantized."""
    method = quantization_config(hf_config)
    if method is None:
        return ""
    linears = [each.quantized for each in model.modules() if isinstance(each, QuantizedLinear)]
    formats = Counter(weight.describe() for weight in linears)
    rounded = sum(weight.input_group > 0 for weight in linears)
    parts = [f"{count} linear layers in {kind}" for kind, count in formats.most_common()]
    parts += [f"{rounded} of them may round their inputs to int8"] if rounded else []
    return ", ".join([f"{method.get('quant_method')} checkpoint", *parts, run_as])


def load_quantized(
    model: str,
    revision: str | None,
    hf_config: Any,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    device: torch.device,
    *,
    keeps_experts: bool,
    packed: Pack | None = None,
) -> PreTrainedModel:
    """Load a model, made with Transformers' `options`. Quantized weights go from the files to `device` layer
    by layer; the rest stays on the CPU. With `keeps_experts`, fused experts stay quantized where possible,
    `packed` layer by layer, or `join_experts` must join them; else they are dequantized.

    Raises UnsupportedModelError, naming a tensor or a field of the configuration, or ConfigError.
    """
    method = quantization_config(hf_config) or {}
    plain_config = copy.deepcopy(hf_config)
    del plain_config.quantization_config
    with torch.device("meta"):
        empty = make_model(plain_config, dtype=dtype, **options)
    experts: dict[str, Iterable[QuantizedWeight]] = {}
    known = fused_experts(empty, by_kernel=keeps_experts and packed is None)
    if method.get("quant_method") == "gguf":
        from checkpoints.gguf.reader import read_gguf  # hosts for GPU tests may lack its package
        from engine.quantization import gguf

        paths = fused_experts(empty, by_kernel=False)
        stored = gguf.read_weights(read_gguf(Path(method["file"])), empty, paths, dtype, device)
    elif method.get("quant_method") == MXFP4_METHOD:
        plain, stacked = split_mxfp4(named_as_in(empty, read_tensors(model, revision)))
        unknown = sorted(name for name in stacked if name.rpartition(".")[0] not in known)
        if unknown:
            raise UnsupportedModelError(f"{unknown[0]}: no experts of the model have such a tensor")
        stored = StoredWeights(plain)
        experts |= {name: stack.to(device) for name, stack in stacked.items()}
    else:
        tensors = named_as_in(empty, read_tensors(model, revision))
        stored = _split(tensors, parse_layout(method), empty, device)
    experts |= take_experts(stored.fused, known)
    loaded = _filled(empty, stored, experts, device, keeps_experts=keeps_experts, packed=packed)
    _take_generation_config(loaded, model, revision)
    return as_causal(loaded)


def load_tensors(
    empty: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    method: Mapping[str, Any] | None,
    device: torch.device,
    *,
    keeps_experts: bool,
) -> PreTrainedModel:
    """Fill the model `empty`, which has no memory yet. `method` is a `quantization_config` or None."""
    if method is None:
        return _load_rest(empty, tensors)
    stored = _split(named_as_in(empty, tensors), parse_layout(method), empty, device)
    known = fused_experts(empty, by_kernel=keeps_experts)
    experts: dict[str, Iterable[QuantizedWeight]] = {**take_experts(stored.fused, known)}
    return _filled(empty, stored, experts, device, keeps_experts=keeps_experts)


def _filled(
    empty: PreTrainedModel,
    stored: StoredWeights,
    experts: dict[str, Iterable[QuantizedWeight]],
    device: torch.device,
    *,
    keeps_experts: bool,
    packed: Pack | None = None,
) -> PreTrainedModel:
    """Fill the model with the stored weights and with `experts`, which are removed from there."""
    rest, fused, dtype = stored.plain, stored.fused, empty.dtype
    dequantized = len(fused) + (0 if keeps_experts else len(experts))
    if dequantized:
        logger.warning("%d fused tensors, such as experts, are dequantized", dequantized)
    while fused:
        name, weight = fused.popitem()
        rest[f"{name}.weight"] = weight.dequantized().to(dtype)
    rest |= {name: placeholder(empty.get_parameter(name)) for name in experts}
    loaded = _load_rest(empty, rest)
    if keeps_experts:
        set_experts(loaded, experts, packed)
    else:
        fill_experts(loaded, experts, dtype, device)
    for name, weight in stored.linears.items():
        loaded.set_submodule(name, QuantizedLinear(weight, loaded.get_submodule(name).bias))
    return loaded


def _split(
    tensors: Mapping[str, Tensor], layout: Layout, empty: PreTrainedModel, device: torch.device
) -> StoredWeights:
    linears = {name: module for name, module in empty.named_modules() if type(module) in (nn.Linear, Conv1D)}
    found = StoredWeights()
    for name, stored in _by_layer(tensors).items():
        if not layout.is_stored(stored):
            found.plain.update(
                {f"{name}.{suffix}" if name else suffix: each for suffix, each in stored.items()}
            )
            continue
        if "bias" in stored:
            found.plain[f"{name}.bias"] = stored["bias"]
        stored = {suffix: each.to(device) for suffix, each in stored.items()}
        if name in linears:
            outputs, inputs = plain_weight(linears[name]).shape
            found.linears[name] = layout.read(StoredLayer(name, outputs, inputs, stored))
            found.plain[f"{name}.weight"] = placeholder(linears[name].weight)
        else:
            found.fused[name] = _fused(name, stored, layout)
    return found


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, suffix = name.rpartition(".")
        layers[layer][suffix] = tensor
    return layers


def _fused(name: str, stored: Mapping[str, Tensor], layout: Layout) -> QuantizedWeight:
    shape = layout.shape(stored)
    if shape is None:
        raise UnsupportedModelError(
            f"{name}: its quantized weight is missing next to {', '.join(sorted(stored))}"
        )
    return layout.read(StoredLayer(name, *shape, stored))


def _load_rest(empty: PreTrainedModel, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    for name, wanted in empty.state_dict().items():
        if name in tensors and tensors[name].shape != wanted.shape:
            raise UnsupportedModelError(
                f"{name}: has shape {list(tensors[name].shape)}, not {list(wanted.shape)}"
            )
        if name in tensors and not tensors[name].is_floating_point():
            raise UnsupportedModelError(f"{name}: is {tensors[name].dtype}, and has no scales")
    loaded, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict=dict(tensors), dtype=empty.dtype, output_loading_info=True
    )
    if info["missing_keys"]:
        raise UnsupportedModelError(f"{min(info['missing_keys'])}: is missing")
    return loaded


def _take_generation_config(loaded: PreTrainedModel, model: str, revision: str | None) -> None:
    try:
        loaded.generation_config = GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:
        return  # the model's configuration applies


_INPUTS, _OUTPUTS = ("gate_proj", "up_proj"), "down_proj"
"""The usual names of an expert's layers; the model joins the first two."""


def take_experts(
    weights: dict[str, QuantizedWeight], known: Mapping[str, Any]
) -> dict[str, list[QuantizedWeight]]:
    """Remove the layers of `known` experts from `weights`; return them by the names of the model's tensors.

    Experts with missing or differently quantized layers stay in `weights`.
    """
    taken: dict[str, list[QuantizedWeight]] = {}
    for path, experts in known.items():
        each = [f"{path}.{number}" for number in range(experts.num_experts)]
        names = [f"{expert}.{layer}" for expert in each for layer in (*_INPUTS, _OUTPUTS)]
        if not (experts.has_gate and weights.keys() >= set(names)):
            continue
        inputs = [[weights[f"{expert}.{layer}"] for layer in _INPUTS] for expert in each]
        first = [_joined(gate, up, is_concatenated=experts.is_concatenated) for gate, up in inputs]
        second = [weights[f"{expert}.{_OUTPUTS}"] for expert in each]
        whole = [weight for weight in first if weight is not None]
        if len(whole) == len(each) and _are_alike(whole) and _are_alike(second):
            taken |= {f"{path}.gate_up_proj": whole, f"{path}.{_OUTPUTS}": second}
            for name in names:
                del weights[name]
    return taken


def set_experts(
    model: nn.Module, weights: dict[str, Iterable[QuantizedWeight]], packed: Pack | None = None
) -> None:
    """Give experts separate, packed layers with these weights. Each weight is freed once it is used."""
    if not weights:
        return
    split_experts(model, by_kernel=packed is None)
    for name in list(weights):
        path, _, tensor = name.rpartition(".")
        experts = model.get_submodule(path)
        which = "second" if tensor == _OUTPUTS else "first"
        linears = getattr(experts, which)
        assert isinstance(linears, nn.ModuleList)
        for number, weight in enumerate(weights.pop(name)):
            bias = linears[number].bias
            linears[number] = QuantizedLinear(weight, None if bias is None else bias.to(weight.codes.device))
        if packed is not None:
            setattr(experts, which, packed(linears))


def fill_experts(
    model: nn.Module, weights: dict[str, Iterable[QuantizedWeight]], dtype: torch.dtype, device: torch.device
) -> None:
    """Fill the experts' tensors of these names on `device`. Each weight is freed once it is used."""
    for name in list(weights):
        path, _, tensor = name.rpartition(".")
        experts = model.get_submodule(path)
        dense = torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device)
        for values, weight in zip(dense, weights.pop(name), strict=True):
            dequantized = weight.dequantized()
            values.copy_(dequantized.T if experts.is_transposed else dequantized)
        setattr(experts, tensor, nn.Parameter(dense, requires_grad=False))


def _joined(gate: QuantizedWeight, up: QuantizedWeight, *, is_concatenated: bool) -> QuantizedWeight | None:
    """Return one weight with the outputs of both, one after the other or in turns, or None if their inputs
    are not quantized alike.
    """
    if not (_are_alike([gate, up]) and same_order(gate.permutation, up.permutation)):
        return None

    def joined(one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other]) if is_concatenated else torch.stack([one, other], 1).flatten(0, 1)

    zeros = None if gate.zeros is None or up.zeros is None else joined(gate.zeros, up.zeros)
    codes, scales = joined(gate.codes, up.codes), joined(gate.scales, up.scales)
    return replace(gate, codes=codes, scales=scales, zeros=zeros)


def _are_alike(weights: Sequence[QuantizedWeight]) -> bool:
    def kind(weight: QuantizedWeight) -> tuple[object, ...]:
        optional: tuple[Tensor | None, ...] = weight.zeros, weight.permutation
        return (
            weight.format,
            weight.input_group,
            weight.codes.shape[1],
            weight.group_size,
            *(each is None for each in optional),
        )

    return len({kind(weight) for weight in weights}) == 1


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tensors(model: str, revision: str | None) -> dict[str, Tensor]:
    """Return the tensors of a folder or a hub id by name, mapped from its files. Raises ConfigError."""
    tensors = {}
    for path in weight_files(model, revision):
        with open_tensors(path, "--model") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def weight_files(model: str, revision: str | None) -> list[Path]:
    """Return the safetensors files of a folder or a hub id. Raises ConfigError."""
    index = _find(model, _INDEX, revision)
    if index is None:
        single = _find(model, _SINGLE, revision)
        if single is None:
            raise ConfigError(f"--model: {model} has neither {_SINGLE} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(read_object(index, "--model")["weight_map"].values()))
    except (KeyError, AttributeError) as error:
        raise ConfigError(f"--model: cannot read {index}: {error!r}") from error
    paths = [_find(model, name, revision) for name in names]
    if None in paths:
        raise ConfigError(f"--model: {model!r} lacks {names[paths.index(None)]}, which {_INDEX} lists")
    return [path for path in paths if path is not None]


def _find(model: str, name: str, revision: str | None) -> Path | None:
    found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
