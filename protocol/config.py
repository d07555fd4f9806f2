"""The one configuration object. Flags, `TANDEM_*` environment variables and a YAML file all feed it.

Precedence: flag, then environment, then file, then default. Names follow vLLM's where vLLM has the option.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.bundled import BUNDLED_MODEL as BUNDLED_MODEL
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig, parse_speculative_config
from protocol.tls import TlsFiles

logger = logging.getLogger("tandem.config")

ENV_PREFIX = "TANDEM_"

KV_TRANSPORTS = ("shm", "ucx", "tcp", "object_store")

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `tandem serve` can be told. A field `max_model_len` is the flag `--max-model-len`."""

    model: Annotated[str, _doc("Local folder or hub id of a Transformers decoder model.")] = str(
        BUNDLED_MODEL
    )
    served_model_name: Annotated[str | None, _doc("Name in the API; default: the model's.")] = None
    tokenizer: Annotated[str | None, _doc("Local folder or hub id; default: the model's.")] = None
    revision: Annotated[str | None, _doc("Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, _doc("Run model code that comes with the weights.")] = False
    chat_template: Annotated[str | None, _doc("File with a Jinja chat template.")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _doc("Weights and activations.")] = (
        "auto"
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Where the model runs.")] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], _doc("`dummy` makes random weights of the configured shape.")
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None, _doc("Longest sequence, prompt and output; default: the model's.")
    ] = None

    host: Annotated[str, _doc("Address that HTTP listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _doc("HTTP port; 0 picks a free one.")] = 8000
    api_key: Annotated[str | None, _doc("Clients must send it as a bearer token.")] = None
    max_body_bytes: Annotated[PositiveInt, _doc("Largest HTTP request body.")] = 16 * 1024 * 1024
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000), _doc("Most log-probabilities a request may ask for.")
    ] = 20
    max_n: Annotated[
        PositiveInt, _doc("Most sequences that one HTTP request may start (prompts times n).")
    ] = 128
    max_queued_requests: Annotated[PositiveInt, _doc("Unfinished requests above which new ones get 429.")] = (
        4096
    )
    request_timeout: Annotated[PositiveSeconds, _doc("Seconds after which a request fails.")] = 600.0
    shutdown_timeout: Annotated[float, Meta(ge=0), _doc("Seconds that running requests get at shutdown.")] = (
        10.0
    )

    disaggregation: Annotated[bool, _doc("Prefill and decode on separate workers.")] = True
    prefill_replicas: Annotated[PositiveInt, _doc("Prefill workers.")] = 1
    decode_replicas: Annotated[PositiveInt, _doc("Decode workers.")] = 1
    placement: Annotated[str, _doc("Placement policy.")] = "least_loaded"
    ray_address: Annotated[str | None, _doc("Ray cluster to join; default: start a local one.")] = None
    worker_host: Annotated[str | None, _doc("Address that workers bind; default: their node's.")] = None
    worker_threads: Annotated[
        PositiveInt | None, _doc("CPU threads per worker; default: chosen from the host's cores.")
    ] = None

    block_size: Annotated[int, Meta(ge=1, le=1024), _doc("Tokens in a KV block.")] = 16
    enable_prefix_caching: Annotated[bool, _doc("Share the KV of equal prefixes.")] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        _doc(
            "Share of the device's memory for a worker (on a CPU: of the free memory, divided among workers)."
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None, _doc("KV pool size per worker; overrides the share.")
    ] = None
    kv_offloading_size: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        _doc("GiB of host memory per worker for blocks that the pool evicts."),
    ] = 0.0
    kv_disk_path: Annotated[
        str | None, _doc("Folder for blocks that the host memory evicts; each worker takes a subfolder.")
    ] = None
    kv_disk_size: Annotated[
        float, Meta(ge=0, le=1_000_000), _doc("GiB that each worker may use of --kv-disk-path.")
    ] = 0.0
    max_num_batched_tokens: Annotated[
        PositiveInt | None, _doc("Tokens in one step; default: 2048 on a GPU, 512 on a CPU.")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), _doc("Sequences in one step.")] = 64
    attention_backend: Annotated[Literal["auto", "cpu", "torch"], _doc("Attention kernels.")] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"],
        _doc("`on`: torch.compile; `auto`: the native decoder for models that it knows, else as `on`."),
    ] = "auto"

    speculative_config: Annotated[
        SpeculativeConfig | None,
        _doc('Draft tokens ahead: JSON with a method and its options, as in \'{"method": "ngram"}\'.'),
    ] = None

    kv_transports: Annotated[
        str,
        _doc(
            "Transports to offer, best first, comma-separated: shm, ucx, tcp, and object_store for workers "
            "that reach each other only through Ray."
        ),
    ] = "shm,ucx,tcp"
    kv_tcp_streams: Annotated[int, Meta(ge=1, le=64), _doc("Connections per pair of workers over tcp.")] = 1
    kv_wire_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        _doc("How tcp carries KV: `auto` as it is; `int8` and `fp8` halve the bytes and cost accuracy."),
    ] = "auto"
    kv_checksum: Annotated[
        Literal["off", "sampled", "full"],
        _doc("Check KV that arrives: a sixteenth of each block, or all of it. What differs is sent again."),
    ] = "off"
    kv_tls_cert: Annotated[
        str | None, _doc("Encrypt tcp: PEM file with the workers' certificate, on every host.")
    ] = None
    kv_tls_key: Annotated[str | None, _doc("PEM file with the key of --kv-tls-cert.")] = None
    kv_tls_ca: Annotated[
        str | None, _doc("PEM file with the authority that peers' certificates must come from.")
    ] = None
    handoff_timeout: Annotated[
        PositiveSeconds, _doc("Seconds without progress after which a hand-off fails.")
    ] = 30.0
    worker_timeout: Annotated[
        PositiveSeconds, _doc("Seconds of silence after which a worker counts as dead.")
    ] = 5.0
    start_timeout: Annotated[PositiveSeconds, _doc("Seconds that workers get to load and register.")] = 600.0

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("Logging.")] = "info"

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or (Path(self.model).name if Path(self.model).exists() else self.model)

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.model


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def field_docs() -> dict[str, tuple[str, Any]]:
    """Each field's help text and default, for the command line."""
    defaults = ServeConfig()
    docs = {}
    for field in msgspec.inspect.type_info(ServeConfig).fields:  # type: ignore[attr-defined]
        schema = (
            (field.type.extra_json_schema or {}) if isinstance(field.type, msgspec.inspect.Metadata) else {}
        )
        docs[field.name] = (schema.get("description", ""), getattr(defaults, field.name))
    return docs


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> ServeConfig:
    """Merge the three sources into a checked configuration.

    `flags` maps field names to values, None meaning "not given". Raises `ConfigError` naming the flag,
    the variable or the file entry that is wrong.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config_file is not None:
        for key, value in _read_file(Path(config_file)).items():
            field = str(key).replace("-", "_")
            values[field], sources[field] = value, f"{config_file}: {key}"
    known = set(ServeConfig.__struct_fields__)
    for variable, text in (os.environ if environ is None else environ).items():
        field = variable.removeprefix(ENV_PREFIX).lower()
        if field in known and variable == ENV_PREFIX + field.upper():
            values[field], sources[field] = _parse_text(text), variable
        elif variable.startswith(ENV_PREFIX) and (meant := difflib.get_close_matches(field, known, 1)):
            logger.warning("%s is no option; is %s%s meant?", variable, ENV_PREFIX, meant[0].upper())
    for field, value in (flags or {}).items():
        if value is not None:
            values[field], sources[field] = value, flag_name(field)
    for field in values:
        if field not in known:
            raise ConfigError(f"{sources[field]}: there is no such option")
        if field == "speculative_config" and values[field] is not None:
            target = str(values.get("model") or BUNDLED_MODEL)
            values[field] = parse_speculative_config(values[field], sources[field], target)
        else:
            _check_field(field, values[field], sources[field])
    config = msgspec.convert(values, ServeConfig, strict=False)
    _check_together(config)
    return config


def _read_file(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path} must hold a mapping of option names to values")
    return content


def _parse_text(text: str) -> Any:
    return None if text == "" else text


def _check_field(field: str, value: Any, source: str) -> None:
    try:
        msgspec.convert({field: value}, ServeConfig, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at `$")[0]
        raise ConfigError(f"{source}: {reason} (got {value!r})") from error


def _check_together(config: ServeConfig) -> None:
    for name in transport_names(config):
        if name not in KV_TRANSPORTS:
            raise ConfigError(
                f"--kv-transports: unknown transport {name!r}; known: {', '.join(KV_TRANSPORTS)}"
            )
    if not transport_names(config):
        raise ConfigError("--kv-transports: name at least one transport")
    _check_tls(config)
    _check_tiers(config)
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens: must be at least --max-num-seqs ({config.max_num_seqs}), "
            f"got {config.max_num_batched_tokens}"
        )


def _check_tls(config: ServeConfig) -> None:
    given = {flag_name(field): getattr(config, field) for field in ("kv_tls_cert", "kv_tls_key", "kv_tls_ca")}
    missing = [flag for flag, path in given.items() if path is None]
    if len(missing) == len(given):
        return
    if missing:
        others = ", ".join(flag for flag in given if flag not in missing)
        raise ConfigError(f"{missing[0]}: must be given together with {others}")
    if "ucx" in transport_names(config):
        raise ConfigError(
            "--kv-transports: ucx does not encrypt; with --kv-tls-cert name others, as in shm,tcp"
        )
    if "tcp" not in transport_names(config):
        raise ConfigError("--kv-tls-cert: is for tcp, which --kv-transports does not name")
    files = tls_files(config)
    assert files is not None
    files.check()


def tls_files(config: ServeConfig) -> TlsFiles | None:
    """The certificates that `tcp` encrypts with, if it does."""
    if config.kv_tls_cert is None or config.kv_tls_key is None or config.kv_tls_ca is None:
        return None
    return TlsFiles(cert=config.kv_tls_cert, key=config.kv_tls_key, ca=config.kv_tls_ca)


def _check_tiers(config: ServeConfig) -> None:
    if config.kv_offloading_size > 0 and not config.enable_prefix_caching:
        raise ConfigError("--kv-offloading-size: needs --enable-prefix-caching, which finds the blocks again")
    if config.kv_disk_path is not None and config.kv_offloading_size == 0:
        raise ConfigError("--kv-disk-path: needs --kv-offloading-size, since blocks pass through host memory")
    if (config.kv_disk_path is not None) != (config.kv_disk_size > 0):
        raise ConfigError("--kv-disk-size: must be given together with --kv-disk-path, and above 0")


def transport_names(config: ServeConfig) -> list[str]:
    """The transports to offer, best first."""
    return [name.strip() for name in config.kv_transports.split(",") if name.strip()]
