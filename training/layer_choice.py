"""`tandem speculate choose-layers`: chooses the layers that a model can skip when it drafts for itself.

The search is greedy: each step removes the layer whose removal costs the least agreement with the whole
model. Agreement is the share of a text's places, evaluated in parallel, at which both have the same argmax
token (as in SWIFT, Xia et al. 2024).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from messaging.files import check_output_file
from protocol.errors import ConfigError
from protocol.speculation import SELF
from speculation.self_speculative import with_layers
from training.data import encode_texts, load, load_frozen, read_texts, spread_windows
from training.output import write_text

MOST_DRAFTED = 8
"""The largest number of draft tokens in a row for which a choice is judged."""


@dataclass(frozen=True)
class ChooseOptions:
    """The command's options. `num_layers` None means the fastest number of layers, up to half."""

    model: str
    data: Path
    output: Path
    num_layers: int | None = None
    windows: int = 8
    length: int = 256
    device: str = "auto"


@dataclass(frozen=True)
class LayerChoice:
    """A choice of layers. `agreement`: the share of places where the draft's argmax is the model's."""

    skipped: tuple[int, ...]
    agreement: float
    speed_up: float


def choose_layers(options: ChooseOptions, console: Console) -> LayerChoice:
    """Choose layers, and write the `--speculative-config`. Raises `ConfigError` that names the option."""
    check_output_file(options.output, "--output")
    config = load(AutoConfig, options.model)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if num_layers < 2:
        raise ConfigError(f"--model: {options.model} has one layer, without which it cannot draft")
    if options.num_layers is not None and options.num_layers >= num_layers:
        raise ConfigError(
            f"--num-layers: must be below the model's {num_layers} layers, got {options.num_layers}"
        )
    tokens = encode_texts(read_texts(options.data), load(AutoTokenizer, options.model))
    texts = spread_windows(tokens, options.length, options.windows, "text")
    model = load_frozen(options.model, options.device)
    choices = []
    for choice in search(model, texts.to(model.device), options.num_layers or num_layers // 2):
        choices.append(choice)
        layers = ", ".join(map(str, choice.skipped))
        console.print(
            f"without {layers}: {choice.agreement:.1%} of the tokens are the model's, "
            f"up to {choice.speed_up:.2f} times as fast",
            highlight=False,
        )
    best = choices[-1] if options.num_layers else max(choices, key=lambda choice: choice.speed_up)
    if best.speed_up <= 1 and options.num_layers is None:
        raise ConfigError(
            f"--model: {options.model} drafts too badly without any of its layers to be faster on this text; "
            'give --num-layers to have a choice all the same, or draft with "quantization"'
        )
    chosen = json.dumps({"method": SELF, "skip_layers": sorted(best.skipped)})
    write_text(options.output, chosen + "\n")
    console.print(f"saved in {options.output}: {chosen}", highlight=False)
    return best


@torch.inference_mode()
def search(model: PreTrainedModel, texts: Tensor, most: int) -> list[LayerChoice]:
    """Return the best choices of 1 to `most` layers on `texts`, int64 [windows, length]."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    expected = _likeliest(model, texts)
    skipped: tuple[int, ...] = ()
    found = []
    for _ in range(most):
        candidates = []
        for layer in set(range(num_layers)) - {*skipped}:
            kept = [other for other in range(num_layers) if other not in (*skipped, layer)]
            part = with_layers(model, kept)
            agreement = (_likeliest(part, texts) == expected).float().mean().item()
            candidates.append((agreement, -layer, part))
        agreement, layer, part = max(candidates, key=lambda candidate: candidate[:2])
        skipped = (*skipped, -layer)
        cost = _products(part) / _products(model)
        found.append(LayerChoice(skipped, agreement, _speed_up(agreement, cost)))
    return found


def _likeliest(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Return each place's argmax token, [windows, length], window by window to save memory."""
    return torch.cat([model(input_ids=text, use_cache=False).logits.argmax(-1) for text in texts.split(1)])


def _products(model: PreTrainedModel) -> int:
    """Count the weights that a decode step reads."""
    embeddings = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    return sum(weight.numel() for weight in model.parameters()) - (0 if is_tied else embeddings)


def _speed_up(agreement: float, cost: float) -> float:
    """Return the speedup for the best number of draft tokens, if each is accepted with probability
    `agreement` and costs `cost` steps, and a step takes the same time for several rows (Leviathan et al.
    2023, theorem 3.8).
    """
    best = 0.0
    for count in range(1, MOST_DRAFTED + 1):
        tokens = sum(agreement**place for place in range(count + 1))
        best = max(best, tokens / (1 + count * cost))
    return best
