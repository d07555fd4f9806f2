"""A pytest plugin that makes Triton's interpreter several times as fast.

It computes the same results. Work that was repeated for each launch, call and operator is done once, and
findings about types are cached. Nothing is compiled, so runners need no warm-up of their eager steps. Only
products of matrices differ, so that rows keep their bits, and bfloat16, to which the interpreter truncates.
"""

from __future__ import annotations

import builtins
import inspect
from dataclasses import replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from engine.devices.cuda.buckets import Buckets
from tests.engine.interpreted import operators

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_init_block = core.block_type.__init__
_check_types = TritonSemantic.binary_op_type_checking_impl
_computation_type = TritonSemantic.computation_type_impl
_broadcast = TritonSemantic.broadcast_impl_value
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


@cache
def patch_lang(function: Any) -> Any:
    """Leave the interpreter's operators in the language, instead of patching them for each launch
    and call.
    """
    modules = {each for each in function.__globals__.values() if inspect.ismodule(each)} & {tl, core}
    if any(core.is_builtin(each.load) for each in modules):
        _patch_lang(function)
        operators.patch()
    return SimpleNamespace(restore=lambda: None)


_np_dtypes: dict[str, np.dtype[Any]] = {}


def np_dtype_of(kind: Any) -> np.dtype[Any]:
    scalar = kind.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _get_np_dtype(scalar)
    return _np_dtypes[scalar.name]


def are_equal(self: Any, other: Any) -> bool:
    other = other.value if isinstance(other, core.constexpr) else other
    return isinstance(other, core.dtype) and self.name == other.name


class _Shape:
    """Caches the common properties of all blocks of a shape and of their tensors."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        block: Any = SimpleNamespace()
        _init_block(block, tl.int1, list(lengths))  # raises for invalid shapes
        self.shape, self.numel, self.text = block.shape, block.numel, str(block.shape)
        self.of_tensors = core.tuple([core.constexpr(length) for length in lengths])
        self.numel_of_tensors = core.constexpr(block.numel)
        self.shape.known = self


_shape_of = cache(_Shape)
_SCALAR = SimpleNamespace(of_tensors=core.tuple([]), numel_of_tensors=core.constexpr(1))


def init_block(self: Any, element_ty: Any, shape: Any) -> None:
    known = getattr(shape, "known", None)
    if known is None:
        known = _shape_of(builtins.tuple(core._unwrap_if_constexpr(each) for each in shape))
    self.known, self.shape, self.numel = known, known.shape, known.numel
    self.element_ty, self.name = element_ty, f"<{known.text}, {element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    known = type.known if type.is_block() else _SCALAR
    self.shape, self.numel = known.of_tensors, known.numel_of_tensors


_computation_types: dict[Any, Any] = {}


def computation_type(self: Any, a: Any, a_is_number: bool, b: Any, b_is_number: bool, divided: bool) -> Any:
    key = a.name, a_is_number, b.name, b_is_number, divided
    if key not in _computation_types:
        _computation_types[key] = _computation_type(self, a, a_is_number, b, b_is_number, divided)
    return _computation_types[key]


def check_types(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Return tensors of one type unchanged."""
    tensors = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
    if tensors and lhs.type.name == rhs.type.name and not (div_or_mod or lhs.dtype.is_ptr()):
        return lhs, rhs
    return _check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Return tensors of one shape unchanged."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def convert_float(values: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
    """Round float32 to the nearest bfloat16, as GPUs do, ties to even."""
    if kind != tl.float32 or wanted != tl.bfloat16:
        return _convert_float(values, kind, wanted, rounding)
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def dot_of_rows(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """Multiply row by row, since some CPUs' BLAS gives a row other bits at another place in a matrix, which
    no GPU does.

    It also multiplies bfloat16's values, where the interpreter multiplies their bits as integers.
    """

    def shown(handle: Any, data: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle((data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return interpreter.TensorHandle(data, handle.dtype)

    rows = (
        shown(a, a.data[..., :, None, :]),
        shown(b, b.data[..., None, :, :]),
        shown(d, d.data[..., :, None, :]),
    )
    done = _create_dot(self, *rows, *how)
    return interpreter.TensorHandle(done.data[..., 0, :], done.dtype)


Buckets.eager_forms = lambda self: iter(())
interpreter._convert_float = convert_float
interpreter._patch_lang = patch_lang
interpreter.InterpreterBuilder.create_dot = dot_of_rows
interpreter._get_np_dtype = np_dtype_of
core.dtype.__eq__ = are_equal
core.dtype.__hash__ = lambda self: hash(self.name)
core.block_type.__init__ = init_block
core.tensor.__init__ = init_tensor
TritonSemantic.computation_type_impl = computation_type
TritonSemantic.binary_op_type_checking_impl = check_types
TritonSemantic.broadcast_impl_value = broadcast
TritonSemantic.scalar_constant = lru_cache(maxsize=None, typed=True)(TritonSemantic.scalar_constant)
_builder = interpreter.interpreter_builder
_builder.options = replace(_builder.options, sanitize_overflow=False)  # it would be set with `debug` alone
