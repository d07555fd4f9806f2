"""The drafting methods by name, and a deployment's own drafters with a check of their drafts."""

from __future__ import annotations

from engine.devices.loaded_model import LoadedModel
from engine.step.draft import Draft
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.fields import named
from protocol.speculation import Method, SpeculativeConfig
from speculation.drafter import Drafter


def build_drafter(
    method: Method, options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel
) -> Drafter:
    """Load the method's weights, if it has any. Raise `ConfigError` that names the option."""
    match method:
        case "draft_model":
            from speculation.draft_model import DraftModel

            return DraftModel(options, config, loaded)
        case "ngram":
            from speculation.weightless.ngram import NgramDrafter

            return NgramDrafter(options)
        case "suffix":
            from speculation.weightless.ngram import NgramDrafter
            from speculation.weightless.suffix import SuffixDrafter, compiled

            return NgramDrafter(options) if compiled() is None else SuffixDrafter(options)
        case "lookahead":
            from speculation.weightless.lookahead import LookaheadDrafter

            return LookaheadDrafter(options, loaded.eos_token_ids)
        case "medusa":
            from speculation.medusa import MedusaDrafter

            return MedusaDrafter(options, loaded)
        case "eagle":
            from speculation.eagle import load_eagle
            from speculation.head_drafter import HeadDrafter

            assert options.model is not None
            return HeadDrafter(load_eagle(options.model, loaded, options.quantization), options, config)
        case "mtp":
            from checkpoints.drafts import ASSISTANTS
            from speculation.checkpoint import Checkpoint
            from speculation.gemma4_assistant import AssistantDrafter
            from speculation.head_drafter import HeadDrafter
            from speculation.mtp_head import load_mtp

            assert options.model is not None
            checkpoint = Checkpoint(
                options.model, revision=config.revision if options.model == config.model else None
            )
            if checkpoint.config.get("model_type") in ASSISTANTS:
                return AssistantDrafter(checkpoint, options, config, loaded)
            return HeadDrafter(load_mtp(checkpoint, loaded, options), options, config)
        case "dflash":
            from speculation.dflash import DFlashDrafter

            return DFlashDrafter(options, config, loaded)
        case "self_speculative":
            from speculation.self_speculative import SelfDrafter

            return SelfDrafter(options, config, loaded)
        case "custom":
            return _custom_drafter(options, config, loaded)


_FLAG = "--speculative-config: drafter"


def _custom_drafter(options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel) -> Drafter:
    """Call the class or function that `options.drafter` names. Raise `ConfigError` for anything else."""
    assert options.drafter is not None
    make = named(options.drafter, _FLAG)
    if not callable(make):
        raise ConfigError(f"{_FLAG}: {options.drafter} is neither a class nor a function")
    drafter = make(options, config, loaded)
    if not isinstance(drafter, Drafter):
        made = type(drafter).__name__
        raise ConfigError(f"{_FLAG}: {options.drafter} makes a {made}, not a speculation.drafter.Drafter")
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
