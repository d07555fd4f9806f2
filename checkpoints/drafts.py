"""The drafting method of a published draft model or head, found from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol.errors import ConfigError
from protocol.speculation import Method

SPECULATORS: Mapping[str, Method] = MappingProxyType({"eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"})
"""The method by a Speculators checkpoint's `speculators_model_type`."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "eagle": "a layout of EAGLE-1 that its library no longer writes; EAGLE's own layout is served",
        "peagle": "a head that drafts in one pass, which vLLM serves as eagle3 with parallel_drafting",
        "dflash2": "DFlash with convolutions and a selector, which vLLM serves",
        "dspark": "DFlash with a Markov head, which vLLM serves",
        "xpress": "DFlash with a refining head, which vLLM serves",
    }
)
"""Types that no method here drafts with; each value says what the type is and what serves it."""

ASSISTANTS = "gemma4_assistant", "gemma4_unified_assistant"
"""Types of models that draft over a larger model's KV: the method `mtp`."""

_EAGLE_FIELDS = "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"


def draft_method(model: str, flag: str) -> Method:
    """Return the method for a folder or a hub id. Raises ConfigError that names `flag` if config.json names
    no method, or one that is not served.
    """
    path = Path(model).expanduser() / "config.json"
    try:
        if not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, path.name))
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: model: cannot read config.json of {model}: {error}") from error
    fault = refusal(config) if isinstance(config, dict) else "must be a JSON object"
    if fault:
        raise ConfigError(f"{flag}: model: {path}: {fault}")
    method = _method(config)
    if method is None:
        raise ConfigError(f"{flag}: method: must be given, since {path} tells none")
    return method


def refusal(config: Mapping[str, Any]) -> str:
    """Return why no method drafts with the checkpoint of this config.json, or "" if one does."""
    kind = config.get("speculators_model_type")
    if kind is None or kind in SPECULATORS:
        return ""
    what = _REFUSED.get(str(kind), f"none of {', '.join(SPECULATORS)}, which are served")
    return f"speculators_model_type {kind!r} is {what}"


def _method(config: Mapping[str, Any]) -> Method | None:
    if kind := config.get("speculators_model_type"):
        return SPECULATORS[kind]
    if config.get("model_type") in ASSISTANTS:
        return "mtp"
    names = [str(config.get("model_type")), *map(str, config.get("architectures") or ())]
    if "dflash_config" in config or any("dflash" in name.lower() for name in names):
        return "dflash"
    if any("medusa" in name.lower() for name in names) or "medusa_num_heads" in config:
        return "medusa"
    if any("eagle" in name.lower() for name in names) or any(name in config for name in _EAGLE_FIELDS):
        return "eagle"
    return "draft_model" if any(name.endswith("ForCausalLM") for name in names) else None
