"""Checks of a `tandem quantize` run, including method and options, before the model's weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from engine.quantization.formats import Scheme
from engine.quantization.layout import Layout
from protocol.errors import ConfigError
from quantization import texts
from quantization.calibration import find_blocks, linears
from quantization.checkpoint import Source, check_output
from training.data import load, read_texts

Method = Literal["awq", "gptq", "int8", "fp8"]

DEFAULT_LENGTH = 512
GROUP_SIZES = (32, 64, 128)
_BITS: Mapping[str, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8), "int8": (8,), "fp8": (8,)}
_OUTPUTS_OF_A_WORD = 8
"""Number of 4-bit codes in a 32-bit word. AWQ packs weights along the outputs; AWQ and GPTQ pack zero points
along the outputs.
"""


@dataclass(frozen=True)
class Recipe:
    """A method with its options. A `group_size` of None means one scale for each output channel."""

    method: Method
    bits: int
    group_size: int | None
    desc_act: bool = False

    @property
    def calibrates(self) -> bool:
        """Whether the method uses activations; the other methods round to nearest."""
        return calibrates(self.method)

    def layout(self) -> Layout:
        """Return the layout in which the checkpoint stores the weights. Other engines round the inputs, too,
        of layers with a scale for each output.
        """
        format = {"int8": "int-quantized", "fp8": "float-quantized"}.get(self.method, self.method)
        rounds_inputs = self.method == "int8"
        return Layout.of(
            Scheme(format, self.bits, self.group_size, rounds_inputs=rounds_inputs, desc_act=self.desc_act)
        )


def calibrates(method: Method) -> bool:
    return method in ("awq", "gptq")


@dataclass(frozen=True)
class QuantizeOptions:
    """The command's options by name. None stands for the method's or the model's default."""

    method: Method
    model: str
    output: Path
    data: Path | None
    held_out: Path | None = None
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool = False
    samples: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class PreparedRun:
    """A checked run. `inputs` are the distinct input widths of the layers to quantize."""

    source: Source
    recipe: Recipe
    inputs: tuple[int, ...]
    texts: texts.Texts


def prepare(options: QuantizeOptions) -> PreparedRun:
    """Check options, model and texts before weights are read. Raises `ConfigError`, a line for each fault."""
    faults: list[str] = []
    layers = recipe = data = length = tokenizer = found = None
    with _collected(faults):
        check_output(options.output)
    faults += _option_faults(options)
    with _collected(faults):
        data = _read(options.data, options.held_out)
    with _collected(faults):
        source = Source.open(options.model)
        config = load(AutoConfig, str(source.folder))
        with _collected(faults):
            length = _length(options.sequence_length, config)
        with _collected(faults):
            tokenizer = load(AutoTokenizer, str(source.folder))
        layers = _layers(source, config)
        recipe = _recipe(options, layers)
    if data is not None and length is not None and tokenizer is not None:
        samples = options.samples if calibrates(options.method) else 0
        with _collected(faults):
            found = texts.cut(*data, samples, length, options.seed, tokenizer)
    if faults:
        raise ConfigError("\n".join(faults))
    assert layers is not None and recipe is not None and found is not None
    inputs = dict.fromkeys(layer.in_features for layer in layers.values())
    return PreparedRun(source, recipe, tuple(inputs), found)


@contextmanager
def _collected(faults: list[str]) -> Iterator[None]:
    """Append the message of a `ConfigError` to `faults` and continue: later checks do not depend on it."""
    try:
        yield
    except ConfigError as error:
        faults.append(str(error))


def _option_faults(options: QuantizeOptions) -> Iterator[str]:
    """Yield a line for each option whose value the method does not support."""
    method, bits, group_size = options.method, options.bits, options.group_size
    if bits is not None and bits not in _BITS[method]:
        yield f"--bits: {method} has {_either(_BITS[method])} bits, not {bits}"
    if options.desc_act and method != "gptq":
        yield f"--desc-act: is for --method gptq, not {method}"
    if group_size is not None and not calibrates(method):
        yield f"--group-size: {method} has a scale for each output channel and no groups"
    elif group_size not in (None, *GROUP_SIZES):
        yield f"--group-size: {group_size} is not {_either(GROUP_SIZES)}"


def _recipe(options: QuantizeOptions, layers: Mapping[str, nn.Linear]) -> Recipe:
    """Fill in the method's defaults. By default, `group_size` is the largest that divides the inputs of all
    layers. Raises `ConfigError`, with a line for each fault of the layers.
    """
    method, group_size = options.method, options.group_size
    faults = list(_layer_faults(method, layers))
    if calibrates(method):
        fitting = [size for size in GROUP_SIZES if _undivided(layers, size) is None]
        if group_size is None:
            group_size = max(fitting, default=None)
            if group_size is None:
                faults.append(f"--method: {method} has groups, and {_misfit(layers, min(GROUP_SIZES))}")
        elif group_size in GROUP_SIZES and group_size not in fitting:
            others = f"; {_either(fitting)} divides those of all layers" if fitting else ""
            faults.append(f"--group-size: {_misfit(layers, group_size)}{others}")
    if faults:
        raise ConfigError("\n".join(faults))
    return Recipe(method, options.bits or _BITS[method][0], group_size, options.desc_act)


def _layer_faults(method: Method, layers: Mapping[str, nn.Linear]) -> Iterator[str]:
    if not layers:
        yield "--model: its decoder blocks have no linear layers (nn.Linear) to quantize"
    if calibrates(method):
        for name, layer in layers.items():
            if layer.out_features % _OUTPUTS_OF_A_WORD:
                yield (
                    f"--method: {method} packs {_OUTPUTS_OF_A_WORD} outputs in a word, which does not divide "
                    f"the {layer.out_features} of {name}"
                )
                return


def _undivided(layers: Mapping[str, nn.Linear], group_size: int) -> str | None:
    """Return the first layer whose number of inputs is not a multiple of the group size."""
    return next((name for name, layer in layers.items() if layer.in_features % group_size), None)


def _misfit(layers: Mapping[str, nn.Linear], group_size: int) -> str:
    name = _undivided(layers, group_size)
    assert name is not None
    return f"{group_size} does not divide the {layers[name].in_features} inputs of {name}"


def _either(choices: Sequence[int]) -> str:
    return " or ".join(str(choice) for choice in choices)


def _layers(source: Source, config: PretrainedConfig) -> dict[str, nn.Linear]:
    """Return the linear layers of the model's blocks, on the meta device."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error
    name, blocks = find_blocks(model)
    layers = {f"{name}.{inner}": layer for inner, layer in linears(blocks).items()}
    missing = [tensor for layer in layers if not source.has(tensor := f"{layer}.weight")]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"--model: {source.folder} has no tensor {missing[0]}{others}")
    return layers


def _read(data: Path | None, held_out: Path | None) -> tuple[list[str], list[str] | None]:
    if data is None:
        raise ConfigError(
            "--data: missing; give text to calibrate with and to measure on: a file, a folder of files, or "
            'JSONL with a "text" in each line'
        )
    return read_texts(data), None if held_out is None else read_texts(held_out, "--held-out")


def _length(requested: int | None, config: PretrainedConfig) -> int:
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if requested is None:
        return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if longest is not None and requested > longest:
        raise ConfigError(f"--sequence-length: {requested} exceeds the model's {longest} positions")
    return requested
