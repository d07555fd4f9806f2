"""Triton kernels that find where drafts stop, and the tokens after them, like `rejection.py`.

Each program that needs a sequence's stop computes it again: that takes a few numbers per node.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.noise import Purpose
from engine.sampler.triton_kernel.noise import (
    ROUNDING,
    about_gumbel,
    gumbel,
    noise_bits,
    stream_key,
    uniform,
)
from engine.sampler.triton_kernel.settle import share_of
from speculation.verification.rows import RULES

OWN, STANDARD, BLOCK = map(tl.constexpr, RULES)
SPAN_FIELDS = tl.constexpr(7)
NODE_FIELDS = tl.constexpr(2)
_ACCEPTANCE, _RECOVERY = tl.constexpr(int(Purpose.ACCEPTANCE)), tl.constexpr(int(Purpose.RECOVERY))
_SLACK = tl.constexpr(1e-3)
"""The most that rounding can add to a probability."""
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _round_key(seed, start, position, PURPOSE: tl.constexpr):
    """Return the keys of `engine.sampler.noise.round_keys`."""
    purposes = stream_key(seed, tl.full([], -1 - PURPOSE, tl.int64)).to(tl.int64, bitcast=True)
    return stream_key(stream_key(purposes, start).to(tl.int64, bitcast=True), position)


@triton.jit
def _read_span(spans, sequence):
    """Return first row, first node, number of nodes, seed, position, rule, address of distributions or 0."""
    spans += sequence * SPAN_FIELDS
    return (
        tl.load(spans),
        tl.load(spans + 1),
        tl.load(spans + 2),
        tl.load(spans + 3),
        tl.load(spans + 4),
        tl.load(spans + 5),
        tl.load(spans + 6),
    )


@triton.jit
def _odds(node, token, row, drawn, target, SIZE: tl.constexpr):
    """Return the probability that the target gives a node's token, and the one that it was drawn with."""
    p = share_of(target, row, token, True).to(tl.float64)
    at = drawn.to(tl.pointer_type(tl.float32)) + node * SIZE + token
    q = tl.load(at, mask=drawn != 0, other=1.0)
    return p, tl.maximum(q, _TINY).to(tl.float64)


@triton.jit
def _walk(spans, nodes, target, sequence, SIZE: tl.constexpr):
    """Walk like `rejection._walk`, or while nodes are the target's own tokens. Return bits of the accepted
    nodes, the last of them (-1: none), their number, and bits of the rejected nodes before and after it.
    """
    first_row, first_node, count, seed, position, rule, drawn = _read_span(spans, sequence)
    accepted, rejected = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    last, depth, mass = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64), tl.full([], 1.0, tl.float64)
    for node in range(count):
        token = tl.load(nodes + (first_node + node) * NODE_FIELDS)
        parent = tl.load(nodes + (first_node + node) * NODE_FIELDS + 1)
        row = first_row + 1 + last
        own = tl.load(target[0] + row)
        p, q = _odds(node, token, row, drawn, target, SIZE)
        key = _round_key(seed, position, position + depth, _ACCEPTANCE)
        by_chance = uniform(noise_bits(key, token)) * q * mass < p
        is_next = (parent == last) & (own >= 0)
        wins = is_next & tl.where(rule == OWN, own == token, by_chance)
        loses = is_next & (wins == 0)
        bit = tl.full([], 1, tl.int64) << node
        accepted = tl.where(wins, accepted | bit, accepted)
        rejected = tl.where(loses, rejected | bit, rejected)
        mass = tl.where(wins, 1.0, tl.where(loses & (drawn == 0), mass - p, mass))
        last = tl.where(wins, node, last)
        depth += wins.to(tl.int64)
    return accepted, last, depth, rejected


@triton.jit
def _share_before(spans, nodes, target, sequence, end, SIZE: tl.constexpr):
    """Return the share of `rejection._shares` after the first `end` tokens."""
    first_row, first_node, _, _, _, _, drawn = _read_span(spans, sequence)
    share = tl.full([], 1.0, tl.float64)
    for node in range(end):
        token = tl.load(nodes + (first_node + node) * NODE_FIELDS)
        p, q = _odds(node, token, first_row + node, drawn, target, SIZE)
        share = tl.minimum(share * p / q, 1.0)
    return share


@triton.jit
def _excess(masses, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    tiles = tl.arange(0, PADDED)
    return tl.sum(tl.load(masses + row * TILES + tiles, mask=tiles < TILES, other=0.0), 0)


@triton.jit
def _judge_block(
    spans,
    nodes,
    target,
    masses,
    sequence,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Judge a block like `rejection._stops_of_blocks`, with the results of `_judge`; failed rows end it."""
    first_row, first_node, count, seed, position, _, drawn = _read_span(spans, sequence)
    share, kept = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    length = tl.full([], 0, tl.int64)
    for node in range(count):
        token = tl.load(nodes + (first_node + node) * NODE_FIELDS)
        p, q = _odds(node, token, first_row + node, drawn, target, SIZE)
        share = tl.minimum(share * p / q, 1.0)
        chance = share
        if node + 1 < count:
            following = tl.load(nodes + (first_node + node + 1) * NODE_FIELDS)
            mass = share * (1.0 - share_of(target, first_row + node + 1, following, True).to(tl.float64))
            if drawn != 0:
                mass = _excess(masses, first_row + node + 1, TILES, PADDED).to(tl.float64)
            chance = tl.where(mass > 0, mass / (mass + 1.0 - share), 0.0)
        key = _round_key(seed, position, position + node, _ACCEPTANCE)
        keeps = uniform(noise_bits(key, token)) < chance
        length = tl.where(keeps, node + 1, length)
        kept = tl.where(keeps, share, kept)
    one = tl.full([], 1, tl.int64)
    rejected = tl.where(length < count, one << length, 0)
    return (one << length) - 1, length - 1, length, rejected, kept


@triton.jit
def _judge(
    spans,
    nodes,
    target,
    masses,
    sequence,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return the results of `_walk`, and the share of the target's distribution left at the end."""
    accepted, last, depth, rejected = _walk(spans, nodes, target, sequence, SIZE)
    share = tl.full([], 1.0, tl.float64)
    if masses is not None:
        _, _, _, _, _, rule, _ = _read_span(spans, sequence)
        if rule == BLOCK:
            accepted, last, depth, rejected, share = _judge_block(
                spans, nodes, target, masses, sequence, SIZE, TILES, PADDED
            )
    return accepted, last, depth, rejected, share


@triton.jit
def _best(weights, tokens, bits, SIZE: tl.constexpr):
    """Return the greatest logarithm + noise, and the first token that has it. Exact noise is slow on many
    devices, so it is computed only for the tokens that may have the greatest, usually one.
    """
    scores = tl.where(weights > 0, tl.log(weights) + about_gumbel(bits), float("-inf"))
    races = (weights > 0) & (scores >= tl.max(scores, 0) - 3 * ROUNDING)
    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], SIZE, tl.int32)
    token = tl.min(tl.where(races, tokens, SIZE), 0)
    while token < SIZE:
        weight = tl.sum(tl.where(tokens == token, weights, 0.0), 0)
        score = tl.log(weight) + gumbel(tl.sum(tl.where(tokens == token, bits, 0), 0))
        winner = tl.where(score > best, token, winner)
        best = tl.maximum(score, best)
        token = tl.min(tl.where(races & (tokens > token), tokens, SIZE), 0)
    return best, winner


@triton.jit
def _residual(spans, nodes, target, sequence, last, rejected, share, tokens, inside, SIZE: tl.constexpr):
    """Return the target's probabilities of a tile's tokens after a node, and what rejections leave."""
    first_row, first_node, count, _, _, _, drawn = _read_span(spans, sequence)
    probabilities = tl.where(inside, share_of(target, first_row + 1 + last, tokens, inside), 0.0)
    left = probabilities * share.to(tl.float32)
    for node in range(last + 1, count):
        if (rejected >> node) & 1 != 0:
            if drawn != 0:
                at = drawn.to(tl.pointer_type(tl.float32)) + node * SIZE + tokens
                left = tl.maximum(left - tl.load(at, mask=inside, other=0.0), 0.0)
            else:
                token = tl.load(nodes + (first_node + node) * NODE_FIELDS)
                left = tl.where(tokens == token, 0.0, left)
    return probabilities, left


@triton.jit
def _stop_of_block(spans, nodes, target, sequence, length, SIZE: tl.constexpr):
    """Return the outcome of a chain that stops after `length` nodes: the results of `_judge` except the
    accepted nodes, and whether it may stop there, which also depends on other tiles.
    """
    _, first_node, count, seed, position, _, _ = _read_span(spans, sequence)
    share = _share_before(spans, nodes, target, sequence, length, SIZE)
    may_stop = length == 0
    if length > 0:
        token = tl.load(nodes + (first_node + length - 1) * NODE_FIELDS)
        key = _round_key(seed, position, position + length - 1, _ACCEPTANCE)
        may_stop = uniform(noise_bits(key, token)) < share + _SLACK  # the exact chance is no greater
    rejected = tl.where(length < count, tl.full([], 1, tl.int64) << length, 0)
    return length - 1, length, rejected, share, may_stop


@triton.jit
def _winner(scores, tokens_of, place, TILES: tl.constexpr, PADDED: tl.constexpr):
    tiles = tl.arange(0, PADDED)
    of_tiles = tl.load(scores + place + tiles, mask=tiles < TILES, other=float("-inf"))
    best = tl.max(of_tiles, 0)
    wins = (tiles < TILES) & (of_tiles == best)
    tokens = tl.load(tokens_of + place + tiles, mask=wins, other=9223372036854775807)
    return best, tl.min(tokens, 0)


@triton.jit
def _conclude(
    spans,
    nodes,
    target,
    masses,
    scores,
    tokens_of,
    out,
    sequence,
    num_sequences,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
):
    first_row, _, _, _, _, rule, _ = _read_span(spans, sequence)
    accepted, last, _, _, _ = _judge(spans, nodes, target, masses, sequence, SIZE, TILES, PADDED)
    row = first_row + 1 + last
    token = tl.load(target[0] + row)
    if (rule != OWN) & (token >= 0):
        place = row * 2 * TILES
        best, token = _winner(scores, tokens_of, place, TILES, PADDED)
        if best == float("-inf"):  # rounding may leave nothing
            best, token = _winner(scores, tokens_of, place + TILES, TILES, PADDED)
    tl.store(out + sequence, accepted)
    tl.store(out + num_sequences + sequence, token)


@triton.jit(do_not_specialize=["num_sequences"])
def recover(
    spans,
    nodes,
    chosen,
    logits,
    numbers,
    scales,
    arrivals,
    masses,
    scores,
    tokens_of,
    out,
    stride,
    num_sequences,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (tiles, sequences, lengths). Draw the token after the last accepted node from what rejected nodes
    leave of the target's distribution, and, since that may be nothing, from all of it: write the tile's best
    to `scores` and `tokens_of` [rows, 2, TILES]. A block's stop depends on all tiles, so draw for each length
    that it may have, and write the target's excess over the nodes' distributions to `masses` [rows, TILES].

    A sequence's last program concludes: it writes bits of the accepted nodes, and the token after them, -1 if
    none has a finite score, to `out` [2, sequences].
    """
    tile, sequence, length = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    target = (chosen, logits, numbers, scales, stride)
    first_row, _, count, seed, position, rule, _ = _read_span(spans, sequence)
    lengths = tl.where(rule == BLOCK, count + 1, 1)
    if length >= lengths:
        return
    if rule != OWN:
        may_stop = True
        if masses is None:
            _, last, depth, rejected, share = _judge(
                spans, nodes, target, masses, sequence, SIZE, TILES, PADDED
            )
        elif rule == BLOCK:
            last, depth, rejected, share, may_stop = _stop_of_block(
                spans, nodes, target, sequence, length, SIZE
            )
        else:
            _, last, depth, rejected = _walk(spans, nodes, target, sequence, SIZE)
            share = tl.full([], 1.0, tl.float64)
        tokens = tile * TILE + tl.arange(0, TILE)
        probabilities, left = _residual(
            spans, nodes, target, sequence, last, rejected, share, tokens, tokens < SIZE, SIZE
        )
        row = first_row + 1 + last
        if masses is not None:
            tl.store(masses + row * TILES + tile, tl.sum(left, 0))
        if may_stop:
            key = _round_key(seed, position, position + depth, _RECOVERY)
            bits = noise_bits(key, tokens)
            place = row * 2 * TILES + tile
            score, token = _best(left, tokens, bits, SIZE)
            tl.store(scores + place, score)
            tl.store(tokens_of + place, token.to(tl.int64))
            score, token = _best(probabilities, tokens, bits, SIZE)
            tl.store(scores + place + TILES, score)
            tl.store(tokens_of + place + TILES, token.to(tl.int64))
    tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
    if tl.atomic_add(arrivals + first_row, 1) == lengths * TILES - 1:
        _conclude(
            spans,
            nodes,
            target,
            masses,
            scores,
            tokens_of,
            out,
            sequence,
            num_sequences,
            SIZE,
            TILES,
            PADDED,
        )
        tl.store(arrivals + first_row, 0)
