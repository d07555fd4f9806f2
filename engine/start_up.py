"""Description of an engine's start: one line of text for each choice or measurement."""

from __future__ import annotations

from collections import Counter

import torch

from engine.batch.runner import Runner
from engine.devices.attention import backend_for
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.kv.tiers.host import HostTier
from protocol.config import ServeConfig


def describe_start(
    config: ServeConfig,
    loaded: LoadedModel,
    pool: KVPool,
    runner: Runner,
    tiers: HostTier | None,
    load_s: float,
    compile_s: float,
) -> dict[str, str]:
    """Return the lines by topic, as `GET /workers` shows them."""
    backend, why = backend_for(config, loaded.device, loaded.dtype)
    weights = f", weights in {config.quantization}" if config.quantization else ""
    if loaded.checkpoint:
        weights = f", {loaded.checkpoint}"
    head = ", head in int8" if config.quantize_lm_head else ""
    size = f"{pool.num_blocks} blocks of {pool.block_size} tokens, {pool.num_bytes >> 20} MiB"
    return {
        "device": f"{loaded.device}, {str(loaded.dtype).removeprefix('torch.')}{weights}{head}",
        "attention": f"{backend.name} ({why})",
        "forward": runner.choice,
        "products": runner.products,
        "deterministic": "yes" if is_deterministic(config, loaded, runner) else "no",
        "kv_pool": f"{size}, KV in {loaded.kv_group.rows}{_expansion(loaded)}{_kept(config, loaded, pool)}",
        "states": _states(config, pool),
        "kv_tiers": tiers.describe() if tiers is not None else "none",
        "threads": str(torch.get_num_threads()),
        "load_s": f"{load_s:.1f}",
        "compile_s": f"{compile_s:.1f}",
    }


def is_deterministic(config: ServeConfig, loaded: LoadedModel, runner: Runner) -> bool:
    """Return whether a request has the same bits in every batch, and so the same tokens."""
    by_option = config.deterministic and loaded.device.type == "cuda"
    return by_option or runner.deterministic


def _expansion(loaded: LoadedModel) -> str:
    if not loaded.expansion:
        return ""
    config = loaded.model.config.get_text_config(decoder=True)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    kept = loaded.kv_group.num_values // len(loaded.kv_group.layers)
    return f", {kept} values a token and layer instead of latents of {latent}: {loaded.expansion}"


def _kept(config: ServeConfig, loaded: LoadedModel, pool: KVPool) -> str:
    group = pool.groups[TARGET]
    if len(group.windows) == 1:
        if group.windows[0]:
            return f"; a sequence keeps its last {group.windows[0]} tokens"
        why = _why_whole(config, loaded, pool)
        return f"; all layers keep all of a sequence, though some do not see it: {why}" if why else ""
    windows = Counter(group.windows[place.table] for place in group.layers)
    parts = [f"{count} keep {f'the last {size}' if size else 'all'}" for size, count in windows.items()]
    layers = Counter(place.table for place in {*group.layers})
    tables = f"{group.num_tables} tables of {max(layers.values())} layers"
    return f"; of a sequence's tokens in these layers {' and '.join(parts)}, in {tables}"


def _why_whole(config: ServeConfig, loaded: LoadedModel, pool: KVPool) -> str:
    """Return why layers with a sliding window keep all tokens; "" if there are no such layers."""
    group, longest = loaded.kv_group, loaded.max_model_len
    if not any(0 < window < longest for window in group.layer_windows):
        return ""
    if pool.state_slots is not None:
        return "states of recurrent layers are behind the last token"
    rows, drafts = config.kv_wire_dtype == "auto", [*pool.groups.values()][1:]
    why = group.fault(longest, rows=rows)
    return why or next(map(group.in_tables(longest, rows=rows).draft_fault, drafts), "")


def _states(config: ServeConfig, pool: KVPool) -> str:
    if pool.state_slots is None:
        return "none"
    state, count = pool.state_slots.layout, config.max_num_seqs
    return (
        f"{len(state.layers)} recurrent layers, grid of {state.grid} tokens; "
        f"{count} state slots of {_mib(state.state_slot_bytes)} for running sequences, "
        f"{_mib(count * state.state_slot_bytes)}; "
        f"states of prefixes in the pool, each {pool.state_blocks} of its blocks, {_mib(state.state_bytes)}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB"
