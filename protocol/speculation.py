"""How a deployment and a request ask for speculation. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError, InvalidRequestError

Method = Literal["draft_model", "ngram", "suffix", "lookahead", "medusa", "eagle"]
METHODS: tuple[Method, ...] = ("draft_model", "ngram", "suffix", "lookahead", "medusa", "eagle")
WEIGHTLESS: tuple[Method, ...] = ("ngram", "suffix", "lookahead")
"""Methods that need no weights: a request may ask for them whatever the deployment's method is."""

Verification = Literal["coupled", "standard", "block"]

MAX_DRAFT_TOKENS = 32
MAX_TREE_NODES = 63
"""With the sequence's last token as root, one bit each of a 64-bit mask."""

_ALIASES = {"eagle3": "eagle"}
_MODEL_METHODS = ("draft_model", "medusa", "eagle")

NumTokens = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
Positive = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `--speculative-config`.

    `num_speculative_tokens` is how many tokens to draft in a step: a number, or "auto" for as many as pay, up
    to `max_speculative_tokens`. `model` is the draft model, or the folder with the heads. `tree` lets the
    methods that can draft a tree (`draft_model`, `medusa`, `eagle`) do so: "auto" is then up to `tree_nodes`
    tokens, of which up to `max_speculative_tokens` follow one another.
    Suffix decoding keeps the outputs of `suffix_decoding_max_cached_requests` requests, of all tenants
    together, and at most 1,048,576 tokens of them in up to 40 MiB; 0 keeps none.
    `prefill` says who computes a prompt's draft KV: "carry" the prefill worker, "rebuild" the decode worker.
    """

    method: Method
    model: str | None = None
    num_speculative_tokens: NumTokens | Literal["auto"] = "auto"
    max_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] = 8
    verification: Verification = "coupled"
    tree: bool = False
    tree_nodes: Annotated[int, Meta(ge=1, le=MAX_TREE_NODES)] = 24
    prefill: Literal["auto", "carry", "rebuild"] = "auto"

    prompt_lookup_min: Positive = 2
    prompt_lookup_max: Positive = 5

    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0)] = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1

    lookahead_ngram: Annotated[int, Meta(ge=2, le=8)] = 4
    lookahead_window: Annotated[int, Meta(ge=1, le=16)] = 5
    lookahead_guesses: Annotated[int, Meta(ge=1, le=16)] = 5

    @property
    def lookahead_rows(self) -> int:
        """Rows of a step that the window and the guesses take."""
        return (self.lookahead_window + self.lookahead_guesses) * (self.lookahead_ngram - 1)

    @property
    def fixed_tokens(self) -> int | None:
        """How many tokens to draft, None for as many as pay."""
        return self.num_speculative_tokens if isinstance(self.num_speculative_tokens, int) else None


class RequestSpeculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says of its own speculation; None leaves it to the deployment."""

    enabled: bool = True
    method: Method | None = None
    num_speculative_tokens: NumTokens | None = None


def parse_speculative_config(value: object, flag: str = "--speculative-config") -> SpeculativeConfig:
    """From JSON text or a mapping. Raises `ConfigError` that names `flag` and the field."""
    if isinstance(value, SpeculativeConfig):
        return value
    try:
        fields = msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise ConfigError(f'{flag}: must be JSON, as in \'{{"method": "ngram"}}\': {error}') from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{flag}: must be an object with a method, got {value!r}")
    fields = {**fields, "method": _ALIASES.get(fields.get("method", ""), fields.get("method"))}
    try:
        config = msgspec.convert(fields, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag}: {error}") from error
    _check(config, flag)
    return config


def _check(config: SpeculativeConfig, flag: str) -> None:
    if config.method in _MODEL_METHODS and not config.model:
        raise ConfigError(f"{flag}: model: the method {config.method} needs one")
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"{flag}: prompt_lookup_min: {config.prompt_lookup_min} exceeds "
            f"prompt_lookup_max={config.prompt_lookup_max}"
        )
    if config.tree and config.method not in _MODEL_METHODS:
        raise ConfigError(f"{flag}: tree: the method {config.method} drafts no tree")
    if config.lookahead_rows > MAX_TREE_NODES:
        raise ConfigError(
            f"{flag}: lookahead_window: (lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) is "
            f"{config.lookahead_rows}, at most {MAX_TREE_NODES} rows fit into a step"
        )


def check_request_speculation(asked: RequestSpeculation | None, deployed: SpeculativeConfig | None) -> None:
    """Raise `InvalidRequestError` when the deployment can't do what the request asks for."""
    if asked is None or not asked.enabled or asked.method is None or asked.method in WEIGHTLESS:
        return
    if deployed is None or deployed.method != asked.method:
        serves = "none" if deployed is None else f"{deployed.method!r}"
        raise InvalidRequestError(
            "speculative.method",
            f"{asked.method!r} needs weights that this server has not loaded; it has {serves}, and "
            f"{', '.join(WEIGHTLESS)} need none",
        )


def describe(config: SpeculativeConfig) -> dict[str, Any]:
    """The fields that differ from their defaults, for start-up's report."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(config).items()
        if name == "method" or value != getattr(SpeculativeConfig(method=config.method), name)
    }
