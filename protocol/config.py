"""The one configuration object. `deploy/config.py` fills it from flags, `TANDEM_*` variables and a file.

Names follow vLLM's where vLLM has the option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.handoff import MAX_HANDOFF_S
from protocol.kv_events import KvEventsConfig
from protocol.logs import LogFormat
from protocol.roles import ROLES, RoleOptions, RoleSpec, WorkerRange
from protocol.speculation import Quantization, SpeculativeConfig

DEFAULT_MODEL = "tandem-code-10m"

KV_TRANSPORTS = ("shm", "ucx", "tcp", "object_store")

MAX_API_KEYS = 256
"""The most API keys; each key has its own metrics."""

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class ServeConfig(RoleOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of `tandem serve`. A field `max_model_len` is the flag `--max-model-len`."""

    model: Annotated[str, _doc("Local folder, GGUF file, bundled name or hub id of a decoder model.")] = (
        DEFAULT_MODEL
    )
    gguf_file: Annotated[str | None, _doc("GGUF file in the model's folder or hub repository.")] = None
    served_model_name: Annotated[str | None, _doc("Model name in the API; default: the model's own.")] = None
    tokenizer: Annotated[str | None, _doc("Local folder or hub id; default: the model's.")] = None
    revision: Annotated[str | None, _doc("Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, _doc("Run model code that comes with the weights.")] = False
    chat_template: Annotated[str | None, _doc("File with a Jinja chat template.")] = None
    generation_config: Annotated[
        str,
        _doc(
            "Defaults of sampling parameters: those of the model's generation_config.json (`auto`), of a "
            "folder with such a file, or no model's (`vllm`)."
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "gemma4",
            "glm45",
            "glm47",
            "granite",
            "hermes",
            "hunyuan_a13b",
            "hy_v3",
            "internlm",
            "kimi_k2",
            "llama3_json",
            "llama4_pythonic",
            "mimo",
            "minimax_m2",
            "mistral",
            "openai",
            "phi4_mini_json",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
            "step3p5",
            "xlam",
        ],
        _doc("Format of the model's tool calls; `auto` detects it from the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_r1",
            "qwen3",
            "gemma4",
            "granite",
            "hunyuan_a13b",
            "hy_v3",
            "mistral",
            "openai_gptoss",
        ],
        _doc("Format of the model's reasoning; `none` leaves it in the content."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], _doc("Data type of weights and activations.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Device that the model runs on.")] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], _doc("`dummy` makes random weights of the configured shape.")
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        _doc(
            "Round the weights of linear layers at load: int8, int4 (in groups of 128), fp8 or mxfp4; "
            "the head stays as it is. Quantized checkpoints need no option."
        ),
    ] = None
    quantize_lm_head: Annotated[
        bool,
        _doc("Round the output head's weights to int8 at load, and a draft model's; embeddings stay."),
    ] = False
    enable_lora: Annotated[
        bool, _doc("Serve LoRA adapters: those of --lora-modules, and those loaded while the server runs.")
    ] = False
    lora_modules: Annotated[
        dict[str, str] | None,
        _doc("Name and folder of a LoRA adapter, as in sql=/adapters/sql; may be repeated."),
    ] = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024), _doc("Highest rank of a LoRA adapter.")] = 64
    max_model_len: Annotated[
        PositiveInt | None, _doc("Longest sequence, prompt and output; default: the model's.")
    ] = None

    host: Annotated[str, _doc("Address that HTTP listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _doc("HTTP port; 0 picks a free one.")] = 8000
    api_key: Annotated[
        str | None,
        _doc(
            "Bearer tokens of clients, comma-separated; waiting clients take turns. Other users can read "
            "flags in the process list, so set TANDEM_API_KEY or use --api-key-file."
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        _doc("File of hashed API keys with their limits, made by `tandem key add`; read again when changed."),
    ] = None
    tls_cert: Annotated[str | None, _doc("Serve HTTPS: PEM file with the certificate and its chain.")] = None
    tls_key: Annotated[str | None, _doc("PEM file with the key of --tls-cert.")] = None
    max_body_bytes: Annotated[PositiveInt, _doc("Largest HTTP request body.")] = 16 * 1024 * 1024
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000), _doc("Most log-probabilities that a request may ask for.")
    ] = 20
    max_n: Annotated[
        PositiveInt, _doc("Most sequences that one HTTP request may start (prompts times n).")
    ] = 128
    max_queued_requests: Annotated[
        PositiveInt,
        _doc("Most unfinished requests; above it new requests get 429, or less urgent waiting ones do."),
    ] = 4096
    enable_embeddings: Annotated[
        bool,
        _doc(
            "Serve /v1/embeddings, /score and /v1/rerank; an embedding is the last token's state, scaled "
            "to length one."
        ),
    ] = False
    response_store: Annotated[
        str | None,
        _doc("File that stores the answers of /v1/responses, shared by several routers; default: memory."),
    ] = None
    max_stored_responses: Annotated[
        int, Meta(ge=0), _doc("Most stored responses; the oldest are dropped first. 0 stores none.")
    ] = 1000
    max_stored_response_bytes: Annotated[
        PositiveInt, _doc("Most bytes that all stored responses may take.")
    ] = 256 * 1024 * 1024
    request_timeout: Annotated[PositiveSeconds, _doc("Seconds after which a request fails.")] = 600.0
    slo_ttft: Annotated[
        PositiveSeconds | None,
        _doc("Seconds to the first token: requests that are expected to miss it get 429 at once."),
    ] = None
    slo_tpot: Annotated[
        PositiveSeconds | None,
        _doc("Seconds between two tokens: requests that are expected to miss it get 429 at once."),
    ] = None
    shutdown_timeout: Annotated[float, Meta(ge=0), _doc("Seconds that running requests get at shutdown.")] = (
        10.0
    )

    drain_timeout: Annotated[
        PositiveSeconds,
        _doc("Seconds that a leaving worker gets to move its requests to others or to finish them."),
    ] = 30.0

    autoscale: Annotated[
        dict[str, WorkerRange] | None,
        _doc(
            "Minimum and maximum of workers of roles that scale automatically, as in prefill=1:4,decode=1:8."
        ),
    ] = None
    scale_down_after: Annotated[
        PositiveSeconds,
        _doc("Seconds that fewer workers must have sufficed before --autoscale removes one."),
    ] = 300.0
    scale_timeout: Annotated[
        PositiveSeconds, _doc("Seconds that an added worker waits for a node with room.")
    ] = 300.0

    disaggregation: Annotated[bool, _doc("Prefill and decode on separate workers.")] = True
    placement: Annotated[
        str,
        _doc(
            "Placement policy: cost, cache_aware, least_loaded, power_of_two, round_robin, "
            "or `module:name` of your own."
        ),
    ] = "cost"
    prefill_placement: Annotated[str | None, _doc("Policy for prefill; default: --placement.")] = None
    decode_placement: Annotated[str | None, _doc("Policy for decode; default: --placement.")] = None
    router_replicas: Annotated[
        int,
        Meta(ge=1, le=64),
        _doc("Router processes; all listen on --port, and each on a further port of its own."),
    ] = 1
    draft_placement: Annotated[
        Literal["cost", "none", "local", "remote"],
        _doc(
            "Where drafts are made, unless a request says otherwise: `none`, on decode workers (`local`), on "
            "draft workers (`remote`), or wherever it brings most (`cost`)."
        ),
    ] = "cost"
    ray_address: Annotated[str | None, _doc("Ray cluster to join; default: start a local one.")] = None
    min_nodes: Annotated[
        int,
        Meta(ge=1, le=4096),
        _doc(
            "Nodes of the Ray cluster to spread workers over. A start waits for them up to 30 seconds, or up "
            "to 10 minutes while Ray sets hosts up."
        ),
    ] = 1
    worker_host: Annotated[str | None, _doc("Address that workers bind to; default: their node's.")] = None
    worker_ports: Annotated[
        str | None,
        _doc("Ports that workers and routers listen on for each other, as in 6500-6599; default: any."),
    ] = None
    worker_threads: Annotated[
        PositiveInt | None,
        _doc("CPU threads per worker; default: its share of the host's cores, plus cores of idle workers."),
    ] = None

    block_size: Annotated[int, Meta(ge=1, le=1024), _doc("Tokens in a KV block.")] = 16
    enable_prefix_caching: Annotated[bool, _doc("Share the KV of equal prefixes.")] = True
    paged_kv: Annotated[
        bool,
        _doc(
            "Give a request KV blocks as it grows. If off, each request holds the blocks of --max-model-len "
            "tokens, as in servers without paging; for comparisons."
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        _doc(
            "Share of a GPU's memory for the workers on it (on a CPU: of the free memory, half of it for KV)."
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        _doc(
            "KV pool size per worker. By default a GPU's share, less the weights; on a CPU room for "
            "--max-num-seqs sequences of --max-model-len tokens, at most 4 GiB and half of the free memory."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        _doc(
            "Format of KV in the pool: `auto` is the model's; `int8` and `fp8` take one byte a value, so "
            "nearly twice as many tokens fit. All workers need the same."
        ),
    ] = "auto"
    kv_offloading_size: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        _doc("GiB of host memory per worker for blocks evicted from the pool."),
    ] = 0.0
    kv_disk_path: Annotated[
        str | None, _doc("Folder for blocks evicted from host memory; each worker uses a subfolder.")
    ] = None
    kv_disk_size: Annotated[
        float, Meta(ge=0, le=1_000_000), _doc("GiB that each worker may use of --kv-disk-path.")
    ] = 0.0
    max_num_batched_tokens: Annotated[
        PositiveInt | None, _doc("Tokens in one step; default: 2048 on a GPU, 512 on a CPU.")
    ] = None
    itl_budget: Annotated[
        float,
        Meta(ge=0, le=3600),
        _doc(
            "Longest step, in seconds, that computes part of a prompt while other requests decode; 0: no "
            "limit. Also limited to 0.8 of --slo-tpot and of those requests' x-slo-tpot-ms."
        ),
    ] = 0.02
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), _doc("Sequences in one step.")] = 128
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "torch"], _doc("Attention kernels; `triton` needs CUDA.")
    ] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"],
        _doc(
            "`on`: torch.compile; `auto`: the native decoder for models that it supports, else torch.compile."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        _doc(
            "On a GPU, multiply in tiles of a fixed size, so that a row has the same bits in every batch "
            "(except with experts or adapters). On a CPU in bfloat16 it always has."
        ),
    ] = False
    enforce_eager: Annotated[
        bool, _doc("Launch each step's kernels on a GPU one by one, without CUDA graphs.")
    ] = False

    speculative_config: Annotated[
        SpeculativeConfig | None,
        _doc('Draft tokens ahead: JSON with a method and its options, as in \'{"method": "ngram"}\'.'),
    ] = None

    kv_events_config: Annotated[
        KvEventsConfig | None,
        _doc(
            "Publish the prefix caches' contents to other routers, unencrypted: JSON, as in "
            '\'{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\'.'
        ),
    ] = None

    kv_transports: Annotated[
        str,
        _doc(
            "Transports to offer, best first, comma-separated: shm, ucx, tcp, and object_store, "
            "which moves blocks through Ray's object store."
        ),
    ] = "shm,ucx,tcp"
    kv_tcp_streams: Annotated[int, Meta(ge=1, le=64), _doc("Connections per pair of workers over tcp.")] = 1
    kv_wire_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        _doc("Format of KV over tcp: `auto` keeps it; `int8` and `fp8` halve the bytes and cost accuracy."),
    ] = "auto"
    kv_checksum: Annotated[
        Literal["off", "sampled", "full"],
        _doc("Check received KV: a sixteenth of each block, or all of it. Damaged pieces are sent again."),
    ] = "off"
    kv_tls_cert: Annotated[
        str | None, _doc("Encrypt tcp: PEM file with the workers' certificate, on every host.")
    ] = None
    kv_tls_key: Annotated[str | None, _doc("PEM file with the key of --kv-tls-cert.")] = None
    kv_tls_ca: Annotated[
        str | None, _doc("PEM file with the authority that must have issued peers' certificates.")
    ] = None
    handoff_timeout: Annotated[
        float,
        Meta(gt=0, le=MAX_HANDOFF_S),
        _doc("Seconds without progress after which a hand-off fails; at most a day."),
    ] = 30.0
    worker_timeout: Annotated[
        PositiveSeconds, _doc("Seconds of silence after which a worker's requests move to others.")
    ] = 2.0
    start_timeout: Annotated[PositiveSeconds, _doc("Seconds that workers get to load and register.")] = 600.0

    otlp_traces_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/\s]+")] | None,
        _doc("URL that receives each request as OpenTelemetry spans, as in http://localhost:4318/v1/traces."),
    ] = None
    metric_names: Annotated[
        Literal["tandem", "vllm"],
        _doc("`vllm`: metrics that vLLM has too begin with `vllm:` on /metrics, for tools that read these."),
    ] = "tandem"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _doc("Least level of logged messages.")
    ] = "info"
    log_format: Annotated[
        LogFormat,
        _doc("`json`: each log line is an object, with the ids of its requests."),
    ] = "text"
    enable_log_requests: Annotated[
        bool, _doc("Log a line for each finished request, with its times or the reason why it failed.")
    ] = False

    def num_replicas(self, role: RoleSpec) -> int:
        """Return the number of deployed workers of a role."""
        if role.needs_disaggregation and not self.disaggregation:
            return 0
        return int(getattr(self, role.replicas))

    def num_ranks(self, role: RoleSpec) -> int:
        """Return the number of processes of each worker of a role."""
        return int(getattr(self, role.ranks)) if role.ranks else 1

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the API keys without repetition. If empty, no client needs a key."""
        return tuple(dict.fromkeys(key.strip() for key in (self.api_key or "").split(",") if key.strip()))

    @property
    def needs_api_key(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def num_workers(self) -> int:
        """Return the number of deployed workers, of all roles."""
        return sum(self.num_replicas(role) for role in ROLES.values())

    @property
    def total_ranks(self) -> int:
        """Return the number of processes of all deployed workers."""
        return sum(self.num_replicas(role) * self.num_ranks(role) for role in ROLES.values())

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        if self.served_model_name:
            return self.served_model_name
        name = Path(self.model).name if Path(self.model).exists() else self.model
        return name.removesuffix(".gguf")

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.model


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def field_docs() -> dict[str, tuple[str, Any]]:
    """Return each field's help text and default, for the command line."""
    defaults = ServeConfig()
    docs = {}
    for field in msgspec.inspect.type_info(ServeConfig).fields:  # type: ignore[attr-defined]
        schema = (
            (field.type.extra_json_schema or {}) if isinstance(field.type, msgspec.inspect.Metadata) else {}
        )
        docs[field.name] = (schema.get("description", ""), getattr(defaults, field.name))
    return docs


def transport_names(config: ServeConfig) -> list[str]:
    """Return the transports to offer, best first."""
    return [name.strip() for name in config.kv_transports.split(",") if name.strip()]
