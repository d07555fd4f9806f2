"""Drafters of a deployment's own: how they are found, and a look at what they draft before it is run."""

from __future__ import annotations

from engine.devices.loaded_model import LoadedModel
from engine.step.draft import Draft
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.fields import named
from protocol.speculation import SpeculativeConfig
from speculation.drafter import Drafter

FLAG = "--speculative-config: drafter"


def custom_drafter(options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel) -> Drafter:
    """Made by the class or function that `options.drafter` names. Raises `ConfigError` for anything else."""
    assert options.drafter is not None
    make = named(options.drafter, FLAG)
    if not callable(make):
        raise ConfigError(f"{FLAG}: {options.drafter} is neither a class nor a function")
    drafter = make(options, config, loaded)
    if not isinstance(drafter, Drafter):
        made = type(drafter).__name__
        raise ConfigError(f"{FLAG}: {options.drafter} makes a {made}, not a speculation.drafter.Drafter")
    return drafter


def problem(draft: Draft, room: int, vocab_size: int) -> str:
    """Why a draft for so many tokens cannot be run; "": it can."""
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
