"""The shapes to which steps of decode rows and of drafts to verify are padded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from engine.batch.step_inputs import SequenceRows, StepShape, are_chains
from engine.devices.cuda.attention import tiles
from engine.triton_support import ceil_div, power_of_two
from protocol.config import ServeConfig

MOST_ROWS = 512
"""The most rows of a bucket: a larger step keeps the device busy for longer than its launches take."""

_POWERS_UP_TO = 16
_EAGER_ROWS = (2, 128, MOST_ROWS + 1)
"""Fewer rows than a tile has, more, and as many as take large tiles of experts."""


@dataclass(frozen=True)
class Buckets:
    """The buckets by number of sequences, rows of each, and blocks of keys, all ascending. A step takes the
    smallest bucket that it fits.
    """

    sequences: Sequence[int]
    rows_each: Sequence[int]
    blocks: Sequence[int]
    trees: bool
    """Whether several rows of a sequence may form a tree."""
    first_keys: bool = False
    """Whether a sequence's first keys may be hidden from its rows."""
    adapters: bool = False
    """Whether each shape has two buckets, with and without adapters."""
    drafts: bool = False
    """Whether a sequence's only row may be a draft token."""

    @classmethod
    def of(cls, config: ServeConfig, max_model_len: int, adapters: bool = False) -> Buckets:
        drafted, trees = _drafted(config)
        return cls._for(config, max_model_len, [1 + count for count in drafted], trees, adapters=adapters)

    @classmethod
    def of_drafts(cls, config: ServeConfig, max_model_len: int) -> Buckets:
        """Return buckets for a draft model, to which one or two of the verified tokens are new."""
        return cls._for(config, max_model_len, [1, 2], drafts=True)

    @classmethod
    def of_heads(cls, config: ServeConfig, max_model_len: int) -> Buckets:
        """Return buckets for a draft head, which reads the verified tokens except the text's first."""
        rows_each = [1 + count for count in _drafted(config)[0]]
        return cls._for(config, max_model_len, rows_each, first_keys=True)

    @classmethod
    def _for(
        cls, config: ServeConfig, longest: int, rows_each: list[int], trees: bool = False, **kinds: bool
    ) -> Buckets:
        sequences = _sequences(min(config.max_num_seqs, MOST_ROWS))
        return cls(sequences, rows_each, _blocks(longest, config.block_size), trees, **kinds)

    def __iter__(self) -> Iterator[StepShape]:
        """Yield the shapes, the largest first."""
        for blocks in reversed(self.blocks):
            for rows_each in reversed(self.rows_each):
                for sequences in reversed(self.sequences):
                    if sequences * rows_each <= MOST_ROWS:
                        for adapters in (True, False) if self.adapters else (False,):
                            yield self._shape(sequences, rows_each, blocks, adapters)

    def eager_forms(self) -> Iterator[StepShape]:
        """Yield steps that launch each kernel in all forms that eager steps take: few and many rows, few and
        many keys, with and without optional inputs, and chunks beside few and many sequences.
        """
        trees_or_not, first_or_not = {False, self.trees}, {False, self.first_keys}
        for rows, blocks, trees, first_keys, adapters in product(
            _EAGER_ROWS,
            {self.blocks[0], self.blocks[-1]},
            trees_or_not,
            first_or_not,
            {False, self.adapters},
        ):
            yield StepShape(rows, rows, 1, rows, blocks, trees, first_keys, adapters)
        counts, chunk = {*map(power_of_two, self.sequences)}, tiles.CHUNK
        for sequences, trees, first_keys in product(counts, trees_or_not, first_or_not):
            yield StepShape(sequences + chunk, 1, sequences, chunk, self.blocks[0], trees, first_keys)
        for rows_each in {1, self.rows_each[-1]}:  # the most partial results: memory may lack room for them
            yield self._shape(self.sequences[-1], rows_each, self.blocks[-1], False)

    def shape_of(self, batch: Sequence[SequenceRows], num_logits: int, block_size: int) -> StepShape | None:
        """Return the smallest bucket that the step fits, or None."""
        if not self.first_keys and any(rows.first_key for rows in batch):
            return None
        if not (self.trees or are_chains(batch)):
            return None
        adapters = any(rows.adapter for rows in batch)
        if adapters and not self.adapters:
            return None
        longest = max(len(rows.token_ids) for rows in batch)
        keys = max(rows.start + len(rows.token_ids) for rows in batch)
        least = [
            _next(self.sequences, len(batch)),
            _next(self.rows_each, longest),
            _next(self.blocks, ceil_div(keys, block_size)),
        ]
        if None in least:
            return None
        shape = self._shape(*least, adapters)  # type: ignore[arg-type,call-arg]
        return shape if num_logits <= shape.rows <= MOST_ROWS else None

    def _shape(self, sequences: int, rows_each: int, blocks: int, adapters: bool) -> StepShape:
        rows = sequences * rows_each
        trees = self.trees and rows_each > 1
        sizes = rows, rows, sequences, rows_each, blocks
        return StepShape(*sizes, trees, self.first_keys, adapters, self.drafts)


def _next(rising: Sequence[int], least: int) -> int | None:
    index = bisect_left(rising, least)
    return rising[index] if index < len(rising) else None


def _sequences(most: int) -> list[int]:
    """Return the powers of two and, from 16 on, the numbers halfway between them, up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    halfway = [power * 3 // 2 for power in powers if power >= _POWERS_UP_TO]
    return sorted(number for number in {*powers, *halfway, most} if number <= most)


def _blocks(max_model_len: int, block_size: int) -> list[int]:
    """Return the blocks of 1, 2, 4, ... splits of keys and of the longest text: launches count splits."""
    keys = [tiles.SPLIT << exponent for exponent in range((max_model_len // tiles.SPLIT).bit_length())]
    needed = ceil_div(max_model_len, block_size)
    return sorted({needed, *(max(1, each // block_size) for each in keys if each < max_model_len)})


def _drafted(config: ServeConfig) -> tuple[list[int], bool]:
    """Return the numbers of draft tokens, and whether drafts are trees. The numbers are 0 and the most that
    speculation chooses by itself, repeatedly halved.
    """
    options = config.speculative_config
    if options is None:
        return [0], False
    trees = options.tree or options.method == "lookahead"
    most = options.fixed_tokens or options.max_speculative_tokens
    if trees:
        most = options.tree_nodes if options.tree else options.lookahead_rows
    return sorted({0, *(most >> halved for halved in range(most.bit_length()))}), trees
