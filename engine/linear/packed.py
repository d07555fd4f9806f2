"""Linear layers with bfloat16 weights packed for our kernel (`product.cpp`), which also takes float32.

With few rows, as in decoding, the kernel reads weights at the memory's full speed, oneDNN at half of it. With
many rows both are about equally fast. With AMX, 16 rows take as long as one. CPUs without bfloat16
instructions multiply in float32: mostly faster than torch with few rows, up to 1.5 times slower with
hundreds. A row's result has the same bits in every batch.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from ctypes import Structure
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from native.build import BuildError, load_library
from native.structs import fields
from native.threads import gomp_parallel

_FOLDER = Path(__file__).parent


class QuantizedArgs(Structure):
    _fields_ = fields(_FOLDER / "quantized.h", "Quantized")


class RoutedArgs(Structure):
    _fields_ = fields(_FOLDER / "routed_rows.h", "RoutedRows")


PANEL = 64
"""Number of outputs that are stored and computed together."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled library of products. Raises BuildError."""
    return load_library(_FOLDER / "product.cpp")


def kernel_fault(
    device: torch.device, dtype: torch.dtype, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
) -> str | None:
    """Return which product replaces our kernel, and why; None if the kernel can be used. `dtypes` are the
    dtypes that it supports.
    """
    if device.type != "cpu" or dtype not in dtypes:
        return f"torch's, for {str(dtype).removeprefix('torch.')} on {device.type}"
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx2" not in cpuinfo.read_text():
        return "torch's, on a CPU without AVX2"
    try:
        library()
    except BuildError as error:
        return f"torch's ({error})"
    return None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    *batch, in_features = x.shape
    if in_features != 2 * weight.shape[1] or x.dtype is not torch.bfloat16:
        raise ValueError(
            f"not a bfloat16 input of {2 * weight.shape[1]} features: {x.dtype} {tuple(x.shape)}"
        )
    out = torch.empty((*batch, out_features), dtype=torch.bfloat16)
    library().tandem_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        math.prod(batch),
        in_features,
        out_features,
        torch.get_num_threads(),
        gomp_parallel(),
    )
    return out


_operators = torch.library.Library("tandem", "FRAGMENT")


def operator(schema: str, run: Callable[..., Any], traced: Callable[..., Any]) -> Any:
    """Make `run` an operator of torch, which torch.compile traces by `traced`."""
    _operators.define(schema)
    name = schema.partition("(")[0]
    _operators.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tandem::{name}", traced, lib=_operators)
    return getattr(torch.ops.tandem, name).default


_packed_linear = operator(
    "packed_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    _run,
    lambda x, weight, bias, out_features: x.new_empty((*x.shape[:-1], out_features)),
)


class PackedLinear(nn.Module):
    """A linear layer with packed weights. `weight` is bfloat16 [out / 64, in / 2, 64, 2], zero-padded."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = plain_weight(linear)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(pack(weight.detach()), requires_grad=False)
        self.bias = linear.bias

    def rows(self, rows: Sequence[range]) -> PackedLinear:
        part = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(part)
        part.in_features, part.out_features = self.in_features, sum(map(len, rows))
        part.weight = nn.Parameter(packed_rows(self.weight, rows), requires_grad=False)
        part.bias = None if self.bias is None else nn.Parameter(rows_of(self.bias, rows), False)
        return part

    def forward(self, x: Tensor) -> Tensor:
        return _packed_linear(x, self.weight, self.bias, self.out_features)


def plain_weight(linear: nn.Linear | Conv1D) -> Tensor:
    """Return the weight [out_features, in_features]; GPT-2's layers store its transpose."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a layer of these tensors, [out_features, in_features] and [out_features]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def pack(weight: Tensor, together: int = 2) -> Tensor:
    """Pack values [out_features, columns] for the kernel: [out_features / 64, columns / together, 64,
    together]. `columns` must be even for weights.
    """
    out_features, columns = weight.shape
    panels = -(-out_features // PANEL)
    padded = weight.contiguous()
    if out_features % PANEL or padded.storage_offset() % together:
        padded = weight.new_zeros((panels * PANEL, columns))
        padded[:out_features] = weight
    values = padded if together == 1 else padded.view(torch.int32)  # whole words move several times as fast
    moved = values.new_empty((panels, columns // together, PANEL))
    moved.copy_(values.view(panels, PANEL, -1).transpose(1, 2))
    return moved.view(weight.dtype).view(panels, columns // together, PANEL, together)


def joined(packed: Sequence[Tensor], outputs: Sequence[int]) -> Tensor:
    """Join packed weights, with `outputs[i]` outputs each, into one packed weight."""
    if all(count % PANEL == 0 for count in outputs):
        return torch.cat(list(packed))
    rows = [unpacked(part)[:count] for part, count in zip(packed, outputs, strict=True)]
    return pack(torch.cat(rows), packed[0].shape[3])


def unpacked(packed: Tensor) -> Tensor:
    """Undo `pack`, but keep its padding rows."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1] * packed.shape[3])


def packed_rows(packed: Tensor, rows: Sequence[range]) -> Tensor:
    """Return some rows of a packed weight, packed. One range of whole panels shares its memory."""
    first = rows[0]
    if len(rows) == 1 and first.start % PANEL == 0 and first.stop % PANEL == 0:
        return packed[first.start // PANEL : first.stop // PANEL]
    return pack(rows_of(unpacked(packed), rows), packed.shape[3])


def rows_of(tensor: Tensor, rows: Sequence[range]) -> Tensor:
    """Return some rows of a tensor. A single range shares the tensor's memory."""
    parts = [tensor[each.start : each.stop] for each in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def pack_linears(model: nn.Module) -> int:
    """Replace the model's bfloat16 linear layers, freeing their weights. Return their number."""
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Conv1D) and _fits(child) and not _reads_weight(module, name):
                setattr(module, name, PackedLinear(child))
                count += 1
    return count


def _reads_weight(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward uses its layer's weight without calling the layer."""
    try:
        return f"self.{name}.weight" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False


def _fits(linear: nn.Linear | Conv1D) -> bool:
    biases = linear.bias is None or linear.bias.dtype is torch.bfloat16
    return linear.weight.dtype is torch.bfloat16 and plain_weight(linear).shape[1] % 2 == 0 and biases
