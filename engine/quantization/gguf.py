"""The tensors of a GGUF file as weights of a Transformers model.

llama.cpp stores some tensors in an order, or with values, of its own.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints.gguf.families import FAMILIES
from checkpoints.gguf.reader import GgufFile, GgufTensor
from engine.quantization.gguf_blocks import BLOCK, STORED, dequantized, quantized_weight
from engine.quantization.weight import QuantizedWeight, StoredWeights, dtype_name, placeholder

logger = logging.getLogger("tandem.engine")

_BLOCK_NUMBER = re.compile(r"\.(\d+)\.")
_FLOATS = ("F32", "F16", "BF16")
_UNUSED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors whose content is in `config.json`."""
_SHIFTED = ("gemma2", "gemma3", "qwen35", "qwen35moe")
"""Architectures whose norms are stored with 1 added to their weights."""
_BY_VALUE_HEAD = ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta", "attn_gate", "attn_qkv", "ssm_conv1d")
"""Layers of Qwen3.5 with an output, or several, for each value head."""
_EXACT = ("exp_probs_b.bias", "ffn_gate_inp.weight")
"""Tensors whose rounding would choose other experts; some models keep them in float32."""
_EXPERT_LAYERS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def read_weights(
    file: GgufFile, empty: PreTrainedModel, experts: Iterable[str], dtype: torch.dtype, device: torch.device
) -> StoredWeights:
    """Read the tensors that the model `empty`, with fused `experts` at these paths, needs: quantized weights
    to `device`, the rest to the CPU.

    Log the types that were dequantized. Raises GgufError, naming a tensor.
    """
    if file.architecture not in FAMILIES:
        return _read_with_transformers(file, empty, dtype)
    reader = _Reader(file, empty, dtype, device)
    linears = {f"{name}.weight": name for name, each in empty.named_modules() if type(each) is nn.Linear}
    is_tied = empty.config.tie_word_embeddings
    for parameter in empty.state_dict():
        if not is_tied or parameter not in (empty._tied_weights_keys or ()):
            reader.read(parameter, linears.get(parameter))
    for path in experts:
        reader.read_experts(path)
    if is_tied:
        reader.read_tied_head()
    reader.finish()
    return reader.found


def _read_with_transformers(file: GgufFile, empty: PreTrainedModel, dtype: torch.dtype) -> StoredWeights:
    """Read an architecture that only Transformers' reader knows. It dequantizes all tensors."""
    try:
        read = load_gguf_checkpoint(
            str(file.path), return_tensors=True, model_to_load=empty, torch_dtype=dtype
        )
    except Exception as error:  # the reader assumes the tensors of a whole file
        file.fail(f"Transformers cannot read its tensors: {error!r}")
    logger.info("%s: %s is dequantized to %s", file.path, file.architecture, dtype_name(dtype))
    return StoredWeights(read["tensors"])


class _Reader:
    """A reader that finds the file's tensors for the model's parameters."""

    def __init__(
        self, file: GgufFile, empty: PreTrainedModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.found = StoredWeights()
        self._file = file
        self._empty = empty
        self._wanted = empty.state_dict()
        self._dtype = dtype
        self._device = device
        self._config = empty.config.get_text_config(decoder=True)
        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(kinds[file.architecture], self._config.num_hidden_layers)
        self._used: set[str] = set()
        self._dequantized: Counter[str] = Counter()

    def read(self, parameter: str, linear: str | None) -> None:
        """Read a parameter, if the file has it. `linear` is the name of its linear layer, if any."""
        tensor = self._file.tensors.get(self._stored_name(parameter))
        if tensor is None:
            return
        self._used.add(tensor.name)
        wanted = self._wanted[parameter]
        if [each for each in tensor.shape if each > 1] == [each for each in wanted.shape if each > 1]:
            tensor = replace(tensor, shape=tuple(wanted.shape))
        self._check_shape(tensor, wanted.shape)
        if linear is not None and self._stays_quantized(tensor, linear, self.found.linears):
            self.found.plain[parameter] = placeholder(wanted)
        else:
            self.found.plain[parameter] = self._plain(tensor)
            if linear is not None:
                self._dequantized[tensor.type.name] += 1

    def _check_shape(self, tensor: GgufTensor, wanted: Sequence[int]) -> None:
        if [*tensor.shape] != [*wanted]:
            self._file.fail(f"tensor {tensor.name}: has shape {list(tensor.shape)}, not {[*wanted]}")

    def _stored_name(self, parameter: str) -> str:
        layer, _, suffix = parameter.rpartition(".")
        block, _, part = layer.rpartition(".")
        if suffix == "A_log":
            return str(self._names.get_name(parameter))
        if suffix in ("sinks", "layer_scalar"):
            layer, suffix = parameter, "weight"
        elif suffix == "dt_bias":
            layer, suffix = f"{layer}.dt_proj", "bias"
        elif suffix == "e_score_correction_bias":
            layer, suffix = f"{layer}.e_score_correction", "bias"
        elif part == "router" and suffix == "scale":
            layer = f"{layer}.proj"
        elif suffix == "per_expert_scale":
            layer, suffix = f"{block}.experts.down_proj", "scale"
        return f"{self._names.get_name(layer)}.{suffix}"

    def read_tied_head(self) -> None:
        """Read the embeddings again, for the tied head: their own format has fewer bytes."""
        head = self._empty.get_output_embeddings()
        name = next((name for name, each in self._empty.named_modules() if each is head), None)
        tensor = self._file.tensors.get("token_embd.weight")
        if name is not None and tensor is not None:
            self._stays_quantized(tensor, name, self.found.linears)

    def read_experts(self, path: str) -> None:
        """Read the layers of fused experts. The file has one tensor for each layer of all experts."""
        block, experts = _BLOCK_NUMBER.search(path), self._empty.get_submodule(path)
        if block is None:
            return
        names = [f"blk.{block[1]}.{kind}" for kind in _EXPERT_LAYERS.values()]
        count, *sizes = experts.down_proj.shape
        hidden, inner = reversed(sizes) if experts.is_transposed else sizes
        shapes = [(count, inner, hidden), (count, inner, hidden), (count, hidden, inner)]
        found = [self._take(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)]
        fused = self._take(f"blk.{block[1]}.ffn_gate_up_exps.weight", (count, 2 * inner, hidden))
        if fused is not None:
            found[:2] = _halves(fused)
        tensors = [tensor for tensor in found if tensor is not None]
        if len(tensors) < len(_EXPERT_LAYERS):
            return
        if experts.has_bias:
            biases = [self._bias(f"{name}.bias", each[:2]) for name, each in zip(names, shapes, strict=True)]
            self._set_fused(path, "_bias", biases)
        if not all(tensor.type in STORED for tensor in tensors):
            self._set_fused(path, "", [self._plain(tensor) for tensor in tensors])
            self._dequantized.update(tensor.type.name for tensor in tensors)
            return
        for layer, tensor in zip(_EXPERT_LAYERS, tensors, strict=True):
            each = tensor.data.reshape(tensor.shape[0], -1, tensor.data.shape[1])
            for number, data in enumerate(each):
                one = replace(tensor, shape=tensor.shape[1:], data=data)
                self._stays_quantized(one, f"{path}.{number}.{layer}", self.found.fused)

    def _take(self, name: str, shape: Sequence[int]) -> GgufTensor | None:
        self._used.add(name)
        tensor = self._file.tensors.get(name)
        if tensor is not None:
            self._check_shape(tensor, shape)
        return tensor

    def _bias(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._take(name, shape)
        if tensor is None:
            self._file.fail(f"tensor {name}: is missing")
        return self._plain(tensor)

    def _set_fused(self, path: str, suffix: str, parts: Sequence[Tensor]) -> None:
        """Write the tensors of gate, up and down as the model has them; in gpt-oss gate and up take turns."""
        experts, (gate, up, down) = self._empty.get_submodule(path), parts
        if experts.is_concatenated:
            first = torch.cat([gate, up], dim=1)
        else:
            first = torch.stack([gate, up], dim=2).flatten(1, 2)
        for name, values in (("gate_up_proj", first), ("down_proj", down)):
            is_transposed = experts.is_transposed and not suffix
            self.found.plain[f"{path}.{name}{suffix}"] = values.transpose(1, 2) if is_transposed else values

    def finish(self) -> None:
        """Refuse tensors that were not read. Log the dequantized types."""
        needless = self._needless()
        unknown = [
            name for name in sorted(self._file.tensors.keys() - self._used) if not name.startswith(needless)
        ]
        if unknown:
            self._file.fail(f"tensor {unknown[0]}: {type(self._empty).__name__} has no such tensor")
        for kind, count in self._dequantized.most_common():
            if kind in _FLOATS:
                continue
            fields = self._file.path, count, kind, dtype_name(self._dtype)
            logger.info("%s: %d matrices of type %s are dequantized to %s", *fields)

    def _needless(self) -> tuple[str, ...]:
        """Return the beginnings of names of tensors that the model does not need.

        The blocks of an MTP head follow the layers. Gemma 4's last layers use keys of earlier ones.
        """
        layers = self._config.num_hidden_layers
        heads = range(layers, layers + self._file.get("nextn_predict_layers", 0))
        sharing = range(layers - self._file.get("attention.shared_kv_layers", 0), layers)
        keys = [
            f"blk.{number}.{kind}" for number in sharing for kind in ("attn_k.", "attn_v.", "attn_k_norm.")
        ]
        return (*_UNUSED, *(f"blk.{number}." for number in heads), *keys)

    def _stays_quantized(self, tensor: GgufTensor, name: str, into: dict[str, QuantizedWeight]) -> bool:
        weight = quantized_weight(tensor, self._device)
        if weight is None:
            return False
        inputs = self._input_order(tensor)
        if inputs is not None and (inputs.view(-1, BLOCK).diff() != 1).any():
            return False
        if (outputs := self._order(tensor)) is not None:
            weight = _with_outputs(weight, outputs)
        into[name] = weight if inputs is None else _with_inputs(weight, inputs)
        return True

    def _plain(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's values in the model's dtype."""
        if self._file.architecture in _SHIFTED and _is_shifted(tensor.name):
            return (dequantized(tensor, torch.float32) - 1).to(self._dtype)  # llama.cpp stores w + 1
        if tensor.name.endswith(_EXACT):
            return dequantized(tensor, torch.float32)
        values = dequantized(tensor, self._dtype)
        if tensor.name.endswith("ssm_a"):
            values = (-dequantized(tensor, torch.float32)).log().to(self._dtype)
        outputs, inputs = self._order(tensor), self._input_order(tensor)
        values = values if outputs is None else values[outputs]
        return values if inputs is None else values[:, inputs]

    def _order(self, tensor: GgufTensor) -> Tensor | None:
        """Return the places of the model's outputs in the tensor, or None if the order is equal.

        llama.cpp rotates neighbours and Transformers the halves of a head, so the outputs of queries and keys
        are interleaved in the architectures llama and mistral3.
        """
        kind = _kind(tensor)
        if self._file.architecture.startswith("qwen35"):
            return self._order_of_heads(tensor.shape[0]) if kind in _BY_VALUE_HEAD else None
        if self._file.architecture not in ("llama", "mistral3") or kind not in ("attn_q", "attn_k"):
            return None
        count = self._config.num_attention_heads if kind == "attn_q" else self._config.num_key_value_heads
        return torch.arange(tensor.shape[0]).view(count, -1, 2).transpose(1, 2).flatten()

    def _input_order(self, tensor: GgufTensor) -> Tensor | None:
        """Return the places of the model's inputs in the tensor, or None if the order is equal."""
        if self._file.architecture.startswith("qwen35") and _kind(tensor) == "ssm_out":
            return self._order_of_heads(tensor.shape[1])
        return None

    def _order_of_heads(self, length: int) -> Tensor | None:
        """Return the places of values that belong to Qwen3.5's value heads, after those of keys if any.

        llama.cpp stores the first value head of each key head, then the second ones, and so on.
        """
        config = self._config
        keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
        if keys == heads:
            return None
        whole = heads * config.linear_value_head_dim
        own = whole if length >= whole else heads
        places = torch.arange(length - own, length).view(heads // keys, keys, -1).transpose(0, 1).flatten()
        return torch.cat([torch.arange(length - own), places])


def _kind(tensor: GgufTensor) -> str:
    """Return the layer that a tensor belongs to, without its block, such as `attn_q`."""
    return next((part for part in tensor.name.split(".") if part != "blk" and not part.isdigit()), "")


def _halves(tensor: GgufTensor) -> list[GgufTensor]:
    """Return the tensors of gate and up, one expert's outputs after the other's, from one of both."""
    experts, outputs, inputs = tensor.shape
    data, half = tensor.data.reshape(experts, outputs, -1), outputs // 2
    return [
        replace(tensor, shape=(experts, half, inputs), data=each.reshape(experts * half, -1))
        for each in (data[:, :half], data[:, half:])
    ]


def _is_shifted(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def _with_outputs(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    zeros = None if weight.zeros is None else weight.zeros[order]
    return replace(weight, codes=weight.codes[order], scales=weight.scales[order], zeros=zeros)


def _with_inputs(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """Return the weight with its inputs in this order, which moves whole blocks."""
    blocks = order[::BLOCK] // BLOCK
    zeros = None if weight.zeros is None else weight.zeros[:, blocks]
    return replace(weight, codes=weight.codes[:, order], scales=weight.scales[:, blocks], zeros=zeros)
