"""Model folders with random weights and a real shape, for timing."""

from bench.shapes.write import SHAPES, write_shape

__all__ = ["SHAPES", "write_shape"]
