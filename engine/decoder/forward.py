"""The native decoder behind `Forward`'s interface, and drafting with it one token after the other."""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.decoder.description import Description
from engine.forward import ForwardOutput
from engine.linear.packed import kernel_address
from engine.rows import RowArrays
from native.build import load_library
from native.openmp import gomp_parallel


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises BuildError."""
    library = load_library(Path(__file__).parent / "decoder.cpp")
    library.tandem_decoder_create.argtypes = [ctypes.c_char_p]
    library.tandem_decoder_create.restype = ctypes.c_void_p
    library.tandem_decoder_destroy.argtypes = [ctypes.c_void_p]
    library.tandem_decoder_destroy.restype = None
    library.tandem_decoder_forward.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.tandem_decoder_forward.restype = None
    library.tandem_decoder_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    library.tandem_decoder_run.restype = ctypes.c_char_p
    library.tandem_decoder_draft.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.tandem_decoder_draft.restype = ctypes.c_char_p
    return library


class Described(Protocol):
    """What the C++ side's `Model` struct says, and what must live as long as it does."""

    layers: bytes
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_products: int
    tables: bytes
    head: bytes
    rotation: bytes
    norm_epsilon: float
    attention_scale: float
    entry: bytes
    """The `Entry` struct of a draft head; empty for a whole model."""


class NativeDecoder(ABC):
    """Runs what `described` says over rows of bfloat16 on the CPU; its KV lies in `backend`'s pool.

    Raises BuildError where the kernel cannot be built.
    """

    choice = "native decoder"
    products = "packed weights, summed alike in every batch"

    def __init__(self, described: Described, backend: CpuBackend) -> None:
        self._library = _library()
        self.vocab_size = described.vocab_size
        self._hidden_size = described.hidden_size
        self._described = described  # the decoder reads its memory
        self._backend = backend
        layers = ctypes.create_string_buffer(described.layers)
        self._entry = ctypes.create_string_buffer(described.entry) if described.entry else None
        kernel, begin, attend = backend.addresses
        fields = b"".join(
            (
                struct.pack(
                    "=Q8q",
                    ctypes.addressof(layers),
                    described.num_layers,
                    described.hidden_size,
                    described.num_heads,
                    described.num_kv_heads,
                    described.head_dim,
                    described.vocab_size,
                    torch.get_num_threads(),
                    described.num_products,
                ),
                described.tables,
                described.head,
                described.rotation,
                struct.pack("=2d", described.norm_epsilon, described.attention_scale),
                struct.pack("=5Q", kernel, kernel_address(), begin, attend, gomp_parallel()),
                struct.pack("=Q", 0 if self._entry is None else ctypes.addressof(self._entry)),
            )
        )
        self._decoder: int = self._library.tandem_decoder_create(fields)
        weakref.finalize(self, self._library.tandem_decoder_destroy, self._decoder)

    def warm_up(self, run: Callable[[], None]) -> float:
        """There is nothing to compile."""
        return 0.0

    def padded_rows(self, total_tokens: int) -> int:
        return total_tokens

    @abstractmethod
    def run(self, batch: RowArrays, logit_rows: list[int], *, wants_hidden: bool) -> ForwardOutput:
        """As when called, for rows of chains. Raises ValueError where the batch is out of range."""

    def _forward(
        self,
        rows: RowArrays | tuple[Tensor, Tensor],
        logit_rows: list[int],
        hidden_layers: Tensor | None = None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the rows asked for, and hidden states: of the layers asked for, [rows, layers,
        hidden_size], or, for a head that is given those `before` the rows, those after the rows asked for.

        `rows` are token ids and positions where the backend's step has begun already.
        """
        token_ids, positions = (rows.token_ids, None) if isinstance(rows, RowArrays) else rows
        before = None if before is None else before.contiguous()
        wanted = np.array(logit_rows)
        logits = torch.empty((len(logit_rows), self.vocab_size), dtype=torch.bfloat16)
        count, captured = len(token_ids), 0 if hidden_layers is None else len(hidden_layers)
        shape = (count, captured) if before is None else (len(logit_rows),)
        hidden = torch.empty((*shape, self._hidden_size), dtype=torch.bfloat16)
        fields = struct.pack(
            "=2QqQqQQqQ2Q",
            token_ids.ctypes.data if isinstance(token_ids, np.ndarray) else token_ids.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            count,
            wanted.ctypes.data,
            len(logit_rows),
            logits.data_ptr(),
            0 if hidden_layers is None else hidden_layers.data_ptr(),
            captured,
            hidden.data_ptr(),
            0 if before is None else before.data_ptr(),
            0 if before is None else hidden.data_ptr(),
        )
        if isinstance(rows, RowArrays):
            _check(self._library.tandem_decoder_run(self._decoder, self._batch(rows), fields))
        else:
            self._library.tandem_decoder_forward(self._decoder, fields)
        return logits, hidden

    def draft(
        self,
        batch: RowArrays,
        wishes: np.ndarray,
        temperatures: np.ndarray,
        vocab_size: int,
        before: Tensor | None = None,
        distributions: Tensor | None = None,
    ) -> np.ndarray:
        """Read rows of each sequence, then draft from its own choices; int64 [most tokens, sequences].

        `wishes` int64 [2, sequences] has each one's seed, and how many tokens it wants, never more than the
        one before; the rest of its column in the result means nothing. Its blocks have room for the KV of all
        but the last token. Of the logits only the leading `vocab_size` count; `temperatures` are float32. A
        head also takes the hidden states `before` the rows to be read. Raises ValueError where the batch is
        out of range.

        With `distributions`, float32 [sequences, most tokens, width], tokens are drawn with noise of
        `Purpose.DRAFT` from what is written there, over the `width` token ids of the target. Without, they
        are chosen with the noise of the target's own.
        """
        before = None if before is None else before.contiguous()
        drafted = np.empty((int(wishes[1, 0]), wishes.shape[1]), np.int64)
        seeds, counts = (row.ctypes.data for row in wishes)
        fields = self._batch(batch) + struct.pack(
            "=q6Qq",
            vocab_size,
            counts,
            seeds,
            temperatures.ctypes.data,
            0 if before is None else before.data_ptr(),
            drafted.ctypes.data,
            0 if distributions is None else distributions.data_ptr(),
            0 if distributions is None else distributions.shape[2],
        )
        _check(self._library.tandem_decoder_draft(self._decoder, fields))
        return drafted

    def _batch(self, batch: RowArrays) -> bytes:
        """The C++ side's `Batch`."""
        starts, ends = (row.ctypes.data for row in batch.spans)
        return struct.pack(
            "=3q5Q",
            *batch.blocks.shape,
            self._backend.block_size,
            batch.token_ids.ctypes.data,
            starts,
            ends,
            batch.blocks.ctypes.data,
            0 if batch.first_keys is None else batch.first_keys.ctypes.data,
        )


def _check(wrong: bytes | None) -> None:
    if wrong:
        raise ValueError(f"packed rows: {wrong.decode()} is out of range")


class DecoderForward(NativeDecoder):
    """Callable (token_ids [rows], positions [rows], logit_rows) -> ForwardOutput, as
    `engine.forward.Forward`. The model's own weights are copied.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: CpuBackend,
        positions: int,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """`hidden_layers` are captured, as by `engine.forward.Forward`."""
        super().__init__(Description(model, positions), backend)
        self._order = sorted(hidden_layers)
        self._asked = [self._order.index(layer) for layer in hidden_layers]
        self._hidden_layers = torch.tensor(self._order)

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: list[int]) -> ForwardOutput:
        return self._output(*self._forward((token_ids, positions), logit_rows, self._hidden_layers))

    def run(self, batch: RowArrays, logit_rows: list[int], *, wants_hidden: bool) -> ForwardOutput:
        if not wants_hidden:
            return ForwardOutput(self._forward(batch, logit_rows)[0], None)
        return self._output(*self._forward(batch, logit_rows, self._hidden_layers))

    def _output(self, logits: Tensor, hidden: Tensor) -> ForwardOutput:
        if not self._order:
            return ForwardOutput(logits, None)
        if self._asked != sorted(self._asked):
            hidden = hidden[:, self._asked]
        return ForwardOutput(logits, hidden.flatten(1))
