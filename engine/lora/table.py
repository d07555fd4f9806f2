"""The adapters that a model can run beside its own weights, and their tensors where products read them.

The CPU's kernel (`adapt.cpp`, whose structs `adapt.h` explains) reads them in one stream, on huge pages.
Torch and the kernels of a GPU (`devices/cuda/adapters.py`) read them on the device.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.batch.step_inputs import SequenceRows
from engine.copies import HugePages
from engine.linear.packed import kernel_fault, rows_of
from engine.linear.quantized import QuantizedLinear
from engine.lora.files import (
    AdapterError,
    AdapterFiles,
    LinearShape,
    LowRankProduct,
    RawAdapter,
    parse_adapter,
    read_adapter,
)
from native.structs import fields
from protocol.requests import MAX_ADAPTERS, Adapter

_HEADER = Path(__file__).parent / "adapt.h"


class PartArgs(Structure):
    _fields_ = fields(_HEADER, "Part")


class AdaptedArgs(Structure):
    _fields_ = fields(_HEADER, "Adapted")


RANKS, INPUTS, OUTPUTS = 4, 32, 64
"""Number of adjacent ranks, inputs and outputs in the CPU kernel's layout; zeros fill whole multiples."""
_DEVICE_RANKS = 8
"""GPU ranks are zero-padded to multiples of this number, so that rows of `up` are 16-byte aligned."""


class PackedProduct(NamedTuple):
    """bfloat16 `down` [rank / RANKS, in / INPUTS, RANKS, INPUTS] and `up` [out / OUTPUTS, rank, OUTPUTS].

    `inputs` and `outputs` are the layer's.
    """

    down: Tensor
    up: Tensor
    inputs: int
    outputs: int

    def part(self, outputs: range, first: int = 0) -> PartArgs:
        """Return the kernel's struct for a range of outputs; they are added to a row from `first` on."""
        rank, own = self.up.shape[1], (outputs.start, outputs.stop)
        return PartArgs(self.down.data_ptr(), self.up.data_ptr(), rank, self.inputs, *own, first)


def pack(products: Mapping[str, LowRankProduct]) -> dict[str, PackedProduct]:
    """Pack all products of an adapter into one allocation, in their order."""
    plain = {path: _packed(product) for path, product in products.items()}
    pages = HugePages(sum(each.down.nbytes + each.up.nbytes for each in plain.values()))
    return {
        path: each._replace(down=pages.copy(each.down), up=pages.copy(each.up))
        for path, each in plain.items()
    }


def _packed(product: LowRankProduct) -> PackedProduct:
    (rank, inputs), outputs = product.down.shape, len(product.up)
    missing = -rank % RANKS
    down = pad(product.down, (0, -inputs % INPUTS, 0, missing)).bfloat16()
    up = pad(product.up.T, (0, -outputs % OUTPUTS, 0, missing)).bfloat16()
    return PackedProduct(
        down.unflatten(1, (-1, INPUTS)).unflatten(0, (-1, RANKS)).transpose(1, 2),
        up.unflatten(1, (-1, OUTPUTS)).transpose(0, 1),
        inputs,
        outputs,
    )


def place(
    products: Mapping[str, LowRankProduct], device: torch.device, dtype: torch.dtype
) -> dict[str, LowRankProduct]:
    """Pad all products of an adapter and move them to the device."""
    return {
        path: LowRankProduct(*(side.to(device, dtype) for side in _padded(each)))
        for path, each in products.items()
    }


def _padded(product: LowRankProduct) -> LowRankProduct:
    missing = -len(product.down) % _DEVICE_RANKS
    return LowRankProduct(pad(product.down, (0, 0, 0, missing)), pad(product.up, (0, missing)))


def table_of(products: Mapping[str, LowRankProduct], linears: Iterable[str], device: torch.device) -> Tensor:
    """Return `down`'s and `up`'s addresses and the rank, int64 [linear layers, 3]; zeros for no product."""
    return torch.tensor([_fields(products.get(path)) for path in linears], device=device)


def _fields(product: LowRankProduct | None) -> tuple[int, int, int]:
    if product is None:
        return 0, 0, 0
    return product.down.data_ptr(), product.up.data_ptr(), len(product.down)


logger = logging.getLogger("tandem.engine")

NOTHING = -1
"""An adapter slot that adds nothing; its rows take the same path as an adapter's rows."""


def adaptable(model: PreTrainedModel) -> dict[str, LinearShape]:
    """Return the linear layers that rows of the batch pass through unchanged, by path. Neither the head,
    which sees only some rows, nor experts are among them.
    """
    head, shapes = model.get_output_embeddings(), {}
    for path, module in model.named_modules():
        if module is head or ".experts." in path:
            continue
        if isinstance(module, Conv1D):
            shapes[path] = LinearShape(*reversed(module.weight.shape))
        elif type(module) is nn.Linear or isinstance(module, QuantizedLinear):
            shapes[path] = LinearShape(module.out_features, module.in_features)
    return shapes


@dataclass(eq=False)
class Weights:
    """A loaded adapter. `products` are by the linear layers' paths: packed where the CPU kernel adds them,
    else in the model's dtype, with a `table` of them on the device (`engine.lora.table`).
    """

    products: Mapping[str, LowRankProduct | PackedProduct]
    path: str
    digest: str
    table: Tensor | None = None
    named: dict[str, Adapter] = field(default_factory=dict)
    num_users: int = 0


class OtherTables(Protocol):
    """The adapter tables of a worker's other ranks, kept equal to this rank's, slot by slot."""

    def keep(self, slot: int, path: str, raw: RawAdapter) -> None:
        """Load an adapter into a slot of all tables. Raises `AdapterError`; then no table has it."""

    def drop(self, slot: int) -> None:
        """Drop a slot's adapter. Ignore unknown slots."""


class Adapters:
    """Adapters by content, each in its own slot: a number that is never reused; 0 is no adapter.

    An adapter stays while it has a name or a user, or is awaited. One thread calls all methods except `read`.
    """

    is_awaited: Callable[[str], bool] = staticmethod(lambda digest: False)
    """Whether a request for the adapter with this digest is to come."""

    def __init__(
        self, linears: Mapping[str, LinearShape], device: torch.device, dtype: torch.dtype, max_rank: int
    ) -> None:
        self.linears = linears
        self.outputs: dict[str, Sequence[range]] = {}
        """The outputs of linear layers that this rank computes, by path; it computes others whole."""
        self.device, self.dtype, self.max_rank = device, dtype, max_rank
        self._slots: dict[str, int] = {}
        self._weights: dict[int, Weights] = {}
        self._numbers = itertools.count(1)
        self._others: OtherTables | None = None

    def own_shape(self, path: str) -> LinearShape:
        """Return the shape of this rank's part of a linear layer."""
        whole = self.linears[path]
        own = self.outputs.get(path)
        return whole if own is None else whole._replace(outputs=sum(map(len, own)))

    def share(self, others: OtherTables) -> None:
        """Keep `others` equal to this table from now on. Raises like their `keep`, and `AdapterError`."""
        self._others = others
        for slot, weights in self._weights.items():
            others.keep(slot, weights.path, self._checked(weights.path, weights.digest, None).raw)

    def read(self, path: str, on_piece: Callable[[], None] = lambda: None) -> AdapterFiles:
        """Read an adapter's files for `load` and `require`. The disk may take long; any thread may call it.
        `on_piece` is called like in `read_adapter`. Raises `AdapterError`.
        """
        return read_adapter(path, self.linears, self.max_rank, on_piece)

    def has(self, digest: str) -> bool:
        """Return whether the adapter with this digest is loaded, so `load` and `require` need no disk."""
        return digest in self._slots

    def load(self, name: str, path: str, digest: str = "", files: AdapterFiles | None = None) -> Adapter:
        """Keep the folder's adapter under a name, until `unload`. Read its files now unless `files` are given
        or the digest is loaded. Raises `AdapterError`, also if the files' content does not match `digest`.
        """
        slot = self._slots.get(digest) or self._add(path, digest, files)
        weights = self._weights[slot]
        adapter = weights.named[name] = Adapter(name=name, path=path, digest=weights.digest)
        return adapter

    def unload(self, name: str) -> None:
        """Forget a name. Requests that use the adapter continue. Ignore unknown names."""
        for slot, weights in list(self._weights.items()):
            if weights.named.pop(name, None) is not None:
                self._drop_unused(slot)

    def drop_unused(self) -> None:
        """Drop the adapters without a user, a name or an awaited request."""
        for slot in list(self._weights):
            self._drop_unused(slot)

    def listed(self) -> list[Adapter]:
        """Return the adapters that have a name."""
        return [adapter for weights in self._weights.values() for adapter in weights.named.values()]

    def require(self, adapter: Adapter, files: AdapterFiles | None = None) -> int:
        """Return the adapter's slot; load it like `load` if it is not loaded. Raises `AdapterError`."""
        return self._slots.get(adapter.digest) or self._add(adapter.path, adapter.digest, files)

    def acquire(self, adapter: Adapter | None) -> int:
        """Return the adapter's slot and hold it until `release`. Raises like `require`."""
        if adapter is None:
            return 0
        slot = self.require(adapter)
        self._weights[slot].num_users += 1
        return slot

    def release(self, slot: int) -> None:
        if slot:
            self._weights[slot].num_users -= 1
            self._drop_unused(slot)

    def weights(self, slot: int) -> Weights:
        return self._weights[slot]

    def addresses(self, batch: Sequence[SequenceRows]) -> list[int]:
        """Return the address of each sequence's adapter table, or 0 without adapter. It stays valid while a
        sequence uses the adapter and until the device has run all work launched meanwhile.
        """
        return [self._address(rows.adapter) for rows in batch]

    def _address(self, slot: int) -> int:
        if slot in (0, NOTHING):
            return 0
        table = self._weights[slot].table
        assert table is not None
        return table.data_ptr()

    def keep(self, slot: int, path: str, raw: RawAdapter) -> None:
        """Load another rank's adapter into the same slot. Raises `AdapterError`."""
        self._put(slot, path, parse_adapter(raw, self.linears, self.max_rank))

    def drop(self, slot: int) -> None:
        """Drop a slot's adapter, if one is loaded."""
        weights = self._weights.pop(slot, None)
        if weights is not None:
            del self._slots[weights.digest]

    def _drop_unused(self, slot: int) -> None:
        weights = self._weights[slot]
        if not weights.named and not weights.num_users and not self.is_awaited(weights.digest):
            self.drop(slot)
            if self._others is not None:
                self._others.drop(slot)

    def _checked(self, path: str, digest: str, files: AdapterFiles | None) -> AdapterFiles:
        files = files or self.read(path)
        if digest not in ("", files.digest):
            raise AdapterError(f"{path}: its files differ from those loaded under this name before")
        return files

    def _add(self, path: str, digest: str, files: AdapterFiles | None) -> int:
        files = self._checked(path, digest, files)
        if files.digest in self._slots:
            return self._slots[files.digest]
        if len(self._slots) >= MAX_ADAPTERS:
            raise AdapterError(f"{path}: at most {MAX_ADAPTERS} adapters can be loaded at one time")
        slot = next(self._numbers)
        if self._others is not None:
            self._others.keep(slot, path, files.raw)
        self._put(slot, path, files)
        return slot

    def _put(self, slot: int, path: str, files: AdapterFiles) -> None:
        found = files.products  # stored in the order in which layers run
        ordered = {layer: self._own(layer, found[layer]) for layer in self.linears if layer in found}
        self._slots[files.digest] = slot
        self._weights[slot] = weights = self._prepared(ordered, path, files.digest)
        num_bytes = sum(product.down.nbytes + product.up.nbytes for product in weights.products.values())
        logger.info("adapter %s: %d layers, %.1f MB", path, len(ordered), num_bytes / 1e6)

    def _own(self, path: str, whole: LowRankProduct) -> LowRankProduct:
        own = self.outputs.get(path)
        return whole if own is None else whole._replace(up=rows_of(whole.up, own))

    def _prepared(self, products: Mapping[str, LowRankProduct], path: str, digest: str) -> Weights:
        if kernel_fault(self.device, self.dtype) is None:
            return Weights(pack(products), path, digest)
        placed = place(products, self.device, self.dtype)
        return Weights(placed, path, digest, table_of(placed, self.linears, self.device))
