"""Sequences of random rows for the operators of recurrent layers, run by these operators."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch.runner import StepOperators
from engine.kv.state_slots import GRID, RecurrentLayer, RowSpan, StateLayout, StateSlots

LAYER = RecurrentLayer(channels=24, taps=4, num_heads=4, num_key_heads=2, key_dim=20, value_dim=70)
LAYERS = {
    "sum": LAYER,
    "delta": LAYER,
    "delta by channel": replace(LAYER, decay_dim=LAYER.key_dim),
    "scan": replace(LAYER, num_heads=70, num_key_heads=1, value_dim=1),
}
"""Layers by what a token adds (its value, or by the delta rule the difference), by decays of heads or
channels, and with heads of one value each, more than the kernel takes at once.
"""
LENGTH = 53
"""Tokens: three grid points, and some more."""
CPU = torch.device("cpu")


class Text:
    """Rows of one sequence for each input of the operators."""

    def __init__(
        self,
        seed: int,
        rule: str,
        dtype: torch.dtype,
        layers: dict[str, RecurrentLayer] = LAYERS,
        length: int = LENGTH,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(length, *shape, generator=generator)

        layer = layers[rule]
        self.layer, self.length = layer, length
        constant = torch.Generator().manual_seed(9)
        self.weight = torch.randn(layer.channels, layer.taps, generator=constant)
        self.bias = torch.randn(layer.channels, generator=constant)
        self.rates = torch.rand(layer.num_heads, layer.key_dim, generator=constant)
        self.inputs = normal(layer.channels).to(dtype)
        self.query, self.key = (0.3 * normal(layer.num_key_heads, layer.key_dim) for _ in range(2))
        self.value = normal(layer.num_heads, layer.value_dim)
        self.decay = -0.2 * normal(layer.num_heads, layer.decay_dim).abs()
        self.beta = normal(layer.num_heads).sigmoid() if "delta" in rule else None

    def rows(self, start: int, end: int) -> list[Tensor]:
        parts = self.inputs, self.query, self.key, self.value, self.decay
        return [part[start:end] for part in (*parts, *([] if self.beta is None else [self.beta]))]


def served(
    kind: Callable[[StateSlots], StepOperators],
    texts: list[Text],
    rng: random.Random | None,
    device: torch.device = CPU,
    grid: int = GRID,
) -> list[tuple[Tensor, Tensor]]:
    """Return the operators' results for each text, in chunks at random places beside the others, or whole."""
    length = texts[0].length
    layout = StateLayout((texts[0].layer,), texts[0].inputs.dtype, grid, grid)
    operators = kind(StateSlots(layout, len(texts) + 1, device))
    done = [0] * len(texts)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    while min(done) < length:
        left = [index for index, count in enumerate(done) if count < length]
        taken = left if rng is None else rng.sample(left, rng.randint(1, len(left)))
        counts = [
            length - done[i] if rng is None else min(rng.randint(1, 20), length - done[i]) for i in taken
        ]
        operators.begin_step(
            [RowSpan(i + 1, done[i], count, done[i] + count) for i, count in zip(taken, counts, strict=True)]
        )
        chunks = [texts[i].rows(done[i], done[i] + count) for i, count in zip(taken, counts, strict=True)]
        rows = [torch.cat(part).to(device) for part in zip(*chunks, strict=True)]
        conv, out = (part.split(counts) for part in _run(operators, texts[0], rows))
        for i, count, *outputs in zip(taken, counts, conv, out, strict=True):
            found[i].append((outputs[0], outputs[1]))
            done[i] += count
    return [(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])) for parts in found]


def served_ahead(
    kind: Callable[[StateSlots], StepOperators], text: Text, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Return the same as `served` for a prompt, then row by row, some of which run before they are committed.
    At a grid point the whole window lies behind the state.
    """
    operators = kind(StateSlots(StateLayout((text.layer,), text.inputs.dtype), 1, CPU))
    count = rng.randint(1, GRID)
    bounds = [0, *range(count, text.length + 1)]
    parts = []
    for start, end in itertools.pairwise(bounds):
        certain = end if start == 0 or rng.random() < 0.3 else start
        operators.begin_step([RowSpan(0, start, end - start, certain)])
        parts.append(_run(operators, text, text.rows(start, end)))
    return torch.cat([conv for conv, _ in parts]), torch.cat([out for _, out in parts])


def _run(operators: StepOperators, text: Text, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    inputs, query, key, value, decay, *beta = rows
    device = inputs.device
    conv = operators.causal_conv(0, inputs, text.weight.to(device), text.bias.to(device))
    if text.layer.value_dim > 1:
        out = operators.linear_attention(0, query, key, value, decay, beta[0] if beta else None)
    else:
        one_head = query[:, 0], key[:, 0], value[..., 0], decay[..., 0]
        out = operators.selective_scan(0, *one_head, text.rates.to(device))
    return conv.cpu(), out.cpu().view(value.shape)


def token_by_token(text: Text) -> tuple[Tensor, Tensor]:
    """Compute by the papers' recurrence in float64."""
    layer = text.layer
    padded = torch.cat([torch.zeros(layer.taps - 1, layer.channels), text.inputs]).double()
    taps = text.weight.double().t()
    conv = torch.stack([(padded[t : t + layer.taps] * taps).sum(0) + text.bias for t in range(text.length)])
    state = torch.zeros(layer.state_shape, dtype=torch.float64)
    group = layer.num_heads // layer.num_key_heads
    rates = text.rates.double() if layer.value_dim == 1 else 1
    out = []
    for t in range(text.length):
        query, key = (rows[t].double().repeat_interleave(group, 0) for rows in (text.query, text.key))
        state = state * (text.decay[t].double() * rates).exp()[..., None]
        delta = text.value[t].double()
        if text.beta is not None:
            delta = text.beta[t].double()[:, None] * (delta - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[..., None] * delta[:, None]
        out.append(torch.einsum("hk,hkv->hv", query, state))
    return conv, torch.stack(out)


def drafted(
    kind: Callable[[StateSlots], StepOperators],
    text: Text,
    whole: tuple[Tensor, Tensor],
    rng: random.Random,
    trees: bool,
    device: torch.device = CPU,
) -> int:
    """Check that the text's rows equal `whole` when drafted as chains or trees, with wrong drafts and another
    sequence's around them. Return how many drafted rows were accepted.
    """
    noise = Text(
        1, "sum" if text.beta is None else "delta", text.inputs.dtype, dict.fromkeys(LAYERS, text.layer)
    )
    state_slots = StateSlots(StateLayout((text.layer,), text.inputs.dtype).with_drafts(40), 2, device)
    operators = kind(state_slots)
    done = num_accepted = 0
    while done < text.length:
        certain = done + rng.randint(1, min(6, text.length - done))
        drafts: list[int | None] = []
        masks, last = [1], 1
        nodes: list[int] = []
        for place in range(certain, min(certain + rng.randint(0, 20), text.length)):
            groups: list[list[int | None]] = [[place], [place, None], [None, place]]
            siblings = rng.choice(groups[: 1 + 2 * trees])
            for sibling in siblings:
                drafts.append(sibling)
                masks.append(last | 1 << len(masks))
                nodes += [len(masks) - 2] if sibling is not None else []
            last = masks[nodes[-1] + 1]
        if not trees:
            drafts += [None] * rng.randint(0, 40 - len(drafts))
        start = certain - 1 if trees else done  # a tree's root is the last committed token
        if trees and start > done:
            operators.begin_step([RowSpan(1, done, start - done, start)])
            _run(operators, text, [rows.to(device) for rows in text.rows(done, start)])
        places = [*range(start, certain), *drafts]
        own = RowSpan(1, start, len(places), certain, masks if trees else None, start)
        operators.begin_step([RowSpan(0, 0, 2, 2), own])
        known = [index for index, place in enumerate(places) if place is not None]
        pairs = zip(noise.rows(0, 2), _rows_at(text, noise, places), strict=True)
        rows = [torch.cat(pair).to(device) for pair in pairs]
        outputs = [part[2:] for part in _run(operators, text, rows)]
        for got, exact in zip(outputs, whole, strict=True):
            assert torch.equal(got[known], exact[[places[index] for index in known]])
        accepted = nodes[: rng.randint(0, len(nodes))]
        state_slots.move(1, certain, accepted)
        num_accepted += len(accepted)
        done = certain + len(accepted)
    return num_accepted


def _rows_at(text: Text, noise: Text, places: list[int | None]) -> list[Tensor]:
    """Return the text's rows at these places, and noise for None."""
    chosen = [
        text.rows(place, place + 1) if place is not None else noise.rows(index, index + 1)
        for index, place in enumerate(places)
    ]
    return [torch.cat(part) for part in zip(*chosen, strict=True)]
