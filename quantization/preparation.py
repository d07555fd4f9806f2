"""Checks a run of `tandem quantize` before the model's weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from protocol.errors import ConfigError
from quantization import texts
from quantization.calibration import find_blocks, linears
from quantization.checkpoint import check_output
from quantization.recipe import Method, Recipe, calibrates, check_options
from quantization.source import Source
from training.data import load, read_texts

DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class QuantizeOptions:
    """The command's options by their names. None stands for the method's or the model's default."""

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
    """A checked run. `inputs` are the different numbers of inputs that the layers to quantize have."""

    source: Source
    recipe: Recipe
    inputs: tuple[int, ...]
    texts: texts.Texts


class _Faults:
    """Collects the `ConfigError`s of checks that do not depend on each other."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self._lines.append(str(error))

    def raise_all(self) -> None:
        if self._lines:
            raise ConfigError("\n".join(self._lines))


def prepare(options: QuantizeOptions) -> PreparedRun:
    """Check the options, the model and the texts without writing a file or reading weights.

    Raises `ConfigError` with a line for each fault.
    """
    faults = _Faults()
    layers = recipe = given = length = tokenizer = found = None
    with faults.collected():
        check_output(options.output)
    with faults.collected():
        check_options(options.method, options.bits, options.group_size, options.desc_act)
    with faults.collected():
        given = _read(options.data, options.held_out)
    with faults.collected():
        source = Source.open(options.model)
        config = load(AutoConfig, str(source.folder))
        with faults.collected():
            length = _length(options.sequence_length, config)
        with faults.collected():
            tokenizer = load(AutoTokenizer, str(source.folder))
        layers = _layers(source, config)
        recipe = Recipe.choose(options.method, options.bits, options.group_size, options.desc_act, layers)
    if given is not None and length is not None and tokenizer is not None:
        samples = options.samples if calibrates(options.method) else 0
        with faults.collected():
            found = texts.cut(*given, samples, length, options.seed, tokenizer)
    faults.raise_all()
    assert layers is not None and recipe is not None and found is not None
    inputs = dict.fromkeys(layer.in_features for layer in layers.values())
    return PreparedRun(source, recipe, tuple(inputs), found)


def _layers(source: Source, config: PretrainedConfig) -> dict[str, nn.Linear]:
    """Return the linear layers of the model's blocks, without their weights."""
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
