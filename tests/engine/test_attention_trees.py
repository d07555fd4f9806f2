"""Trees of query rows, and first keys: against a float64 reference, and the CPU kernel's bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention.select import available_backends
from tests.engine.attention_packs import Pack, describe, make_pack, run

BACKENDS = available_backends(torch.device("cpu"))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Masks = list[int]

needs_kernel = pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernel needs a C++ compiler")

# Chunks, chains, decode rows and trees ("t"): within a tile, over two, over two splits, and from key 0 on.
CHAINS = [(80, 200), (5, 33), (1, 40), (70, 70)]
TREES = [(24, 300), (64, 130), (40, 530), (10, 10), (2, 700), (1, 65)]
LENGTHS = [pair for both in zip(CHAINS, TREES, strict=False) for pair in both] + TREES[len(CHAINS) :]


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tree_masks(num_rows: int, seed: int) -> Masks:
    """A random tree: each row sees its parent's rows and itself."""
    rng = random.Random(seed)
    masks = [1]
    for row in range(1, num_rows):
        masks.append(masks[rng.randrange(max(0, row - 9), row)] | 1 << row)
    return masks


def chain_masks(num_rows: int) -> Masks:
    return [(2 << row) - 1 for row in range(num_rows)]


def with_masks(pack: Pack, masks: list[Masks | None], earlier: int = 0) -> Pack:
    """`masks` are those of the query rows; the trees begin `earlier` keys before these."""
    flat: Masks = []
    for (query_len, _), of_sequence in zip(pack.lengths, masks, strict=True):
        flat += of_sequence or [0] * query_len
    flat += [0] * (len(pack.metadata.slot_mapping) - len(flat))
    visible = torch.tensor([mask - (mask >> 63 << 64) for mask in flat], dtype=torch.int64)
    starts = [
        -1 if of_sequence is None else context_len - query_len - earlier
        for (query_len, context_len), of_sequence in zip(pack.lengths, masks, strict=True)
    ]
    tree_start = torch.tensor(starts, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, visible=visible, tree_start=tree_start))


def with_first_keys(pack: Pack, first_keys: list[int]) -> Pack:
    first_key = torch.tensor(first_keys, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, first_key=first_key))


def rows_of(pack: Pack, first: int, last: int) -> Pack:
    """These query rows of a pack of one sequence, as a chain after the keys before them."""
    (query_len, context_len), table = pack.lengths[0], pack.metadata.block_table
    lengths, rows = [(last - first, context_len - query_len + last)], slice(first, last)
    return replace(
        pack,
        lengths=lengths,
        metadata=describe(lengths, table, pack.metadata.slot_mapping[rows]),
        query=pack.query[rows],
        key=pack.key[rows],
        value=pack.value[rows],
    )


def chain_of(pack: Pack, places: list[int], query_len: int) -> Pack:
    """A chain of these keys of a pack of one sequence, the last of them with their queries."""
    (full_query_len, context_len), key, value = pack.lengths[0], pack.keys[0][places], pack.values[0][places]
    base = context_len - full_query_len
    rows_kept = pack.rows
    chain = make_pack([(query_len, len(places))], dtype=rows_kept.dtype, quantization=rows_kept.quantization)
    rows = [place - base for place in places[-query_len:]]
    slots = torch.arange(len(places) - query_len)
    blocks = chain.metadata.block_table[0, slots // chain.block_size].long()
    past = blocks * chain.block_size + slots % chain.block_size
    chain.put(past, key[:-query_len], value[:-query_len])
    return replace(chain, query=pack.query[rows], key=key[-query_len:], value=value[-query_len:])


def mixed_masks(lengths: list[tuple[int, int]]) -> list[Masks | None]:
    return [None if pair in CHAINS else tree_masks(pair[0], seed) for seed, pair in enumerate(lengths)]


def reference(
    pack: Pack,
    masks: list[Masks | None],
    scale: float,
    window: int | None,
    softcap: float | None,
    first_keys: list[int] | None = None,
) -> Tensor:
    """Row by row over all keys of its sequence, in float64."""
    out = torch.zeros(pack.query.shape, dtype=torch.float64)
    group = pack.query.shape[1] // pack.key.shape[1]
    first_keys = first_keys or [0] * len(masks)
    row = 0
    for s, (query_len, context_len) in enumerate(pack.lengths):
        base = context_len - query_len
        rows = masks[s] or chain_masks(query_len)
        places = [*range(base), *(base + mask.bit_count() - 1 for mask in rows)]
        k = pack.keys[s].double().repeat_interleave(group, dim=1)
        v = pack.values[s].double().repeat_interleave(group, dim=1)
        for mask in rows:
            own = base + mask.bit_count() - 1
            seen = [*range(base), *(base + i for i in range(query_len) if mask >> i & 1)]
            seen = [
                key for key in seen if key >= first_keys[s] and (not window or places[key] > own - window)
            ]
            scores = torch.einsum("hd,khd->hk", pack.query[row].double(), k[seen]) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
            row += 1
    return out


def check(
    backend: str,
    pack: Pack,
    masks: list[Masks | None],
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    scale = pack.query.shape[-1] ** -0.5 * 2
    out = run(backend, with_masks(pack, masks), scale=scale, window=window, softcap=softcap)
    expected = reference(pack, masks, scale, window, softcap)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_beside_chunks_chains_and_decode_rows(backend: str, dtype: torch.dtype) -> None:
    check(backend, make_pack(LENGTHS, dtype=dtype), mixed_masks(LENGTHS))


@pytest.mark.parametrize("window", [1, 3, 7, 50, 600])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_go_by_depth(backend: str, window: int, softcap: float | None) -> None:
    check(backend, make_pack(LENGTHS), mixed_masks(LENGTHS), window, softcap)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (7, 1), (20, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_ratio_of_heads(backend: str, heads: int, kv_heads: int) -> None:
    check(backend, make_pack(LENGTHS, heads=heads, kv_heads=kv_heads), mixed_masks(LENGTHS))


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_block_size(backend: str, block_size: int) -> None:
    check(backend, make_pack(LENGTHS, block_size=block_size, head_dim=40), mixed_masks(LENGTHS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_that_no_tree_has(backend: str) -> None:
    rng = random.Random(0)
    masks = [rng.getrandbits(row) | 1 << row for row in range(64)]
    check(backend, make_pack([(64, 200)]), [masks])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (9, 4.0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_that_grows_by_a_few_rows_or_one_at_a_time(
    backend: str, window: int | None, softcap: float | None
) -> None:
    """The last rows alone, over the keys that an earlier forward left, give what they give among all."""
    masks = tree_masks(40, 1)
    pack = with_masks(make_pack([(40, 530)]), [masks])
    whole = run(backend, pack, window=window, softcap=softcap)
    for first in (33, 39):
        last = with_masks(rows_of(pack, first, 40), [masks[first:]], earlier=first)
        torch.testing.assert_close(run(backend, last, window=window, softcap=softcap), whole[first:])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 4.0)])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_sees_keys_before_the_first(
    backend: str, trees: bool, window: int | None, softcap: float | None
) -> None:
    lengths = [(1, 40), (1, 700), (5, 33), (24, 300), (30, 1300), (80, 81), (3, 90), (7, 7)]
    first_keys = [1, 600, 28, 1, 1270, 1, 0, 0]
    masks = [tree_masks(q, q) if trees and q < 64 else None for q, _ in lengths]
    pack = make_pack(lengths)
    given = with_first_keys(with_masks(pack, masks) if trees else pack, first_keys)
    out = run(backend, given, window=window, softcap=softcap)
    expected = reference(pack, masks, 0.125, window, softcap, first_keys)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_beside_trees(backend: str) -> None:
    masks = mixed_masks(LENGTHS)
    plain, padded = make_pack(LENGTHS), make_pack(LENGTHS, padding=3)
    out = run(backend, with_masks(padded, masks))
    assert torch.equal(out[:-3], run(backend, with_masks(plain, masks)))
    assert not out[-3:].any()


# --- the CPU kernel's bits ------------------------------------------------------------------------------

SETTINGS = [(None, None), (5, None), (100, 4.0)]
DTYPES = [torch.float32, torch.bfloat16]


@needs_kernel
@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_written_as_masks(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    lengths = [(1, 40), (5, 33), (64, 64), (40, 530), (2, 1300), (80, 200)]
    masks = [chain_masks(q) if q <= 64 else None for q, _ in lengths]
    plain = run("cpu", make_pack(lengths, dtype=dtype), window=window, softcap=softcap)
    written = run("cpu", with_masks(make_pack(lengths, dtype=dtype), masks), window=window, softcap=softcap)
    assert torch.equal(plain, written)


@needs_kernel
@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_row_does_not_see_adds_nothing(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Eight rows of a chain, and the same in a tree whose others fill two more tiles and a split."""
    masks = chain_masks(8) + [1 | 1 << row for row in range(8, 60)]
    tree = with_masks(make_pack([(60, 558)], dtype=dtype), [masks])
    among = run("cpu", tree, window=window, softcap=softcap)
    chain = rows_of(tree, 0, 8)
    alone = run("cpu", chain, window=window, softcap=softcap)
    assert torch.equal(among[:8], alone)


@needs_kernel
@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", [0, 1, 30, 63, 64, 100, 470, 511])
def test_a_path_has_the_bits_of_a_chain(
    base: int, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Wherever its keys lie, in the next tile and the next split too."""
    masks = tree_masks(60, base)
    tree = with_masks(make_pack([(60, base + 60)], dtype=dtype), [masks])
    out = run("cpu", tree, window=window, softcap=softcap)
    for row in range(0, 60, 7):
        path = [base + place for place in range(60) if masks[row] >> place & 1]
        chain = chain_of(tree, [*range(base), *path], len(path))
        assert torch.equal(run("cpu", chain, window=window, softcap=softcap)[-1], out[row]), row


@needs_kernel
@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alone_in_a_crowd_and_on_any_number_of_threads(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    masks = mixed_masks(LENGTHS)
    together = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        pack = with_masks(make_pack(LENGTHS, dtype=dtype), masks)
        together.append(run("cpu", pack, window=window, softcap=softcap))
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    row = 0
    for s, lengths in enumerate(LENGTHS):
        pack = with_masks(make_pack([lengths], dtype=dtype, first_seed=s), [masks[s]])
        alone = run("cpu", pack, window=window, softcap=softcap)
        assert torch.equal(together[0][row : row + lengths[0]], alone), lengths
        row += lengths[0]


@needs_kernel
@pytest.mark.parametrize(
    "masks",
    [
        pytest.param([1, 1, 5], id="a row that does not see itself"),
        pytest.param([3, 3, 7], id="a row that sees a later one"),
        pytest.param([1, 0, 5], id="a row that sees nothing"),
        pytest.param([*chain_masks(64), 1], id="too many rows"),
    ],
)
def test_masks_out_of_range_are_refused(masks: Masks) -> None:
    pack = with_masks(make_pack([(len(masks), 90)]), [masks])
    with pytest.raises(ValueError, match="visible is out of range"):
        run("cpu", pack)


@needs_kernel
@pytest.mark.parametrize("first_key", [-1, 88])
def test_first_keys_out_of_range_are_refused(first_key: int) -> None:
    with pytest.raises(ValueError, match="first_key is out of range"):
        run("cpu", with_first_keys(make_pack([(3, 90)]), [first_key]))


@needs_kernel
@pytest.mark.parametrize("earlier", [-1, 62])
def test_trees_that_start_elsewhere_are_refused(earlier: int) -> None:
    """After the first query row, or more than 64 keys before the last."""
    with pytest.raises(ValueError, match="is out of range"):
        run("cpu", with_masks(make_pack([(3, 90)]), [[1 << 62, 1 << 63, 1 << 63]], earlier))
