"""Fills the configuration from flags, `TANDEM_*` environment variables and a YAML file, and checks it.

Precedence: flag, then environment, then file, then default.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec

from checkpoints.source import draft_method, use_download_dir
from deploy.resources import check_ranks, runs_on_cpus
from deploy.spellings import add_options, nearest
from messaging.files import http_tls, read_private, read_trusted, tls_files
from models.bundled import bundled_draft, bundled_path
from native.ownership import CACHE_VARIABLE
from protocol.config import ServeConfig, field_types, flag_name
from protocol.engine_options import DEFAULT_MODEL
from protocol.errors import ConfigError
from protocol.fields import described, is_utf8, json_object, listed
from protocol.kv_events import parse_kv_events_config, port_of
from protocol.ports import worker_ports
from protocol.requests import parse_lora_modules, parse_template_variables
from protocol.roles import ROLES, parse_autoscale
from protocol.server_options import KV_TRANSPORTS, MAX_API_KEYS, is_sendable
from protocol.speculation import (
    DEFAULT_SPECULATION,
    MODEL_METHODS,
    REMOTE_METHODS,
    SpeculativeConfig,
    parse_speculative_config,
)
from router.api_keys import read_key_file

logger = logging.getLogger("tandem.config")

ENV_PREFIX = "TANDEM_"
_SECRET_FIELDS = ("api_key",)
"""Fields whose values no message shows."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])\Z")
_FACTORS = {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_FACTORS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}
_PARSERS: Mapping[str, Callable[[object, str], object]] = {
    "kv_events_config": parse_kv_events_config,
    "autoscale": parse_autoscale,
    "default_chat_template_kwargs": parse_template_variables,
    "lora_modules": parse_lora_modules,
}
"""The parsers of fields that have one. Each gets the value, and the source that errors name."""


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> ServeConfig:
    """Merge the three sources into a checked configuration.

    `flags` maps field names to values; None stands for "not given". Raises `ConfigError` that names the
    wrong flag, variable or file entry.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config_file is not None:
        options: dict[str, Any] = {}
        for key, value in _read_file(Path(config_file)).items():
            add_options(options, str(key).replace("_", "-"), value, f"{config_file}: {key}")
            for name in options:
                sources.setdefault(name.replace("-", "_"), f"{config_file}: {key}")
        values = {name.replace("-", "_"): value for name, value in options.items()}
    known = set(field_types())
    for variable, text in (os.environ if environ is None else environ).items():
        field = variable.removeprefix(ENV_PREFIX).lower()
        if field in known and variable == ENV_PREFIX + field.upper():
            values[field], sources[field] = text or None, variable
        elif (
            variable.startswith(ENV_PREFIX)
            and variable != CACHE_VARIABLE
            and (meant := difflib.get_close_matches(field, known, 1))
        ):
            logger.warning("%s is no option; is %s%s meant?", variable, ENV_PREFIX, meant[0].upper())
    for field, value in (flags or {}).items():
        if value is not None:
            values[field], sources[field] = value, flag_name(field)
    for field in values:
        if field not in known:
            raise ConfigError(f"{sources[field]}: there is no such option{nearest(field.replace('_', '-'))}")
        if field not in (*_PARSERS, "speculative_config") or values[field] is None:
            values[field] = _checked(field, values[field], sources[field])
    model = bundled_path(str(values.get("model", DEFAULT_MODEL)))
    if values.get("gguf_file"):
        model = f"{model.rstrip('/')}/{values.pop('gguf_file')}"
    values["model"] = model
    for field, parse in _PARSERS.items():
        if values.get(field) is not None:
            values[field] = parse(values[field], sources[field])
    use_download_dir(values.get("download_dir"))  # before a draft's config.json is searched
    given = values.get("speculative_config")
    if given is not None:
        flag = sources["speculative_config"]
        fields = _with_method(given, flag)
        off = isinstance(fields, Mapping) and fields.get("method") == "none"
        values["speculative_config"] = None if off else speculative_config(fields, flag, model)
    config = msgspec.convert(values, ServeConfig, strict=False)
    if given is None and _speculates_by_default(config):
        config = replace(config, speculative_config=DEFAULT_SPECULATION)
    _check_together(config)
    return config


def _speculates_by_default(config: ServeConfig) -> bool:
    """Return whether a server without --speculative-config speculates. No other option may exclude it, and it
    was never measured on GPUs.
    """
    return runs_on_cpus(config) and not config.enable_embeddings and not config.draft_replicas


def _read_file(path: Path) -> Mapping[str, Any]:
    import yaml

    place = str(path.expanduser())
    try:
        content = yaml.safe_load(read_trusted(place, "--config").decode())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path} must hold a mapping of option names to values")
    if any(str(key).replace("-", "_") in _SECRET_FIELDS for key in content):
        read_private(place, "--config")
    return content


def _checked(field: str, value: Any, source: str) -> Any:
    """Return the value, with a whole number such as 16k in digits, and a path from the home folder in full.
    Raises `ConfigError`.
    """
    if isinstance(value, str) and ("\0" in value or not is_utf8(value)):
        raise ConfigError(f"{source}: must be UTF-8 without the character NUL")
    if isinstance(value, str) and value.startswith("~/") and field not in _SECRET_FIELDS:
        value = os.path.expanduser(value)  # shells leave it in --model=~/x, and files have no shell
    match = _NUMBER.match(value) if isinstance(value, str) and _is_whole(field) else None
    if match is not None:
        value = int(float(match[1]) * _FACTORS[match[2]])
    try:
        converted = getattr(msgspec.convert({field: value}, ServeConfig, strict=False), field)
        is_good = not isinstance(converted, float) or math.isfinite(converted)
    except msgspec.ValidationError:
        is_good = False
    if not is_good:
        got = "" if field in _SECRET_FIELDS else f", got {value!r}"
        raise ConfigError(f"{source}: must be {described(field_types(limits=True)[field])}{got}")
    return value


def _is_whole(field: str) -> bool:
    kind = field_types()[field]
    return int in (kind, *get_args(kind))


def _check_together(config: ServeConfig) -> None:
    has_tls = _are_given(config, "tls_cert", "tls_key")
    _are_given(config, "kv_tls_cert", "kv_tls_key", "kv_tls_ca")
    worker_ports(config)
    found = chain(_problems(config), _kv_events_problems(config), _autoscale_problems(config))
    if (problem := next(found, None)) is not None:
        raise ConfigError(problem)
    check_ranks(config)
    if has_tls:
        http_tls(config)
    if (files := tls_files(config)) is not None:
        files.check()
    if config.api_key_file is not None and not read_key_file(config.api_key_file):
        raise ConfigError(f"--api-key-file: {config.api_key_file} has no key: `tandem key add` makes one")


def _are_given(config: ServeConfig, *fields: str) -> bool:
    """Return whether all of these options are given. Raises `ConfigError` if only some are."""
    missing = [flag_name(field) for field in fields if getattr(config, field) is None]
    if missing and len(missing) < len(fields):
        others = ", ".join(flag for flag in map(flag_name, fields) if flag not in missing)
        raise ConfigError(f"{missing[0]}: must be given together with {others}")
    return not missing


def _problems(config: ServeConfig) -> Iterator[str]:
    """Yield what is wrong with the options together."""
    encrypts, tiers = config.kv_tls_cert is not None, config.kv_offloading_size > 0
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    speculative = config.speculative_config
    for name in config.transport_names:
        if name not in KV_TRANSPORTS:
            yield f"--kv-transports: unknown transport {name!r}; known: {', '.join(KV_TRANSPORTS)}"
    if config.api_key is not None and not config.api_keys:
        yield "--api-key: names no key"
    if config.served_model_name is not None and not listed(config.served_model_name):
        yield "--served-model-name: names no model"
    if not all(map(is_sendable, config.api_keys)):
        yield "--api-key: must have printable ASCII characters only, as HTTP's headers do"
    if len(config.api_keys) > MAX_API_KEYS:
        yield f"--api-key: at most {MAX_API_KEYS} keys, got {len(config.api_keys)}"
    if not config.transport_names:
        yield "--kv-transports: name at least one transport"
    if encrypts and "ucx" in config.transport_names:
        yield "--kv-transports: ucx does not encrypt; with --kv-tls-cert name others, as in shm,tcp"
    if encrypts and "tcp" not in config.transport_names:
        yield "--kv-tls-cert: is for tcp, which --kv-transports does not name"
    if tiers and not config.enable_prefix_caching:
        yield "--kv-offloading-size: needs --enable-prefix-caching, which finds the blocks again"
    if config.kv_disk_path is not None and not tiers:
        yield "--kv-disk-path: needs --kv-offloading-size, since blocks pass through host memory"
    if (config.kv_disk_path is not None) != (config.kv_disk_size > 0):
        yield "--kv-disk-size: must be given together with --kv-disk-path, and above 0"
    if config.kv_cache_dtype != "auto" and config.kv_wire_dtype != "auto":
        yield (
            f"--kv-wire-dtype: {config.kv_wire_dtype} is not for --kv-cache-dtype {config.kv_cache_dtype}, "
            "whose KV is packed already and travels as it is; leave it at auto"
        )
    if config.draft_replicas > 0 and (refusal := draft_workers_refusal(config)):
        yield f"--draft-replicas: {refusal}"
    if not config.draft_replicas and speculative is not None and not speculative.decode_workers_draft:
        needed = "needs --draft-replicas above 0, else no worker drafts"
        yield f"--speculative-config: decode_workers_draft: false {needed}"
    for name in config.model_names:
        if name in (config.lora_modules or {}):
            yield f"--lora-modules: {name}: is the model's own name"
    if config.enable_embeddings and speculative is not None:
        yield "--enable-embeddings: not together with --speculative-config"
    if tokens is not None and tokens < rows:
        yield f"--max-num-batched-tokens: must be at least --max-num-seqs ({rows}), got {tokens}"


def _kv_events_problems(config: ServeConfig) -> Iterator[str]:
    events = config.kv_events_config
    if events is None:
        return
    if not config.enable_prefix_caching:
        yield "--kv-events-config: needs --enable-prefix-caching, whose blocks the events tell of"
    endpoints = {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}
    ports = {field: port_of(endpoint) for field, endpoint in endpoints.items() if endpoint is not None}
    taken = f"{config.num_workers} workers take as many ports"
    for field, port in ports.items():
        if port + config.num_workers > 65536:
            yield f"--kv-events-config: {field}: {taken} from {port} on"
    first, *second = ports.values()
    if second and first and second[0] and abs(first - second[0]) < config.num_workers:
        each = f"{taken} from each of {first} and {second[0]} on"
        yield f"--kv-events-config: replay_endpoint: {each}"


def _autoscale_problems(config: ServeConfig) -> Iterator[str]:
    for name, bounds in (config.autoscale or {}).items():
        role = ROLES[name]
        replicas, flag = config.num_replicas(role), flag_name(role.replicas)
        if role.needs_disaggregation and not config.disaggregation:
            yield f"--autoscale: {name}: there are none with --no-disaggregation"
        if not bounds.least <= replicas <= bounds.most:
            yield f"--autoscale: {name}: {flag} {replicas} is not within {bounds}"
        if config.kv_events_config is not None and bounds.most > replicas:
            yield f"--autoscale: {name}: --kv-events-config has ports for {flag} {replicas} alone"


def draft_workers_refusal(config: ServeConfig) -> str:
    """Return why there can be no draft workers, or "" if there can."""
    speculative = config.speculative_config
    method = f"the method {speculative.method}" if speculative is not None else "none"
    if speculative is None or speculative.method not in REMOTE_METHODS:
        methods = ", ".join(REMOTE_METHODS)
        can = f"a method that draft workers can draft with ({methods})"
        return f"needs --speculative-config with {can}; got {method}"
    if speculative.verification != "coupled":
        needed = "needs --speculative-config with the verification coupled"
        return f"{needed}, since drafts come without probabilities; got {speculative.verification}"
    return ""


def _with_method(value: object, flag: str) -> object:
    """Return the fields of a speculative configuration, with the method if they name only a model."""
    if isinstance(value, SpeculativeConfig):
        return value
    fields = json_object(value, flag, '{"method": "ngram"}', "an object with a method")
    model = fields.get("model")
    if fields.get("method") is not None or not isinstance(model, str):
        return fields
    return {**fields, "method": draft_method(bundled_path(model), flag)}


def speculative_config(value: object, flag: str, target: str) -> SpeculativeConfig:
    """Parse JSON text or a mapping into the configuration for the model `target`.

    The draft's path becomes absolute; a hub id stays as it is. Without a method, the draft's config.json
    determines it. Without a draft, a bundled model gets its bundled draft, if any; MTP heads otherwise come
    from the target's checkpoint. Raises `ConfigError` that names `flag`, the field and its limit.
    """
    config = parse_speculative_config(_with_method(value, flag), flag)
    if config.method not in MODEL_METHODS:
        return config
    model = config.model
    if not model:
        bundled = bundled_draft(target, config.method)
        if bundled is None and config.method == "mtp":
            bundled = target
        if bundled is None:
            raise ConfigError(f"{flag}: model: the method {config.method} needs one")
        model = bundled
    model = bundled_path(model)
    if model.startswith((".", "~", "/")) and not Path(model).expanduser().exists():
        raise ConfigError(f"{flag}: model: there is no folder {model}")
    if Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    return msgspec.structs.replace(config, model=model)
