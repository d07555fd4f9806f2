"""The parts of the product whose mutants show what the tiers of tests find."""

from __future__ import annotations

AREAS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "engine/step/scheduler.py",
        "engine/step/live_sequences.py",
        "engine/step/late_tokens.py",
        "engine/limits.py",
    ),
    "block manager": (
        "engine/kv/block_manager.py",
        "engine/kv/block_pool.py",
        "engine/kv/sequence_blocks.py",
        "engine/kv/prefix_cache.py",
        "engine/kv/prefix_room.py",
        "engine/step/slot_allocator.py",
    ),
    "sampler": ("engine/sampler/*.py", "protocol/sampling.py"),
    "verification": ("speculation/verification/*.py",),
    "journal": ("router/journal.py", "router/answer_parts.py", "router/dispatcher.py"),
    "leases": ("kvtransfer/leases/*.py", "worker/router_leases.py"),
    "hand-off": (
        "protocol/handoff.py",
        "kvtransfer/sender.py",
        "kvtransfer/receiver.py",
        "worker/transfers.py",
        "worker/fetch.py",
        "prefill_worker/request.py",
        "decode_worker/request.py",
    ),
    "placement": ("router/placement/*.py", "router/placer.py", "router/placement/drafts/*.py"),
    "layouts": (
        "kvtransfer/blocks/layout.py",
        "kvtransfer/blocks/extents.py",
        "kvtransfer/blocks/convert.py",
        "engine/kv/layout.py",
        "engine/kv/state_layout.py",
    ),
    "grammars": (
        "engine/sampler/grammars.py",
        "engine/sampler/masks.py",
        "engine/model/grammar_tokenizer.py",
        "router/structured_outputs.py",
        "router/grammar_compiler.py",
        "router/grammar_request.py",
        "router/gbnf.py",
        "router/lark.py",
        "router/regexes.py",
        "router/json_schemas.py",
        "router/tool_grammar.py",
        "router/structural_tags.py",
    ),
}
