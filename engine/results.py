"""What the engine gives back beside tokens' messages themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import TokenOutput


@dataclass(frozen=True)
class Reservation:
    """Blocks for a prompt that another worker computes; the first `cached_blocks` are already filled."""

    block_ids: list[int]
    cached_blocks: int


@dataclass
class StepResult:
    outputs: list[TokenOutput] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_reserved: int
    num_held: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    """Tokens that were not computed because some tier held their KV."""
    steps: int
