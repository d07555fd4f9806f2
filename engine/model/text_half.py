"""Loading of the language model of a checkpoint whose class has other parts too, such as vision and audio.

Transformers makes the whole class and reads the checkpoint by its names, without the parts that text does not
need. If Transformers has a causal class for just the language model, the language model then runs in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.auto_factory import _get_model_class

from engine.light_imports import with_kernels
from protocol.errors import UnsupportedModelError


def whole_config(hf_config: Any, *, trust_remote_code: bool) -> Any:
    """Return the configuration of the multimodal model with this language model, if Transformers has no class
    for just the language model (Step 3.5); else `hf_config`.
    """
    own_code = trust_remote_code and getattr(hf_config, "auto_map", None)
    if own_code or any(
        _class_of(auto, hf_config) for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM)
    ):
        return hf_config
    beside: list[Any] = [
        each
        for each in vars(sys.modules[type(hf_config).__module__]).values()
        if isinstance(each, type) and issubclass(each, PreTrainedConfig)
    ]
    kind = next((each for each in beside if each.sub_configs.get("text_config") is type(hf_config)), None)
    if kind is None or kind not in AutoModelForMultimodalLM._model_mapping:
        return hf_config
    whole = kind(text_config=hf_config)
    for name in ("dtype", "quantization_config"):
        setattr(whole, name, getattr(hf_config, name, None))
    return whole


@with_kernels
def make_model(hf_config: Any, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """Return a model with random weights. Raises UnsupportedModelError."""
    kind = _language_class(hf_config, trust_remote_code)
    if kind is AutoModelForCausalLM:
        return kind.from_config(hf_config, trust_remote_code=trust_remote_code, **options)
    made: PreTrainedModel = kind._from_config(hf_config, **options)
    return made


@with_kernels
def load_checkpoint(
    source: str, hf_config: Any, *, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    """Return a checkpoint's language model. Raises UnsupportedModelError, also for a missing tensor."""
    kind = _language_class(hf_config, trust_remote_code)
    if kind is AutoModelForCausalLM:
        options["trust_remote_code"] = trust_remote_code
    model, info = kind.from_pretrained(source, config=hf_config, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise UnsupportedModelError(f"{min(info['missing_keys'])}: is missing")
    return as_causal(model)


def named_as_in(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by the model's names, without tensors of parts that the model lacks."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    named = {rename_source_key(name, renamings, [])[0]: tensor for name, tensor in tensors.items()}
    unread = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    return {name: tensor for name, tensor in named.items() if not unread.search(name)}


def as_causal(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model's language model in its own causal class, or the model if there is no such class."""
    config = model.config.get_text_config(decoder=True)
    kind = _class_of(AutoModelForCausalLM, config)
    if kind is None or isinstance(model, kind):
        return model
    decoder = model.get_decoder()
    if type(decoder) is kind:
        decoder.generation_config = model.generation_config
        return decoder
    with torch.device("meta"):
        causal = kind._from_config(config, dtype=model.dtype, attn_implementation=config._attn_implementation)
    if type(causal.base_model) is not type(decoder):
        return model
    setattr(causal, causal.base_model_prefix, decoder)
    causal.set_output_embeddings(model.get_output_embeddings())
    own = {*chain(decoder.parameters(), decoder.buffers(), model.get_output_embeddings().parameters())}
    if any(tensor not in own for tensor in chain(causal.parameters(), causal.buffers())):
        return model  # the causal class has weights that the whole model lacks
    causal.config, causal.generation_config = decoder.config, model.generation_config
    return causal.eval()


def _language_class(hf_config: Any, trust_remote_code: bool) -> Any:
    """Return the class that makes and loads models; `AutoModelForCausalLM` also runs a checkpoint's code."""
    remote = getattr(hf_config, "auto_map", None) or {}
    if trust_remote_code and AutoModelForCausalLM.__name__ in remote:
        return AutoModelForCausalLM
    whole = _class_of(AutoModelForMultimodalLM, hf_config)
    if whole is not None and hf_config.get_text_config(decoder=True) is not hf_config:
        return _without_other_parts(whole)
    if whole is None or _class_of(AutoModelForCausalLM, hf_config) is not None:
        return AutoModelForCausalLM
    return whole


def _class_of(auto: Any, hf_config: Any) -> type[PreTrainedModel] | None:
    if type(hf_config) not in auto._model_mapping:
        return None
    kind: type[PreTrainedModel] = _get_model_class(hf_config, auto._model_mapping)
    return kind


def _without_other_parts(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass with only the decoder and its head. It keeps the class's name, by which Transformers
    finds the mapping of the checkpoints' tensor names.
    """

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        decoder = self.get_decoder()
        head = self.get_output_embeddings() or decoder.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{config.model_type}: a model without a language model's head")
        dropped = _drop_others(self, {decoder, head})
        self._keys_to_ignore_on_load_unexpected |= {f"^{re.escape(name)}\\b" for name in dropped}
        self.all_tied_weights_keys = {
            pair[0]: pair[1]
            for pair in self.all_tied_weights_keys.items()
            if not any(name.startswith(f"{each}.") for each in dropped for name in pair)
        }

    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def _drop_others(model: nn.Module, kept: Collection[nn.Module]) -> list[str]:
    """Drop the modules that neither are nor contain `kept` ones. Return their names."""
    dropped = []
    for name, child in list(model.named_children()):
        if child in kept:
            continue
        if any(module in kept for module in child.modules()):
            dropped += [f"{name}.{each}" for each in _drop_others(child, kept)]
        else:
            delattr(model, name)
            dropped.append(name)
    return dropped
