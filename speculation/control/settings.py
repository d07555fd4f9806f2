"""The constants of the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Each with its unit in brackets and its reason."""

    first_rate: float = 0.75
    """[share] Acceptance at each position before any draft. Optimistic: what is tried is soon known, what is
    not tried never."""
    first_weight: float = 20.0
    """[drafts] Weight of `first_rate`: a method that fails is given up after about so many."""
    method_memory: float = 500.0
    """[drafts] Over which a method's rates are averaged: those of a few dozen requests."""
    own_weight: float = 1.0
    """[rejections] Weight of the method's rates against a request's own: a few failures in a row stop a
    request of a good method."""
    text_memory: float = 16.0
    """[tokens] Over which a request's own rates fade: hard passages of code are hardly longer."""

    pace: float = 0.1
    """[share] Of the difference between a measured and a predicted time that a window corrects."""
    longest_stride: float = 0.5
    """[log ratio] Largest difference that counts: a window may hold a pause of the machine."""
    draft_start: float = 4.0
    """[levels] What drafting for a batch takes beside its levels: that of the bundled draft and heads."""
    draft_token: float = 0.5
    """[levels] What each drafted token adds: the same."""
    draft_level: float = 0.003
    """[plain steps] A level, before it was measured. Optimistic: what is not tried is never measured."""
    read_share: float = 0.15
    """[share] Time to read a token of a prompt for drafting, of that to prefill it, before it was measured:
    that of the bundled heads."""

    least_read: int = 32
    """[tokens] Fewer than that are read along with any draft and tell nothing of what reading takes."""
    first_prompt: float = 256.0
    """[tokens] Mean prompt before any request ended."""
    first_output: float = 128.0
    """[tokens] Mean answer before any request ended; reading a text must pay within it."""
    length_pace: float = 0.05
    """[share] Weight of a request that ends in both means."""

    min_gain: float = 0.03
    """[share] By which drafting must be faster: about what is unknown of a step's time."""
    draft_stands: int = 8
    """[steps] For which a plan that drafts stands: planning takes 5 % of a 0.4 ms step."""
    plain_stands: int = 16
    """[steps] The same where nothing is drafted, but would be by a request whose text is not hard."""
    idle_stands: int = 64
    """[steps] The same where not even that pays, or all numbers are fixed."""

    trial_share: float = 0.01
    """[share] Of the time that trials may lose."""
    trial_steps: int = 6
    """[steps] Of a trial: enough to outweigh its first step, which runs with cold caches."""
