"""A simulated worker's KV pool: room in tokens, and a prefix cache of whole trace blocks.

As in `engine/kv/block_pool.py`, unreferenced published blocks stay until their room is needed; the least
recently used are evicted first, and of a prefix its end. The tokens that windowed layers keep of a prompt
belong to its sequence alone here, and they keep nothing of a cached block: that is evicted first.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.window import TILE, Window

_ROUNDING = 1e-6
"""Rounding error of sums of fractions, in tokens."""

_ANY = 2**31
"""More tokens than any sequence has."""

OnChange = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)
class Holding:
    """The room of one sequence or reservation: shared `blocks`, and `private` tokens.

    `publish` has handled the first `num_filled` blocks.
    """

    blocks: list[int] = field(default_factory=list)
    num_filled: int = 0
    private: float = 0.0


@dataclass(frozen=True)
class Keeping:
    """The room that a sequence takes in a pool whose layers lie in tables with these `windows` (0: all
    tokens are kept). A token of room is a token in all tables; a step computes at most `step_tokens` of a
    prompt.
    """

    windows: tuple[int, ...] = (0,)
    block_size: int = 16
    step_tokens: int = 0

    @property
    def whole(self) -> float:
        """Return the share of the tables that keep all tokens."""
        return self.windows.count(0) / len(self.windows)

    def window(self, block_size: int) -> Window | None:
        """Return the window, in such blocks, that rows read of a prefix; None if some layers see all
        tokens.
        """
        return None if self.whole else Window(max(self.windows), block_size)

    def prompt(self, num_tokens: float) -> float:
        """Return the room until `num_tokens` tokens are computed, as `SequenceBlocks.grow` counts it."""
        return self._kept(num_tokens, lambda window: Window(window, self.block_size).span(self.step_tokens))

    def decoding(self, num_tokens: float) -> float:
        """Return the average room of a decoding sequence of `num_tokens` tokens: the kernels' tiles begin
        somewhere before the window.
        """
        return self._kept(num_tokens, lambda window: window + TILE / 2)

    def growth(self, num_tokens: float, left: float) -> float:
        """Return the average room of each of the next tokens."""
        if self.whole == 1 or left <= 0:
            return 1.0
        return (self.decoding(num_tokens + left) - self.decoding(num_tokens)) / left

    def longest(self, tokens: float) -> int:
        """Return the longest prompt that fits in `tokens` of room."""
        return bisect.bisect_right(range(_ANY), tokens, key=self.prompt) - 1

    def _kept(self, num_tokens: float, most: Callable[[int], float]) -> float:
        kept = [min(num_tokens, most(window)) if window else num_tokens for window in self.windows]
        return sum(kept) / len(kept)


class KvRoom:
    """Room and prefix cache. `on_stored` and `on_removed` are called with blocks that can be found from now
    on, or no longer.
    """

    def __init__(
        self,
        tokens: int,
        block_tokens: int,
        on_stored: OnChange,
        on_removed: OnChange,
        keeping: Keeping = Keeping(),
    ) -> None:
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.keeping = keeping
        self._block_room = block_tokens * (keeping.whole or 1.0)
        """Room of a published block; a whole block's if no layer keeps all tokens."""
        self._free: float = tokens
        self._references: dict[int, int] = {}
        """References to each published block."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_stored, self._on_removed = on_stored, on_removed

    @property
    def available(self) -> float:
        """Return the tokens of room that could be handed out now."""
        return self._free + len(self._evictable) * self._block_room

    @property
    def usage(self) -> float:
        """Return the share of the pool that requests hold."""
        return 1 - self.available / self.tokens

    def covered(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are cached, as far as later rows read them."""
        window, end = self.keeping.window(self.block_tokens), len(blocks)
        if window is None:
            return next((place for place in range(end) if blocks[place] not in self._references), end)
        for place in range(end - 1, -1, -1):
            if blocks[place] not in self._references:
                end = place
            elif place <= window.first_place(end * self.block_tokens):
                return end
        return 0

    def lacks(self, blocks: Sequence[int], num_tokens: int) -> float:
        """Return the tokens of room that `take` would use if it referred to these blocks."""
        shared = self._shared(blocks)
        idle = sum(block in self._evictable for block in shared)
        return self.keeping.prompt(num_tokens) - (len(shared) - idle) * self._block_room

    def take(self, blocks: Sequence[int], num_tokens: int) -> Holding:
        """Refer to these cached blocks, and take room for the rest of `num_tokens`. The caller has checked
        that there is enough.
        """
        shared = self._shared(blocks)
        for block in shared:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        private = self.keeping.prompt(num_tokens) - len(shared) * self._block_room
        self.reserve(private)
        return Holding(list(shared), len(blocks), private)

    def _shared(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the blocks that a sequence refers to: none if no layer keeps all tokens, since it then has
        a window of its own.
        """
        return blocks if self.keeping.whole else ()

    def settle(self, holding: Holding, num_tokens: float) -> None:
        """Release the room of a step once the prompt of `num_tokens` tokens is computed."""
        freed = self.keeping.prompt(num_tokens) - self.keeping.decoding(num_tokens)
        holding.private -= freed
        self._free += freed

    def reserve(self, tokens: float) -> None:
        """Take room, which must be available. The caller adds it to a holding's `private` tokens."""
        while self._free < tokens - _ROUNDING:
            self._evict()
        self._free -= tokens

    def give_back(self, tokens: float) -> None:
        """Release reserved room that is not needed."""
        self._free += tokens

    def publish(self, holding: Holding, blocks: Sequence[int]) -> None:
        """Publish the filled leading blocks of a sequence. A block that another sequence has published stays
        private.
        """
        new = [block for block in blocks[holding.num_filled :] if block not in self._references]
        holding.num_filled = max(holding.num_filled, len(blocks))
        if not self.keeping.whole:
            self.insert(new)
            return
        holding.blocks += new
        holding.private -= len(new) * self._block_room
        self._references.update(dict.fromkeys(new, 1))
        if new:
            self._on_stored(new)

    def insert(self, blocks: Sequence[int]) -> None:
        """Add blocks that came from another worker, as far as there is room. They follow cached blocks."""
        new = [block for block in blocks if block not in self._references]
        new = new[: int(self.available // self._block_room)]
        for block in new:
            self.reserve(self._block_room)
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
        self._free += self._block_room
        self._on_removed((block,))
