"""A simulated worker's KV pool: room in tokens, and a prefix cache of whole trace blocks.

As in `engine/arena.py`, published blocks that nobody refers to stay until their room is needed, the least
recently used first, and of a prefix its end first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-6
"""[tokens] That sums of fractions may be off."""

OnChange = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence or reservation has: `blocks` that others may share, and `private` tokens.

    `num_filled` are its leading blocks that `publish` has seen.
    """

    blocks: list[int] = field(default_factory=list)
    num_filled: int = 0
    private: float = 0.0


class KvRoom:
    """`on_stored` and `on_removed` are told of blocks that can be found from now on, or no longer."""

    def __init__(self, tokens: int, block_tokens: int, on_stored: OnChange, on_removed: OnChange) -> None:
        self.tokens = tokens
        self.block_tokens = block_tokens
        self._free: float = tokens
        self._references: dict[int, int] = {}
        """Of each published block."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_stored, self._on_removed = on_stored, on_removed

    @property
    def available(self) -> float:
        """Tokens that could be handed out now."""
        return self._free + len(self._evictable) * self.block_tokens

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold."""
        return 1 - self.available / self.tokens

    def covered(self, blocks: Sequence[int]) -> int:
        """How many leading ones of these are here."""
        count = 0
        for block in blocks:
            if block not in self._references:
                break
            count += 1
        return count

    def lacks(self, blocks: Sequence[int], num_tokens: int) -> float:
        """Tokens of room that `take` would use up, if it referred to these blocks."""
        idle = sum(block in self._evictable for block in blocks)
        return num_tokens - (len(blocks) - idle) * self.block_tokens

    def take(self, blocks: Sequence[int], num_tokens: int) -> Holding:
        """Refer to these blocks, which are here, and get room for the rest of `num_tokens`; only if there is
        as much.
        """
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        private = num_tokens - len(blocks) * self.block_tokens
        self.reserve(private)
        return Holding(list(blocks), len(blocks), private)

    def reserve(self, tokens: float) -> None:
        """Only if so many are available. Whoever gets them adds them to its `private` ones."""
        while self._free < tokens - _ROUNDING:
            self._evict()
        self._free -= tokens

    def give_back(self, tokens: float) -> None:
        """What was reserved and is not needed."""
        self._free += tokens

    def publish(self, holding: Holding, blocks: Sequence[int]) -> None:
        """These leading blocks of a sequence are filled. One that another sequence has published stays
        private.
        """
        new = [block for block in blocks[holding.num_filled :] if block not in self._references]
        holding.num_filled = max(holding.num_filled, len(blocks))
        holding.blocks += new
        holding.private -= len(new) * self.block_tokens
        self._references.update(dict.fromkeys(new, 1))
        if new:
            self._on_stored(new)

    def insert(self, blocks: Sequence[int]) -> None:
        """Blocks that came from another worker, as far as there is room. They follow what is here."""
        new = [block for block in blocks if block not in self._references]
        new = new[: int(self.available // self.block_tokens)]
        for block in new:
            self.reserve(self.block_tokens)
            self._references[block] = 0
            self._evictable[block] = None
        if new:
            self._on_stored(new)

    def free(self, holding: Holding) -> None:
        self._free += holding.private
        for block in reversed(holding.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._evictable[block] = None

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._references[block]
        self._free += self.block_tokens
        self._on_removed((block,))
