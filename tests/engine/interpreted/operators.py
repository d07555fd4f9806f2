"""Operators of interpreted tensors by one call of numpy, instead of fifteen calls of Triton's semantics.

They take tensors of one type, pointers and offsets, and Python's numbers that keep the tensor's type.
Whatever else comes goes Triton's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle

Operator = Callable[[Any, Any], Any]

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
_FLOATS, _SIGNED, _UNSIGNED = ("fp32", "fp16"), ("int32", "int64"), ("uint32", "uint64")
_INTEGERS = _SIGNED + _UNSIGNED
_TYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16} | {
    name: getattr(np, name) for name in _INTEGERS
}


def _keeps(kind: str, other: Any) -> bool:
    """Tell whether a number has a place in tensors of this kind."""
    if type(other) is float:
        return kind in _FLOATS
    return type(other) is int and kind in _TYPES and (0 if kind in _UNSIGNED else -(2**31)) <= other < 2**31


def _made(data: Any, kind: Any, left: Any, right: Any, scalar: Any) -> Any:
    """Return a tensor of the broadcast shape of both operands."""
    is_block = left.type.is_block() or right.type.is_block()
    return core.tensor(TensorHandle(data, kind), core.block_type(scalar, data.shape) if is_block else scalar)


def _fast(
    compute: Operator, result: Any, takes: tuple[str, ...], is_reversed: bool, slow: Operator
) -> Operator:
    """Return an operator. `result` is the type of what it computes, if that is not the operands'."""

    def operate(self: Any, other: Any) -> Any:
        kind = self.dtype.name
        if isinstance(other, core.constexpr):
            other = other.value
        if kind in takes:
            is_tensor = isinstance(other, core.tensor)
            if is_tensor and other.dtype.name == kind:
                data = compute(self.handle.data, other.handle.data)
                return _made(data, self.handle.dtype.scalar, self, other, result or self.dtype)
            if _keeps(kind, other):
                value = _TYPES[kind](other)
                data = compute(value, self.handle.data) if is_reversed else compute(self.handle.data, value)
                return _made(data, self.handle.dtype.scalar, self, self, result or self.dtype)
        return slow(self, other)

    return operate


def _adds_offsets(slow: Operator) -> Operator:
    def operate(self: Any, other: Any) -> Any:
        if self.dtype.is_ptr() and isinstance(other, core.tensor) and other.dtype.name in _SIGNED:
            size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + size * other.handle.data.astype(np.uint64)
            return _made(data, self.handle.dtype, self, other, self.dtype)
        return slow(self, other)

    return operate


def patch() -> None:
    """Replace the operators of tensors, once Triton's interpreter has replaced them."""
    numbers = _FLOATS + _INTEGERS
    kinds: list[tuple[dict[str, Any], Any, tuple[str, ...]]] = [
        (_ARITHMETIC, None, numbers),
        (_COMPARISONS, tl.int1, numbers),
        (_BITWISE, None, ("int1", *_INTEGERS)),
        (_SHIFTS, None, _INTEGERS),
    ]
    for operators, result, takes in kinds:
        for name, compute in operators.items():
            for method, is_reversed in ((f"__{name}__", False), (f"__r{name}__", True)):
                slow = getattr(core.tensor, method)
                setattr(core.tensor, method, _fast(compute, result, takes, is_reversed, slow))
    core.tensor.__add__ = _adds_offsets(core.tensor.__add__)
