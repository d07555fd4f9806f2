"""The drafting methods by name."""

from __future__ import annotations

from engine.devices.loaded_model import LoadedModel
from protocol.config import ServeConfig
from protocol.speculation import Method, SpeculativeConfig
from speculation.drafter import Drafter


def build_drafter(
    method: Method, options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel
) -> Drafter:
    """Loads what the method needs. Raises `ConfigError` that names the option."""
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
            from speculation.medusa.drafter import MedusaDrafter

            return MedusaDrafter(options, loaded)
        case "eagle":
            from speculation.eagle.drafter import EagleDrafter

            return EagleDrafter(options, config, loaded)
        case "self_speculative":
            from speculation.self_speculative.drafter import SelfDrafter

            return SelfDrafter(options, config, loaded)
        case "custom":
            from speculation.custom import custom_drafter

            return custom_drafter(options, config, loaded)
