"""Writes the README.md of a quantized model."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from protocol.version import version
from quantization.recipe import Recipe
from quantization.texts import SHARED_RUN, HeldOut, TextQuality

_MEGABYTE = 1e6


@dataclass(frozen=True)
class Result:
    """The measurements of the model before and after; sizes are bytes of weights."""

    before: TextQuality
    after: TextQuality
    size_before: int
    size_after: int

    @property
    def change(self) -> float:
        """The change of the bits per byte, as a share."""
        return self.after.bits_per_byte / self.before.bits_per_byte - 1


def describe(recipe: Recipe) -> str:
    groups = "each output channel" if recipe.group_size is None else f"each {recipe.group_size} inputs"
    order = ", the largest inputs first (desc_act)" if recipe.desc_act else ""
    return f"{recipe.method}, {recipe.bits} bits, a scale for {groups}{order}"


def write(folder: Path, model: str, command: str, recipe: Recipe, text: HeldOut, result: Result) -> None:
    before, after = result.before, result.after
    perplexity = _change(before.perplexity, after.perplexity)
    size = _change(result.size_before, result.size_after)
    length = text.windows.shape[1]
    seen = (
        f", none of which shares {SHARED_RUN} tokens in a row with the calibration"
        if recipe.calibrates
        else ""
    )
    (folder / "README.md").write_text(
        f"""# {folder.name}

`{model}` with quantized linear layers: {describe(recipe)}. Embeddings, head and norms are not quantized.

| | before | after | |
|---|---|---|---|
| perplexity | {before.perplexity:.4f} | {after.perplexity:.4f} | {perplexity} |
| bits per byte | {before.bits_per_byte:.4f} | {after.bits_per_byte:.4f} | {result.change:+.2%} |
| weights, MB | {_megabytes(result.size_before)} | {_megabytes(result.size_after)} | {size} |

Measured on {text.num_tokens:,} tokens ({text.num_bytes:,} bytes), in windows of {length}{seen}.

```sh
{command}
tandem serve --model {folder}
```

Made with Tandem {version()}, torch {torch.__version__}, Transformers {transformers.__version__},
Python {platform.python_version()}.
""",
        encoding="utf-8",
    )


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:,.1f}"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.2%}"
