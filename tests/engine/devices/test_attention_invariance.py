"""A row's bits depend only on what it sees, not on the rest of the pack, threads, chunks or its tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.devices.attention import backend_fault
from engine.kv.row_codes import CODE_DTYPES
from tests.engine.attention_packs import (
    CHAINS_AND_TREES,
    Masks,
    chain_masks,
    make_pack,
    part_of,
    run,
    tree_masks,
    with_first_keys,
    with_masks,
)
from tests.engine.interpreted.cases import Step, put_rows

pytestmark = pytest.mark.skipif(
    backend_fault("cpu", torch.device("cpu")) is not None, reason="the CPU kernel needs a C++ compiler"
)
CROWD = [(1, 1300), (1, 40), (9, 700), (80, 600), (64, 64), (1, 513), (5, 512), (1, 2)]
SINKS = torch.tensor([0.5, -3.0, 4.0, 0.0])
BF16 = torch.bfloat16
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "float32 in a window": ({}, {"window": 100}),
    "float32 in a large window": ({"heads": 5, "kv_heads": 1}, {"window": 700, "softcap": 4.0}),
    "float32, a key head each": ({"heads": 3, "kv_heads": 3}, {"window": 5}),
    "float32 with sinks": ({}, {"sinks": SINKS}),
    "bfloat16": ({"dtype": BF16}, {}),
    "bfloat16 in a window": ({"dtype": BF16, "heads": 5, "kv_heads": 1}, {"window": 100, "softcap": 4.0}),
    "bfloat16 in a small window": ({"dtype": BF16}, {"window": 5}),
    "bfloat16, a key head each": ({"dtype": BF16, "heads": 3, "kv_heads": 3}, {"window": 700}),
    "bfloat16 in blocks of 8": ({"dtype": BF16, "block_size": 8}, {}),
    "bfloat16 in blocks of 48": ({"dtype": BF16, "block_size": 48, "head_dim": 96}, {"window": 100}),
    "int8 with sinks": ({"quantization": "int8_row_scales"}, {"sinks": SINKS}),
    **{
        f"{name} of {dtype}": ({"dtype": dtype, "quantization": name, **shape}, {"window": 700})
        for name in CODE_DTYPES
        for dtype, shape in (
            (torch.float32, {"heads": 7, "kv_heads": 1}),
            (torch.float32, {"heads": 6, "head_dim": 128}),
            (BF16, {"heads": 7, "kv_heads": 1}),
            (BF16, {"heads": 6, "head_dim": 128}),
        )
    },
}
"""The options of packs, and of attention."""
variants = pytest.mark.parametrize(("options", "attention"), VARIANTS.values(), ids=VARIANTS)


@variants
@pytest.mark.parametrize("trees", [False, True])
def test_rows_are_the_same_alone_in_a_batch_and_on_any_number_of_threads(
    trees: bool, options: dict[str, Any], attention: dict[str, Any], threads_restored: None
) -> None:
    lengths = CHAINS_AND_TREES if trees else CROWD

    def out(sequences: slice) -> Tensor:
        pack = make_pack(lengths[sequences], first_seed=sequences.start, trees=trees, **options)
        return run("cpu", pack, **attention)

    together = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        together.append(out(slice(0, len(lengths))))
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    row = 0
    for s, (query_len, _) in enumerate(lengths):
        assert torch.equal(together[0][row : row + query_len], out(slice(s, s + 1))), lengths[s]
        row += query_len


@variants
def test_prefill_is_the_same_whole_in_chunks_or_row_by_row(
    options: dict[str, Any], attention: dict[str, Any]
) -> None:
    """The pool's bytes are the same, too. Steps of few rows read codes in place, steps of many read packed
    ones.
    """
    whole = make_pack([(600, 600)], **options)
    expected = run("cpu", whole, **attention)
    for size in (1, 16, 100):
        chunked = make_pack([(600, 600)], **options)
        parts = [
            run("cpu", rows_of(chunked, at, min(at + size, 600)), **attention) for at in range(0, 600, size)
        ]
        assert torch.equal(torch.cat(parts), expected)
        for own, expected_side in zip(chunked.layer, whole.layer, strict=True):
            torch.testing.assert_close(own, expected_side, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("variant", ["bfloat16 in a window", "float32 in a window"])
def test_a_long_prompt_is_the_same_whole_or_in_chunks(variant: str, threads_restored: None) -> None:
    """On one thread, a task gets as many rows as a task may have."""
    options, attention = VARIANTS[variant]
    torch.set_num_threads(1)
    whole = make_pack([(1100, 1300)], **options)
    parts = [run("cpu", rows_of(whole, at, min(at + 70, 1100)), **attention) for at in range(0, 1100, 70)]
    assert torch.equal(run("cpu", whole, **attention), torch.cat(parts))


def rows_of(pack: Step, first: int, last: int) -> Step:
    """Return these query rows of a pack of one sequence, as a chain after the keys before them."""
    before = int(pack.metadata.context_len) - int(pack.metadata.query_start[-1])
    return part_of(pack, slice(first, last), before + last)


@variants
def test_a_chain_written_as_masks_is_the_same(options: dict[str, Any], attention: dict[str, Any]) -> None:
    lengths = [(1, 40), (5, 33), (64, 64), (40, 530), (2, 1300), (80, 200)]
    masks = [chain_masks(q) if q <= 64 else None for q, _ in lengths]
    plain = run("cpu", make_pack(lengths, **options), **attention)
    assert torch.equal(run("cpu", with_masks(make_pack(lengths, **options), masks), **attention), plain)


BASES = [0, 1, 30, 63, 64, 100, 470, 511]
PATHS = [(base, name) for i, base in enumerate(BASES) for name in [*VARIANTS][i % 3 :: 3]]


@pytest.mark.parametrize(("base", "variant"), PATHS)
def test_a_path_has_the_bits_of_a_chain(base: int, variant: str) -> None:
    """Wherever its keys are, even in the next tile or split. Each base has a third of the variants."""
    options, attention = VARIANTS[variant]
    masks = tree_masks(60, base)
    tree = with_masks(make_pack([(60, base + 60)], **options), [masks])
    out = run("cpu", tree, **attention)
    for row in range(0, 60, 7):
        path = [base + place for place in range(60) if masks[row] >> place & 1]
        chain = chain_of(tree, [*range(base), *path], len(path), options)
        assert torch.equal(run("cpu", chain, **attention)[-1], out[row]), row


def chain_of(pack: Step, places: list[int], query_len: int, options: dict[str, Any]) -> Step:
    """Return a chain of these keys of a pack of one sequence, the last ones with their queries."""
    (whole,), size = pack.case.sequences, pack.case.shape.block_size
    chain = make_pack([(query_len, len(places))], **options)
    query, key, value = (each[places] for each in whole.numbers(pack.case.shape))
    slots = torch.arange(len(places) - query_len)
    slots = chain.metadata.block_table[0, slots // size].long() * size + slots % size
    put_rows(chain.layer, chain.rows, slots, key[:-query_len], value[:-query_len])
    return replace(chain, new=tuple(each[-query_len:] for each in (query, key, value)))


@pytest.mark.parametrize(
    ("masks", "earlier"),
    [
        pytest.param([1, 1, 5], 0, id="a row that does not see itself"),
        pytest.param([3, 3, 7], 0, id="a row that sees a later one"),
        pytest.param([1, 0, 5], 0, id="a row that sees nothing"),
        pytest.param([*chain_masks(64), 1], 0, id="too many rows"),
        pytest.param([1 << 62, 1 << 63, 1 << 63], -1, id="a start after the first query row"),
        pytest.param([1 << 62, 1 << 63, 1 << 63], 62, id="a start more than 64 keys before the last"),
    ],
)
def test_masks_out_of_range_are_refused(masks: Masks, earlier: int) -> None:
    field = "" if earlier else "visible "
    with pytest.raises(ValueError, match=f"{field}is out of range"):
        run("cpu", with_masks(make_pack([(len(masks), 90)]), [masks], earlier))


@pytest.mark.parametrize("first_key", [-1, 88])
def test_first_keys_out_of_range_are_refused(first_key: int) -> None:
    with pytest.raises(ValueError, match="first_key is out of range"):
        run("cpu", with_first_keys(make_pack([(3, 90)]), [first_key]))
