"""Parts of the product whose mutants measure the tiers of tests."""

from __future__ import annotations

AREAS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "engine/step/scheduler.py",
        "engine/step/live_sequences.py",
        "engine/step/draft.py",
        "engine/limits.py",
    ),
    "block manager": (
        "engine/kv/block_manager.py",
        "engine/kv/sequence_blocks.py",
        "engine/kv/prefix_cache.py",
        "engine/step/slot_allocator.py",
    ),
    "sampler": ("engine/sampler/*.py", "protocol/sampling.py"),
    "verification": ("speculation/verification/*.py",),
    "journal": (
        "router/requests/journal.py",
        "router/answers/parsed_chat.py",
        "router/dispatch/dispatcher.py",
    ),
    "leases": ("kvtransfer/lease*.py", "worker/link.py"),
    "hand-off": (
        "protocol/handoff.py",
        "kvtransfer/sender.py",
        "kvtransfer/receiver.py",
        "worker/parts.py",
        "worker/fetch.py",
        "prefill_worker/request.py",
        "decode_worker/request.py",
    ),
    "placement": ("router/placement/*.py", "router/dispatch/placer.py", "router/placement/drafts/*.py"),
    "layouts": (
        "kvtransfer/blocks/layout.py",
        "kvtransfer/blocks/extents.py",
        "kvtransfer/blocks/convert.py",
        "engine/kv/layout.py",
        "engine/kv/state_slots.py",
    ),
    "grammars": (
        "engine/sampler/grammars.py",
        "engine/sampler/rows.py",
        "router/grammars/structured_outputs.py",
        "router/preprocessing/client.py",
        "router/grammars/structured_outputs.py",
        "router/grammars/lark.py",
        "router/grammars/json_schemas.py",
        "router/grammars/tool_grammar.py",
    ),
}
