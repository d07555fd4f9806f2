"""A simulated worker's KV pool: room in tokens, and a prefix cache of whole trace blocks.

As in `engine/block_pool.py`, published blocks that nobody refers to stay until their room is needed, the
least
recently used first, and of a prefix its end first. What layers within a sliding window keep of a prompt is
its sequence's own here, and they keep nothing of a cached block: that goes first.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.window import TILE, Window

_ROUNDING = 1e-6
"""[tokens] That sums of fractions may be off."""

_ANY = 2**31
"""More tokens than any sequence has."""

OnChange = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence or reservation has: `blocks` that others may share, and `private` tokens.

    `num_filled` are its leading blocks that `publish` has seen.
    """

    blocks: list[int] = field(default_factory=list)
    num_filled: int = 0
    private: float = 0.0


@dataclass(frozen=True)
class Keeping:
    """What a sequence takes of a pool whose layers lie in tables with these `windows` (0: all of a sequence).
    A token of room is that of a token in all tables; a step computes `step_tokens` of a prompt at most.
    """

    windows: tuple[int, ...] = (0,)
    block_size: int = 16
    step_tokens: int = 0

    @property
    def whole(self) -> float:
        """Share of the tables that keep all."""
        return self.windows.count(0) / len(self.windows)

    def window(self, block_size: int) -> Window | None:
        """That is all which rows read of a prefix, in such blocks; None where some layers see all."""
        return None if self.whole else Window(max(self.windows), block_size)

    def prompt(self, num_tokens: float) -> float:
        """Until so many tokens are computed; as `SequenceBlocks.grow` reckons."""
        return self._kept(num_tokens, lambda window: Window(window, self.block_size).span(self.step_tokens))

    def decoding(self, num_tokens: float) -> float:
        """Behind so many, on average: the kernels' tiles begin somewhere before the window."""
        return self._kept(num_tokens, lambda window: window + TILE / 2)

    def growth(self, num_tokens: float, left: float) -> float:
        """Room for each of the next tokens, on average."""
        if self.whole == 1 or left <= 0:
            return 1.0
        return (self.decoding(num_tokens + left) - self.decoding(num_tokens)) / left

    def longest(self, tokens: float) -> int:
        """Of a sequence's prompt in so much room."""
        return bisect.bisect_right(range(_ANY), tokens, key=self.prompt) - 1

    def _kept(self, num_tokens: float, most: Callable[[int], float]) -> float:
        kept = [min(num_tokens, most(window)) if window else num_tokens for window in self.windows]
        return sum(kept) / len(kept)


class KvRoom:
    """`on_stored` and `on_removed` are told of blocks that can be found from now on, or no longer."""

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
        """Of a published one; a whole one where no layer keeps all."""
        self._free: float = tokens
        self._references: dict[int, int] = {}
        """Of each published block."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_stored, self._on_removed = on_stored, on_removed

    @property
    def available(self) -> float:
        """Tokens that could be handed out now."""
        return self._free + len(self._evictable) * self._block_room

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold."""
        return 1 - self.available / self.tokens

    def covered(self, blocks: Sequence[int]) -> int:
        """How many leading ones of these are here, as far as rows behind them read these."""
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
        """Tokens of room that `take` would use up, if it referred to these blocks."""
        shared = self._shared(blocks)
        idle = sum(block in self._evictable for block in shared)
        return self.keeping.prompt(num_tokens) - (len(shared) - idle) * self._block_room

    def take(self, blocks: Sequence[int], num_tokens: int) -> Holding:
        """Refer to these blocks, which are here, and get room for the rest of `num_tokens`; only if there is
        as much.
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
        """Those that a sequence refers to: where no layer keeps all it has a window of its own alone."""
        return blocks if self.keeping.whole else ()

    def settle(self, holding: Holding, num_tokens: float) -> None:
        """Its prompt of so many tokens is computed: it needs no room for a step's any more."""
        freed = self.keeping.prompt(num_tokens) - self.keeping.decoding(num_tokens)
        holding.private -= freed
        self._free += freed

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
        if not self.keeping.whole:
            self.insert(new)
            return
        holding.blocks += new
        holding.private -= len(new) * self._block_room
        self._references.update(dict.fromkeys(new, 1))
        if new:
            self._on_stored(new)

    def insert(self, blocks: Sequence[int]) -> None:
        """Blocks that came from another worker, as far as there is room. They follow what is here."""
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
