"""Speculation options of a deployment and of a request. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError, InvalidRequestError
from protocol.fields import FieldError, json_object, to_struct
from protocol.ids import Count, Seconds

Method = Literal[
    "draft_model",
    "ngram",
    "suffix",
    "lookahead",
    "medusa",
    "eagle",
    "mtp",
    "dflash",
    "self_speculative",
    "custom",
]
CUSTOM: Literal["custom"] = "custom"
"""The method of a deployment's own drafter."""
METHODS: tuple[Method, ...] = tuple(method for method in get_args(Method) if method != CUSTOM)
"""The methods that are part of Tandem."""
SELF: Literal["self_speculative"] = "self_speculative"
"""The method that drafts with the model's own layers."""
WEIGHTLESS: tuple[Method, ...] = ("ngram", "suffix", "lookahead")
"""Methods without weights. A request may choose them whatever the deployment's method is."""

Quantization = Literal["int8", "int4", "fp8", "mxfp4"]
"""Formats that weights are rounded to at load: `engine.quantization.weight.CodeFormat`."""
CheckpointFormat = Literal["awq", "gptq", "compressed-tensors"]
"""Formats of quantized checkpoints, by their `quant_method`."""

Verification = Literal["coupled", "standard", "block"]
RequestClass = Literal["greedy", "sampled"]
"""Classes of requests by acceptance: sampled requests follow the draft's likeliest tokens less often."""

MAX_DRAFT_TOKENS = 32
MAX_TREE_NODES = 63
"""Most nodes of a tree: with the sequence's last token as root, each node has one bit of a 64-bit mask."""

REMOTE: Literal["remote"] = "remote"
Source = Method | Literal["remote"]
"""Sources of drafts with statistics of their own: a method of the decode worker, or a draft worker."""

REMOTE_METHODS: tuple[Method, ...] = ("draft_model",)
"""Methods that a draft worker can draft with."""

_ALIASES = {"eagle3": "eagle"}
TREE_METHODS = ("draft_model", "medusa", "eagle", "mtp")
MODEL_METHODS = (*TREE_METHODS, "dflash")
"""The methods with weights of their own."""

NumTokens = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
Positive = Annotated[int, Meta(ge=1, le=4096)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Rates = Annotated[list[Probability], Meta(max_length=MAX_TREE_NODES)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `--speculative-config`.

    `num_speculative_tokens` is the number of draft tokens in a step, or "auto" for as many as pay, up to
    `max_speculative_tokens`. `model` is the draft model, or the folder with the heads. With `tree`, the
    methods in `TREE_METHODS` draft a tree: "auto" then means up to `tree_nodes` tokens on paths of up to
    `max_speculative_tokens`. Suffix decoding keeps the outputs of `suffix_decoding_max_cached_requests`
    requests of all tenants, at most 1,048,576 tokens in up to 40 MiB; 0 keeps none. `prefill` chooses the
    worker that computes a prompt's draft KV: "carry" the prefill worker, "rebuild" the decode worker. Without
    `decode_workers_draft` only draft workers load the draft model, for one that does not fit next to the
    target. `quantization` is the format to which weights are rounded at load, like `--quantization`: a draft
    model's, the heads' with their own LM heads, or the copy's that `self_speculative` drafts with. This copy
    has the model's layers (0 is the first) without `skip_layers`, or only the first `exit_layer`. `drafter`
    names a `speculation.drafter.Drafter` as `module:name`, for the method `custom`; its arguments are this
    config, the server's and the model. With `deterministic`, a worker where drafts could change a token (16
    bits, and a row's bits depend on its batch) drafts only for requests that ask for it.
    """

    method: Method
    model: str | None = None
    num_speculative_tokens: NumTokens | Literal["auto"] = "auto"
    max_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] = 8
    verification: Verification = "coupled"
    tree: bool = False
    tree_nodes: Annotated[int, Meta(ge=1, le=MAX_TREE_NODES)] = 24
    prefill: Literal["auto", "carry", "rebuild"] = "auto"
    decode_workers_draft: bool = True
    deterministic: bool = False
    quantization: Quantization | None = None
    skip_layers: list[Annotated[int, Meta(ge=0)]] = []
    exit_layer: Positive | None = None
    drafter: str | None = None

    prompt_lookup_min: Positive = 2
    prompt_lookup_max: Positive = 5

    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=2**20)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0, le=1024)] = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1

    lookahead_ngram: Annotated[int, Meta(ge=2, le=8)] = 4
    lookahead_window: Annotated[int, Meta(ge=1, le=16)] = 5
    lookahead_guesses: Annotated[int, Meta(ge=1, le=16)] = 5

    @property
    def lookahead_rows(self) -> int:
        """Return the number of a step's rows for the lookahead window and the guesses."""
        return (self.lookahead_window + self.lookahead_guesses) * (self.lookahead_ngram - 1)

    @property
    def fixed_tokens(self) -> int | None:
        """Return the number of draft tokens, or None for as many as pay."""
        return self.num_speculative_tokens if isinstance(self.num_speculative_tokens, int) else None


DEFAULT_SPECULATION = SpeculativeConfig(method="suffix", deterministic=True)
"""The speculation of servers on CPUs that configure none."""


class RequestSpeculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's own speculation options; None leaves one to the deployment."""

    enabled: bool = True
    method: Method | None = None
    num_speculative_tokens: NumTokens | None = None
    place: Literal["none", "local", "remote"] | None = None
    """The place of drafting: nowhere, the decode worker, or a draft worker if there is one. None: the router
    chooses.
    """


class MethodState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of a source of drafts on a worker: of its latest step, and averages of the latest drafts.

    `num_requests` requests decode with it, and asked for `num_tokens` draft tokens in total. `acceptance` has
    the acceptance rate at each draft position, given that all earlier positions are accepted; `by_class` has
    these rates for each class of requests that has drafted. Drafting for a batch takes `start_s`, `level_s`
    for each token of the longest draft and `token_s` for each token of all drafts. Before a request's first
    draft its text is read, in `read_s` per token. `found` is the drafted share of the requested tokens.
    """

    method: Source
    num_requests: Count = 0
    num_tokens: Count = 0
    acceptance: Rates = []
    by_class: dict[RequestClass, Rates] = {}
    start_s: Seconds = 0.0
    level_s: Seconds = 0.0
    token_s: Seconds = 0.0
    read_s: Seconds = 0.0
    found: Probability = 1.0


class StepTimeState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times of a worker's steps without drafting. `seconds[i][j]`: `sequences[i]` requests decode, and each
    verifies `drafted[j]` tokens (both ascending, linear in between).
    """

    sequences: Annotated[list[Count], Meta(max_length=16)] = []
    drafted: Annotated[list[Count], Meta(max_length=16)] = []
    seconds: Annotated[list[Annotated[list[Seconds], Meta(max_length=16)]], Meta(max_length=16)] = []


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's speculation, as reported to its router.

    A request drafts at most `max_tokens` tokens in a step; 0: the deployment does not speculate. A method's
    current K is `num_tokens / num_requests`. A draft worker answers a message after `draft_answers` measured
    seconds, since both sides read messages only between steps.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TREE_NODES)] = 0
    methods: Annotated[list[MethodState], Meta(max_length=len(METHODS) + 2)] = []
    step_time: StepTimeState = StepTimeState()
    draft_answers: Annotated[dict[str, Seconds], Meta(max_length=256)] = {}


def parse_speculative_config(value: object, flag: str = "--speculative-config") -> SpeculativeConfig:
    """Parse JSON text or a mapping. Raises `ConfigError` that names `flag`, the field and its limit."""
    if isinstance(value, SpeculativeConfig):
        return value
    fields = json_object(value, flag, '{"method": "ngram"}', "an object with a method")
    try:
        config = to_struct(_plain(fields), SpeculativeConfig)
        _check(config)
    except FieldError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return config


def parse_request_speculation(value: Mapping[str, Any] | None) -> RequestSpeculation | None:
    """Parse a request's `speculative`, if any. Raises `InvalidRequestError` with field and limit."""
    if not value:
        return None
    try:
        return to_struct(_plain(value), RequestSpeculation)
    except FieldError as error:
        raise InvalidRequestError(f"speculative.{error.field}", error.message) from error


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an alias by the method's own name. vLLM has one for each family with MTP heads."""
    method = fields.get("method")
    if isinstance(method, str):
        method = "mtp" if method.endswith("_mtp") else _ALIASES.get(method, method)
    return {**fields, "method": method}


def _check(config: SpeculativeConfig) -> None:
    if config.quantization is not None and config.method not in (*MODEL_METHODS, SELF):
        raise FieldError("quantization", f"must be absent: the method {config.method} has no draft model")
    for name in ("skip_layers", "exit_layer"):
        if getattr(config, name) and config.method != SELF:
            raise FieldError(name, f"must be absent: the method {config.method} drafts without layers")
    if config.skip_layers and config.exit_layer is not None:
        raise FieldError("exit_layer", "must be absent where skip_layers is given")
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise FieldError(
            "prompt_lookup_min",
            f"{config.prompt_lookup_min} exceeds prompt_lookup_max={config.prompt_lookup_max}",
        )
    if (config.drafter is None) == (config.method == CUSTOM):
        is_needed = "needs one, as module:name" if config.method == CUSTOM else "has none"
        raise FieldError("drafter", f"the method {config.method} {is_needed}")
    if config.drafter is not None and ":" not in config.drafter:
        raise FieldError("drafter", f"must be module:name, got {config.drafter!r}")
    if config.tree and config.method not in TREE_METHODS:
        raise FieldError("tree", f"the method {config.method} drafts no tree")
    if config.model is not None and config.method not in MODEL_METHODS:
        raise FieldError("model", f"the method {config.method} has none")
    if config.lookahead_rows > MAX_TREE_NODES:
        raise FieldError(
            "lookahead_window",
            f"(lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) is {config.lookahead_rows}, "
            f"at most {MAX_TREE_NODES} rows fit into a step",
        )


def check_request_speculation(asked: RequestSpeculation | None, deployed: SpeculativeConfig | None) -> None:
    """Raise `InvalidRequestError` if the deployment cannot do what the request asks for."""
    if asked is None or not asked.enabled or asked.method in WEIGHTLESS:
        return
    if asked.method is None:
        wants_drafts = asked.num_speculative_tokens != 0 and asked.place != "none"
        if deployed is None and wants_drafts:
            raise InvalidRequestError(
                "speculative.method",
                "this server has no method of its own (--speculative-config): the request must name one that "
                f"needs no weights: {', '.join(WEIGHTLESS)}",
            )
        return
    if deployed is None or deployed.method != asked.method:
        what = {CUSTOM: "a drafter", SELF: "a draft"}.get(asked.method, "weights")
        serves = "none" if deployed is None else f"{deployed.method!r}"
        raise InvalidRequestError(
            "speculative.method",
            f"{asked.method!r} needs {what} that this server has not loaded; it has {serves}, and "
            f"{', '.join(WEIGHTLESS)} need none",
        )


def describe(config: SpeculativeConfig | None) -> str:
    """Return the method and, in brackets, its non-default options, for the report at the start."""
    if config is None:
        return f"none (a request may ask for {', '.join(WEIGHTLESS)})"
    defaults = SpeculativeConfig(method=config.method)
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    changed = [f"{name} {value}" for name, value in values.items() if value != getattr(defaults, name)]
    return f"{config.method} ({', '.join(changed)})" if changed else config.method
