"""The load probe: a few runs of a model that show whether the engine serves it correctly.

1. Rows may influence each other only through attention. The probe switches attention off and makes one
   row's embedding NaN: no other row may become NaN. This finds recurrent state and convolutions over tokens
   in any dtype, since a NaN survives every decay and no rounding error makes one. Two rows with the same
   token and position must be alike: this finds models that number rows by themselves.
   Our operators over tokens are switched off too, where recurrent layers call them.
2. A text in two chunks, each batched with another request, runs through the paged pool. Its logits must
   equal Transformers' logits for the whole text alone. They may differ by rounding: by a multiple of the
   difference that changing the embeddings' last bit makes in the same model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import select_backend
from engine.devices.recurrent import operators_of
from engine.devices.torch import transformers_hook
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.attention import AttentionOptions
from engine.kv.layout import TARGET, Group, LayerShape, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import RecurrentLayer, StateLayout, StateSlots
from protocol.errors import UnsupportedModelError
from protocol.handoff import MAX_SEGMENTS

logger = logging.getLogger("tandem.engine")

_BLOCK_SIZE = 4
_TEXT, _SPLIT, _MATE = 6, 3, 2
"""Number of tokens of the text, of its first chunk, and of its batch mate. Few: large models take time."""
_BLOCKS = [1, 0], [3, 2]
"""Blocks of the batch mate and of the text."""
_MAX_SEGMENTS = MAX_SEGMENTS // 2
"""Most KV shapes of a target; the other half of the segments is for a draft model."""
_TWINS = 0, 2
"""The two rows with the same token and position."""
_POISONED = 1
_MAX_TWIN_DIFFERENCE = 0.1
"""Limit relative to the root mean square. Another position turns keys by more, rounding by less."""
_SLACK = 8.0
"""Largest difference between logits, in multiples of the difference made by rounding. Correct models stay
near 1, or reach 5 where rounding swaps experts. Wrong ones exceed 1000 in float32.
"""
_ATTEMPTS = 3
"""Number of texts to try, since rounding may swap nearly tied experts."""


class KeptLayout(NamedTuple):
    """The KV and the recurrent states that a model keeps."""

    kv: Group
    state: StateLayout | None = None


def probe(
    model: PreTrainedModel, dtype: torch.dtype, num_layers: int, hooks: RecurrentHooks | None = None
) -> KeptLayout:
    """Probe a model. Raises UnsupportedModelError with the architecture and the reason."""
    name = model.config.model_type
    state = None
    try:
        with torch.inference_mode():
            layers, layer_windows, recurrent = _probe_structure(model, name, num_layers, hooks)
            group = Group.of_layers(TARGET, layers, dtype, layer_windows)
            if len(group.segments) > _MAX_SEGMENTS:
                raise UnsupportedModelError(
                    f"{name}: layers with KV of {len(group.segments)} different shapes are not supported, at "
                    f"most {_MAX_SEGMENTS}"
                )
            if hooks is not None:
                state = StateLayout(tuple(recurrent), dtype)
            if not any(
                _same_logits(model, KeptLayout(group, state), hooks, dtype, seed) for seed in range(_ATTEMPTS)
            ):
                raise UnsupportedModelError(
                    f"{name}: a text in chunks in a batch gets other logits than whole and alone"
                )
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        logger.info("%s: the forward of packed rows: %s", name, error)
        raise UnsupportedModelError(
            f"{name}: its forward needs a batch's shape or mask, and so cannot run rows of several requests "
            "as one, which is not supported"
        ) from error
    finally:
        transformers_hook.set_current_backend(None)
        model.set_attn_implementation(transformers_hook.NAME)
        if hooks is not None:
            hooks.operators = None
    return KeptLayout(group, state)


class _AttentionOff:
    """An attention backend that attends to nothing and inspects each layer's arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.layers: dict[int, LayerShape | int] = {}
        """The layers in the form that `Group.of_layers` takes."""
        self.layer_windows: dict[int, int] = {}
        """The layers' sliding windows; 0 for none."""
        self._handed: list[tuple[int, Tensor, Tensor]] = []
        """Layers with their own KV, and this KV, kept alive so that no later tensor reuses its memory."""
        self.num_leaks = self.num_unlike = torch.zeros(())
        """Number of tensors with NaN in rows that were not poisoned; number of tensors where twins differ."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if layer in self.layers:
            raise UnsupportedModelError(
                f"{self._name}: layer {layer} runs attention more than once in a forward"
            )
        self.layer_windows[layer] = options.window
        shares = [other for other, *kv in self._handed if other < layer and _are_same(kv, (key, value))]
        dims = key.shape[2], value.shape[2]
        self.layers[layer] = shares[0] if shares else LayerShape(key.shape[1], *dims, _is_part(value, key))
        if not shares:
            self._handed.append((layer, key, value))
        for rows in (query, key, value):
            self.look(rows)
        return query.new_zeros((*query.shape[:2], value.shape[2]))

    def look(self, rows: Tensor) -> None:
        is_tainted = rows.isnan().flatten(1).any(1)
        is_tainted[_POISONED] = False
        first, second = (rows[twin].float() for twin in _TWINS)
        difference = (first - second).square().mean()
        self.num_leaks = self.num_leaks + is_tainted.any()
        self.num_unlike = self.num_unlike + (difference > _MAX_TWIN_DIFFERENCE**2 * first.square().mean())


class _OperatorsOff:
    """Operators of recurrent layers that keep rows apart."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.layers: list[RecurrentLayer] = []

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if layer != len(self.layers):
            raise self._disorder()
        self.layers.append(RecurrentLayer(inputs.shape[1], weight.shape[1]))
        return inputs.float()

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        self._attend(layer, value.shape[1], key.shape[1], key.shape[2], value.shape[2], decay.shape[2])
        parts = (query, key, decay) if beta is None else (query, key, decay, beta)
        own = sum(part.flatten(1).sum(1) for part in parts)
        return value + own[:, None, None]

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        self._attend(layer, value.shape[1], 1, key.shape[1], 1, 1)
        return value + sum(part.sum(1, keepdim=True) for part in (query, key, times))

    def _attend(self, layer: int, *heads: int) -> None:
        """Record the heads of linear attention, which follows the layer's convolution, if any."""
        if layer == len(self.layers):
            self.layers.append(RecurrentLayer(0, 1))
        of = self.layers[layer]
        if layer != len(self.layers) - 1 or of.num_heads:
            raise self._disorder()
        self.layers[layer] = RecurrentLayer(of.channels, of.taps, *heads)

    def _disorder(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name}: recurrent layers that run out of order, or more than once, are not supported"
        )


def _are_same(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether the tensors are the same memory: a layer that reuses another layer's KV."""
    return all(
        (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
        for a, b in zip(tensors, others, strict=True)
    )


def _is_part(value: Tensor, key: Tensor) -> bool:
    """Return whether `value` is the leading part of a single head's `key`, in the same memory."""
    is_smaller = key.shape[1] == 1 and value.shape[2] < key.shape[2]
    return is_smaller and _are_same([value], [key[..., : value.shape[2]]])


def _probe_structure(
    model: PreTrainedModel, name: str, num_layers: int, hooks: RecurrentHooks | None
) -> tuple[list[LayerShape | int | None], list[int], list[RecurrentLayer]]:
    """Return the layers' KV and windows in the form of `Group.of_layers`, and the recurrent layers.

    Tokens may meet only in our own functions.
    """
    attention, operators = _AttentionOff(name), _OperatorsOff(name)
    if hooks is not None:
        hooks.operators = operators
    tokens, positions = torch.tensor([[1, 2, 1, 3], [3, 0, 3, 1]], device=model.device)
    poisoned = torch.tensor([_POISONED], device=model.device)
    with _embeddings(model, lambda embeddings: embeddings.index_fill(1, poisoned, torch.nan)):
        model.set_attn_implementation(transformers_hook.PROBE_NAME)
        transformers_hook.set_current_backend(attention)  # type: ignore[arg-type]
        output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        attention.look(output.logits[0])
    known = attention.layers.keys() | set(hooks.layers if hooks is not None else ())
    missing = sorted(set(range(num_layers)) - known)
    if missing and attention.num_leaks:
        raise UnsupportedModelError(
            f"{name}: layers {missing} do not use the attention interface (recurrent state or attention of "
            "their own), which is not supported"
        )
    if attention.num_leaks:
        raise UnsupportedModelError(
            f"{name}: tokens influence each other outside of attention (recurrent state or a convolution), "
            "which is not supported"
        )
    if attention.num_unlike:
        raise UnsupportedModelError(f"{name}: a token's state depends on its row, not on its position alone")
    if not attention.layers:
        raise UnsupportedModelError(f"{name}: recurrent state without any attention is not supported")
    if hooks is not None and len(operators.layers) != len(hooks.layers):
        raise UnsupportedModelError(f"{name}: recurrent layers that do not run are not supported")
    layers = [attention.layers.get(layer) for layer in range(num_layers)]
    return layers, [attention.layer_windows.get(layer, 0) for layer in range(num_layers)], operators.layers


def _same_logits(
    model: PreTrainedModel, kept: KeptLayout, hooks: RecurrentHooks | None, dtype: torch.dtype, seed: int
) -> bool:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocab_size, (_TEXT + 2 * _MATE,), generator=generator).to(model.device)
    text, *mates = tokens.split([_TEXT, _MATE, _MATE])
    if hooks is not None:
        hooks.operators = None
    whole, rounded = _reference(model, text)
    served = _served(model, kept, hooks, dtype, text, mates)
    unit = torch.finfo(dtype).eps * whole.square().mean().sqrt()
    return bool(_distance(served, whole) <= _SLACK * torch.maximum(_distance(rounded, whole), unit))


def _reference(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return float32 [2, text, vocab]: Transformers' logits for the text and for changed embeddings."""

    def change_last_bits(embeddings: Tensor) -> Tensor:
        up = torch.arange(embeddings[1].numel(), device=model.device).view_as(embeddings[1]) % 2
        factors = 1 + (2 * up - 1) * torch.finfo(embeddings.dtype).eps
        return torch.stack([embeddings[0], embeddings[1] * factors.to(embeddings.dtype)])

    model.set_attn_implementation("eager")
    positions = torch.arange(len(text), device=model.device).expand(2, -1)
    with _embeddings(model, change_last_bits):
        output = model(input_ids=text.expand(2, -1), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits
    return logits.float()


def _served(
    model: PreTrainedModel,
    kept: KeptLayout,
    hooks: RecurrentHooks | None,
    dtype: torch.dtype,
    text: Tensor,
    mates: list[Tensor],
) -> Tensor:
    """Return the text's logits from two chunks, each batched with another request, float32 [text, vocab]."""
    pool = KVPool(PoolLayout((kept.kv,), _BLOCK_SIZE), 4, model.device, None)
    backend = select_backend(model.device, dtype)[0](pool.layers(TARGET))
    operators = None
    if hooks is not None and kept.state is not None:
        operators = operators_of(
            StateSlots(replace(kept.state, grid=_BLOCK_SIZE, window=_BLOCK_SIZE), 2, model.device)
        )
    model.set_attn_implementation(transformers_hook.NAME)
    forward = Modules(model, backend, hooks=hooks, operators=operators)
    runner = TorchRunner(forward, backend, model.device, "off", products="")
    logits = []
    for mate, start, end in ((mates[0], 0, _SPLIT), (mates[1], _SPLIT, len(text))):
        rows = [
            SequenceRows(mate.tolist(), 0, [_BLOCKS[0]]),
            SequenceRows(text[start:end].tolist(), start, [_BLOCKS[1]], state_slot=1),
        ]
        step = Step(rows, [*range(_MATE, _MATE + end - start)])
        logits.append(runner.run(step).logits.clone())
    return torch.cat(logits).float()


@contextmanager
def _embeddings(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply `change` to the model's input embeddings before any layer reads them."""
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, output: change(output))
    try:
        yield
    finally:
        hook.remove()


def _distance(logits: Tensor, others: Tensor) -> Tensor:
    """Return the largest of the rows' root mean square differences; NaN where a logit is NaN."""
    squares = torch.where(logits == others, 0.0, logits - others).square()
    return squares.mean(-1).sqrt().amax()
