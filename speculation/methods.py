"""The drafting methods by name, and a deployment's own drafters with a check of their drafts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.devices.loaded_model import LoadedModel
from engine.step.draft import Draft
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.fields import named
from protocol.speculation import Method, SpeculativeConfig
from speculation.drafter import Drafter

_DRAFTERS: Mapping[Method, str] = MappingProxyType(
    {
        "draft_model": "speculation.draft_model:DraftModel",
        "ngram": "speculation.weightless.ngram:NgramDrafter",
        "suffix": "speculation.weightless.suffix:SuffixDrafter",
        "lookahead": "speculation.weightless.lookahead:LookaheadDrafter",
        "medusa": "speculation.medusa:MedusaDrafter",
        "eagle": "speculation.eagle:eagle_drafter",
        "mtp": "speculation.mtp_head:mtp_drafter",
        "dflash": "speculation.dflash:DFlashDrafter",
        "self_speculative": "speculation.self_speculative:SelfDrafter",
    }
)
"""Makers of the methods' drafters, imported when needed. `options.drafter` names that of `custom`."""

_FLAG = "--speculative-config: drafter"


def build_drafter(
    method: Method, options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel
) -> Drafter:
    """Load the method's weights, if it has any. Raise `ConfigError` that names the option."""
    name = _DRAFTERS.get(method) or options.drafter
    assert name is not None
    make = named(name, _FLAG)
    if not callable(make):
        raise ConfigError(f"{_FLAG}: {name} is neither a class nor a function")
    drafter = make(options, config, loaded)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"{_FLAG}: {name} makes a {type(drafter).__name__}, not a speculation.drafter.Drafter"
        )
    return drafter


def problem(draft: Draft, room: int, vocab_size: int) -> str:
    """Return why a draft for `room` tokens cannot be run; "" if it can."""
    tokens, parents = draft.token_ids, draft.parents
    if not 0 < len(tokens) <= room:
        return f"it has {len(tokens)} tokens, where 1 to {room} were asked for"
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"the token {outside} is not among the model's {vocab_size}"
    if parents is None:
        return ""
    if len(parents) != draft.num_nodes:
        return f"it has {draft.num_nodes} nodes and {len(parents)} parents"
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        return "a node does not come after its parent"
    return ""
