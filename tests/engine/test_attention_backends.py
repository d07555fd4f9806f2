"""Every attention backend against a plain float64 reference, over random packs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.interface import LayerKv
from engine.attention.select import available_backends, select_backend
from tests.engine.attention_packs import Pack, empty_layer, make_pack, run

BACKENDS = available_backends(torch.device("cpu"))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def reference(
    pack: Pack, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row in float64, from the context that the pack was made of."""
    out = torch.zeros((*pack.query.shape[:2], pack.value.shape[2]), dtype=torch.float64)
    group = pack.query.shape[1] // pack.key.shape[1]
    row = 0
    for (query_len, context_len), keys, values in zip(pack.lengths, pack.keys, pack.values, strict=True):
        k = keys.double().repeat_interleave(group, dim=1)
        v = values.double().repeat_interleave(group, dim=1)
        for position in range(context_len - query_len, context_len):
            first = max(0, position - window + 1) if window else 0
            scores = torch.einsum("hd,khd->hk", pack.query[row].double(), k[first : position + 1]) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            weights = scores.softmax(-1)
            if sinks is not None:
                weights = torch.cat([scores, sinks.double()[:, None]], dim=1).softmax(-1)[:, :-1]
            out[row] = torch.einsum("hk,khd->hd", weights, v[first : position + 1])
            row += 1
    return out


def check(
    backend: str,
    pack: Pack,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    scale = pack.query.shape[-1] ** -0.5 * 2
    out = run(backend, pack, scale=scale, window=window, softcap=softcap, sinks=sinks)
    expected = reference(pack, scale, window, softcap, sinks)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 300)]
MIXED = [(1, 40), (5, 33), (64, 64), (33, 200), (1, 1), (17, 17), (3, 90)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_reference(backend: str, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(backend, make_pack(lengths, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (7, 1), (12, 1), (20, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_ratio_of_heads(backend: str, heads: int, kv_heads: int) -> None:
    check(backend, make_pack(MIXED, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 72, 80, 96, 120, 128, 192, 256, 288])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_head_dim(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    check(backend, make_pack([(1, 50), (20, 70)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_block_size(backend: str, block_size: int) -> None:
    check(backend, make_pack(MIXED, block_size=block_size))


@pytest.mark.parametrize("window", [1, 7, 16, 50, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_window_and_soft_cap(backend: str, window: int, softcap: float | None) -> None:
    check(backend, make_pack(MIXED), window, softcap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_soft_cap_alone(backend: str) -> None:
    check(backend, make_pack(MIXED), softcap=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks(backend: str, softcap: float | None, window: int | None, dtype: torch.dtype) -> None:
    """From one without weight to one with nearly all of it, which would overflow as an exponential."""
    sinks = torch.tensor([-torch.inf, -1.0, 3.0, 200.0]).to(dtype)
    check(backend, make_pack([*MIXED, (3, 1100)], dtype=dtype), window, softcap, sinks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_context(backend: str) -> None:
    check(backend, make_pack([(1, 3000), (40, 1500), (2, 2049)], heads=4, kv_heads=2))
    check(backend, make_pack([(1, 3000), (40, 1500)], heads=4, kv_heads=2), window=700)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_any_size(backend: str) -> None:
    """Scores whose exponentials overflow float32 unless the maximum is taken off."""
    pack = make_pack(MIXED)
    pack.query *= 100
    out = run(backend, pack, scale=1.0)
    torch.testing.assert_close(out.double(), reference(pack, 1.0, None, None), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_write_nothing_and_give_zeros(backend: str) -> None:
    plain, padded = make_pack(MIXED), make_pack(MIXED, padding=9)
    before = padded.pool.nan_to_num(9.0)
    out = run(backend, padded)
    assert torch.equal(out[: plain.query.shape[0]], run(backend, plain))
    assert not out[plain.query.shape[0] :].any()
    changed = (padded.pool.nan_to_num(9.0) != before).flatten(4).any(-1)[:, 1, 0].nonzero()
    slots = changed[:, 0] * padded.block_size + changed[:, 1]
    assert set(slots.tolist()) == set(padded.metadata.slot_mapping.tolist()) - {-1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layers_stay_untouched(backend: str) -> None:
    pack = make_pack([(4, 10)])
    before = pack.pool.nan_to_num(9.0)
    run(backend, pack, layer=1)
    after = pack.pool.nan_to_num(9.0)
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_with_shapes_of_their_own(backend: str, dtype: torch.dtype) -> None:
    """Layers of one step that differ in heads and head_dim give the bits that each gives in a pool alone."""
    shapes = [(4, 2, 64), (8, 2, 128), (8, 4, 128), (4, 2, 24), (4, 2, 64)]
    packs = [
        make_pack(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        for heads, kv_heads, head_dim in shapes
    ]
    parts = [pack.pool[:, 1] for pack in packs]
    blocks = torch.cat([part.flatten(1) for part in parts], dim=1)
    places = blocks.split([part[0].numel() for part in parts], dim=1)
    layers = [place.unflatten(1, part.shape[1:]) for place, part in zip(places, parts, strict=True)]
    cls, _ = select_backend(blocks.device, dtype, backend)
    attention = cls([LayerKv.of(layer) for layer in layers])
    attention.begin_step(packs[0].metadata)
    for layer, pack in enumerate(packs):
        alone = run(backend, pack)
        out = attention.forward(
            layer, pack.query, pack.key, pack.value, scale=0.125, sliding_window=None, softcap=None
        )
        assert torch.equal(out, alone)
        assert torch.equal(layers[layer].nan_to_num(9.0), pack.pool[:, 1].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (16, 40), (192, 128), (40, 33)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_another_size_than_keys(
    backend: str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    pack, layer = with_values_of(value_dim, make_pack(MIXED, head_dim=key_dim, dtype=dtype, padding=2))
    sinks, scale = torch.tensor([-1.0, 3.0, 0.5, 1.0]), key_dim**-0.5
    out = attend(backend, pack, layer, scale, sinks)
    expected = reference(pack, scale, 50, None, sinks)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(40, 24), (576, 512)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_lie_in_the_keys(backend: str, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Values that are handed over are not read."""
    keyed = make_pack(MIXED, heads=5, kv_heads=1, head_dim=key_dim, dtype=dtype, padding=2)
    keys, scale = keyed.layers[1].keys, key_dim**-0.5
    unread = torch.full_like(keyed.value[..., :value_dim], torch.nan)
    pack = replace(keyed, values=[each[..., :value_dim] for each in keyed.keys], value=unread)
    out = attend(backend, pack, LayerKv(keys, keys[..., :value_dim]), scale, None)
    expected = reference(pack, scale, 50, None, None)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("quantization", ["int8_row_scales", "fp8_row_scales"])
def test_coded_values_of_another_size_than_keys(quantization: str) -> None:
    """Both backends read the same bytes. Weights and queries of int8 are rounded, too."""
    outs = []
    for backend in BACKENDS:
        keyed = make_pack(MIXED, head_dim=24, quantization=quantization)
        pack, layer = with_values_of(40, keyed)
        outs.append((attend(backend, pack, layer, 0.2, None), layer))
    for out, layer in outs[1:]:
        torch.testing.assert_close(out, outs[0][0], atol=1e-3, rtol=1e-3)
        for ours, theirs in zip(layer, outs[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


def with_values_of(value_dim: int, keyed: Pack) -> tuple[Pack, LayerKv]:
    """The pack with values of another size, and its layer in a pool where these lie behind the keys."""
    padding = len(keyed.query) - sum(q for q, _ in keyed.lengths)
    options = {"dtype": keyed.rows.dtype, "quantization": keyed.rows.quantization, "padding": padding}
    valued = make_pack(keyed.lengths, head_dim=value_dim, **options)  # type: ignore[arg-type]
    sides = keyed.layers[1].sides[0], valued.layers[1].sides[1]
    dims = keyed.key.shape[2], value_dim
    layer = empty_layer(keyed.rows, keyed.key.shape[1], dims, len(keyed.pool), keyed.block_size)
    for there, side in zip(layer.sides, sides, strict=True):
        there.values.copy_(side.values)
        if there.scales is not None and side.scales is not None:
            there.scales.copy_(side.scales)
    return replace(keyed, values=valued.values, value=valued.value), layer


def attend(
    backend: str, pack: Pack, layer: LayerKv, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    cls, _ = select_backend(layer.keys.device, pack.rows.dtype, backend)
    attention = cls([layer], rows=pack.rows)
    attention.begin_step(pack.metadata)
    new = pack.query, pack.key, pack.value
    return attention.forward(0, *new, scale=scale, sliding_window=50, softcap=None, sinks=sinks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend: str) -> None:
    """Rows as a fused projection or a transposed rotary embedding leave them."""
    plain, strided = make_pack(MIXED), make_pack(MIXED)
    heads, kv_heads = plain.query.shape[1], plain.key.shape[1]
    fused = torch.cat([strided.query, strided.key, strided.value], dim=1)
    strided.query = fused[:, :heads]
    strided.key = fused[:, heads : heads + kv_heads].transpose(0, 1).contiguous().transpose(0, 1)
    strided.value = fused[:, heads + kv_heads :]
    assert torch.equal(run(backend, strided), run(backend, plain))


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_dimension_that_is_not_contiguous(backend: str) -> None:
    plain, strided = make_pack(MIXED), make_pack(MIXED)
    strided.query = strided.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strided.value = strided.value.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch.testing.assert_close(run(backend, strided), run(backend, plain))
