"""Model folders with random weights and the shapes of real models, for timing."""

from bench.shapes.write import SHAPES, write_shape

__all__ = ["SHAPES", "write_shape"]
