"""Loads models in a template process for the workers that are forked from it."""

from __future__ import annotations

import logging

import torch

from engine.devices.attention import select_backend
from engine.devices.loaded_model import LoadedModel
from engine.load.loader import load_model
from engine.load.preloaded import is_preloaded, keep_preloaded
from engine.load.select import pack_model
from protocol.config import ServeConfig
from speculation.draft_model import draft_config
from worker.setup import build_kernels

log = logging.getLogger(__name__)


def preload_models(config: ServeConfig) -> bool:
    """Load and pack the model of a configuration, and its draft model, unless they are loaded already.

    Returns whether anything was loaded. If loading fails, the workers load the models themselves and report
    why.
    """
    if config.device != "cpu" or is_preloaded(config):
        return False  # GPU memory cannot be allocated before the fork
    keep_preloaded([])
    torch.set_num_threads(1)  # a fork would not copy further threads
    build_kernels()
    try:
        target = _load(config)
        models = [(config, target)]
        options = config.speculative_config
        if options is not None and options.method == "draft_model" and options.model is not None:
            draft = draft_config(config, options, target.dtype)
            models.append((draft, _load(draft)))
    except Exception as error:
        log.warning("the model is loaded by each worker, as the template could not: %s", error)
        return False
    keep_preloaded(models)
    return True


def _load(config: ServeConfig) -> LoadedModel:
    loaded = load_model(config)
    for parameter in loaded.model.parameters():
        # Transformers may leave the parameter in the mapped file, which another process could overwrite.
        parameter.data = parameter.data.clone()
    backend, _ = select_backend(loaded.device, loaded.dtype, config.attention_backend)
    return pack_model(loaded, config.compile, backend)
