"""`tandem bench shapes llama-29m FOLDER` writes one shape."""

from pathlib import Path
from typing import Annotated

import typer

from bench.shapes.write import SHAPES, write_shape


def shapes(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(SHAPES)}")],
    folder: Annotated[Path, typer.Argument(help="where to write the model")],
    seed: Annotated[int, typer.Option(help="seed of the random weights")] = 0,
) -> None:
    """Write a model folder with random weights and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {write_shape(name, folder, seed) / 1e6:.1f} M parameters in {folder}")
