"""Options of the API, the processes and transfers. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from protocol.fields import MAX_INT, MAX_SECONDS, PositiveInt, PositiveSeconds, listed
from protocol.handoff import MAX_HANDOFF_S
from protocol.logs import LogFormat
from protocol.roles import ROLES, RoleOptions, RoleSpec, WorkerRange

KV_TRANSPORTS = ("shm", "ucx", "cuda_ipc", "tcp", "object_store")

MAX_API_KEYS = 256
"""The most API keys; each key has its own metrics."""


def is_sendable(api_key: str) -> bool:
    """Return whether the header of an HTTP request can hold the key."""
    return api_key.isascii() and api_key.isprintable()


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """The HTTP API: its address, keys and limits, and what it reports."""

    host: str = "127.0.0.1"
    """Address that HTTP listens on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """HTTP port; 0 picks a free one."""
    api_key: str | None = None
    """Bearer tokens of clients, comma-separated; waiting clients take turns. Other users can read flags in
    the process list, so set TANDEM_API_KEY or use --api-key-file.
    """
    api_key_file: str | None = None
    """File of hashed API keys with their limits, made by `tandem key add`; read again when changed."""
    tls_cert: str | None = None
    """Serve HTTPS: PEM file with the certificate and its chain."""
    tls_key: str | None = None
    """PEM file with the key of --tls-cert."""
    root_path: Annotated[str, Meta(pattern=r"^/[^?#]*[^/?#]$")] | None = None
    """Prefix of the API's paths behind a proxy, as in /llm; requests may have it or not."""
    allowed_origins: str | None = None
    """Origins whose pages may use the API from a browser, comma-separated, or `*`. Default: none."""
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    """Largest HTTP request body."""
    max_logprobs: Annotated[int, Meta(ge=0, le=1000)] = 20
    """Most log-probabilities that a request may ask for."""
    max_n: PositiveInt = 128
    """Most sequences that one HTTP request may start (prompts times n)."""
    max_queued_requests: PositiveInt = 4096
    """Most unfinished requests; above it new requests get 429, or less urgent waiting ones do."""
    enable_embeddings: bool = False
    """Serve /v1/embeddings, /score and /v1/rerank; an embedding is the last token's state, scaled to length
    one.
    """
    response_store: str | None = None
    """File that stores the answers of /v1/responses, shared by several routers; default: memory."""
    max_stored_responses: Annotated[int, Meta(ge=0, le=MAX_INT)] = 1000
    """Most stored responses; the oldest are dropped first. 0 stores none."""
    max_stored_response_bytes: PositiveInt = 256 * 1024 * 1024
    """Most bytes that all stored responses may take."""
    request_timeout: PositiveSeconds = 600.0
    """Seconds after which a request fails."""
    slo_ttft: PositiveSeconds | None = None
    """Seconds to the first token: requests that are expected to miss it get 429 at once."""
    slo_tpot: PositiveSeconds | None = None
    """Seconds between two tokens: requests that are expected to miss it get 429 at once."""
    shutdown_timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 10.0
    """Seconds that running requests get at shutdown."""
    otlp_traces_endpoint: Annotated[str, Meta(pattern=r"^https?://[^/\s]+")] | None = None
    """URL that receives each request as OpenTelemetry spans, as in http://localhost:4318/v1/traces."""
    metric_names: Literal["tandem", "vllm"] = "tandem"
    """`vllm`: metrics that vLLM has too begin with `vllm:` on /metrics, for tools that read these."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of logged messages."""
    log_format: LogFormat = "text"
    """`json`: each log line is an object, with the ids of its requests."""
    enable_log_requests: bool = False
    """Log a line for each finished request, with its times or the reason why it failed."""

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the API keys without repetition. If empty, no client needs a key."""
        return tuple(dict.fromkeys(listed(self.api_key)))

    @property
    def origins(self) -> tuple[str, ...]:
        return listed(self.allowed_origins)

    @property
    def needs_api_key(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(RoleOptions):
    """The number, place and supervision of workers and routers, and the placement of requests."""

    disaggregation: bool = True
    """Prefill and decode on separate workers."""
    placement: str = "cost"
    """Placement policy: cost, cache_aware, least_loaded, power_of_two, round_robin, or `module:name` of your
    own.
    """
    prefill_placement: str | None = None
    """Policy for prefill; default: --placement."""
    decode_placement: str | None = None
    """Policy for decode; default: --placement."""
    router_replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    """Router processes; all listen on --port, and each on a further port of its own."""
    autoscale: dict[str, WorkerRange] | None = None
    """Minimum and maximum of workers of roles that scale automatically, as in prefill=1:4,decode=1:8."""
    scale_down_after: PositiveSeconds = 300.0
    """Seconds that fewer workers must have sufficed before --autoscale removes one."""
    scale_timeout: PositiveSeconds = 300.0
    """Seconds that an added worker waits for a node with room."""
    drain_timeout: PositiveSeconds = 30.0
    """Seconds that a leaving worker gets to move its requests to others or to finish them."""
    worker_timeout: PositiveSeconds = 2.0
    """Seconds of silence after which a worker's requests move to others."""
    start_timeout: PositiveSeconds = 600.0
    """Seconds that workers get to load and register."""
    ray_address: str | None = None
    """Ray cluster to join; default: start a local one."""
    min_nodes: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Nodes of the Ray cluster to spread workers over. A start waits for them up to 30 seconds, or up to 10
    minutes while Ray sets hosts up.
    """
    worker_host: str | None = None
    """Address that workers bind to; default: their node's."""
    worker_ports: str | None = None
    """Ports that workers and routers listen on for each other, as in 6500-6599; default: any."""
    worker_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads per worker; default: its share of the host's cores, plus cores of idle workers."""

    def num_replicas(self, role: RoleSpec) -> int:
        if role.needs_disaggregation and not self.disaggregation:
            return 0
        return int(getattr(self, role.replicas))

    def num_ranks(self, role: RoleSpec) -> int:
        """Return the number of processes of each worker of a role."""
        return int(getattr(self, role.ranks)) if role.ranks else 1

    @property
    def num_workers(self) -> int:
        return sum(self.num_replicas(role) for role in ROLES.values())

    @property
    def total_ranks(self) -> int:
        """Return the number of processes of all deployed workers."""
        return sum(self.num_replicas(role) * self.num_ranks(role) for role in ROLES.values())

    @property
    def has_ranks(self) -> bool:
        """Return whether a deployed worker is several processes, its tensor-parallel ranks."""
        return self.total_ranks > self.num_workers


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """The way of KV from one pool to another."""

    kv_transports: str = "shm,ucx,cuda_ipc,tcp"
    """Transports to offer, best first, comma-separated: shm, ucx, cuda_ipc, tcp, and object_store, which
    moves blocks through Ray's object store.
    """
    kv_tcp_streams: Annotated[int, Meta(ge=1, le=64)] = 1
    """Connections per pair of workers over tcp."""
    kv_wire_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Format of KV over tcp: `auto` keeps it; `int8` and `fp8` halve the bytes and cost accuracy."""
    kv_wire_codec: Literal["auto", "off"] = "auto"
    """Code bf16 KV without loss over tcp: `auto` where that is measured to be faster."""
    kv_checksum: Literal["off", "sampled", "full"] = "off"
    """Check received KV: a sixteenth of each block, or all of it. Damaged pieces are sent again."""
    kv_tls_cert: str | None = None
    """Encrypt tcp: PEM file with the workers' certificate, on every host."""
    kv_tls_key: str | None = None
    """PEM file with the key of --kv-tls-cert."""
    kv_tls_ca: str | None = None
    """PEM file with the authority that must have issued peers' certificates."""
    handoff_timeout: Annotated[float, Meta(gt=0, le=MAX_HANDOFF_S)] = 30.0
    """Seconds without progress after which a hand-off fails; at most a day."""

    @property
    def transport_names(self) -> list[str]:
        """The transports to offer, best first."""
        return list(listed(self.kv_transports))

    @property
    def forks_workers(self) -> bool:
        """Whether templates fork workers; `object_store` needs Ray in the worker's process: the actor's."""
        return "object_store" not in self.transport_names
