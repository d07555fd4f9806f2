"""Checks of requests against a model's limits, and of options against a hybrid model."""

from __future__ import annotations

from engine.lora.config import AdapterError
from engine.lora.table import Adapters
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.requests import Adapter, EngineRequest
from protocol.sampling import check_sampling_params


def check_request(request: EngineRequest, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
    """Raise `InvalidRequestError`, naming the field and its limit."""
    if not request.prompt_token_ids:
        raise InvalidRequestError("prompt", "must hold at least one token")
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
    ):
        greatest = max(token_ids, default=0)
        if greatest >= vocab_size:
            raise InvalidRequestError(name, f"token ids must be below {vocab_size}, got {greatest}")
    check_sampling_params(request.sampling, vocab_size, max_logprobs)
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        raise InvalidRequestError(
            "output_token_ids", f"must be fewer than max_tokens={request.sampling.max_tokens}"
        )
    length = len(request.prompt_token_ids) + request.sampling.max_tokens
    if length > max_model_len:
        raise InvalidRequestError(
            "max_tokens",
            f"{len(request.prompt_token_ids)} prompt tokens and {request.sampling.max_tokens} new ones "
            f"exceed the limit of {max_model_len} tokens",
        )


def check_adapter(adapter: Adapter, adapters: Adapters | None) -> None:
    """Raise `InvalidRequestError` if the adapter cannot be used here. Load it if it is not loaded yet."""
    if adapters is None:
        raise InvalidRequestError("model", f"{adapter.name}: adapters need --enable-lora")
    try:
        adapters.require(adapter)
    except AdapterError as error:
        raise InvalidRequestError("model", f"{adapter.name}: {error}") from error


def check_hybrid(config: ServeConfig, grid: int) -> None:
    """Raise `ConfigError`, naming the option, if a model with recurrent layers cannot have it. States of
    these layers are kept every `grid` tokens.
    """
    if grid % config.block_size and config.block_size % grid:
        raise ConfigError(
            f"--block-size: {config.block_size}: recurrent layers have states every {grid} tokens, and one "
            "of the two numbers must divide the other"
        )
    options = {
        "--compile: on": config.compile == "on",
        "--kv-wire-dtype": config.kv_wire_dtype != "auto",
    }
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(
                f"{option}: not supported for a model with recurrent layers: remove this option"
            )
