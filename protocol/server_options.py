"""Options of the API, the processes and transfers. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from protocol.fields import PositiveInt, PositiveSeconds, doc, listed
from protocol.handoff import MAX_HANDOFF_S
from protocol.logs import LogFormat
from protocol.roles import ROLES, RoleOptions, RoleSpec, WorkerRange

KV_TRANSPORTS = ("shm", "ucx", "tcp", "object_store")

MAX_API_KEYS = 256
"""The most API keys; each key has its own metrics."""


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """The HTTP API: its address, keys and limits, and what it reports."""

    host: Annotated[str, doc("Address that HTTP listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), doc("HTTP port; 0 picks a free one.")] = 8000
    api_key: Annotated[
        str | None,
        doc(
            "Bearer tokens of clients, comma-separated; waiting clients take turns. Other users can read "
            "flags in the process list, so set TANDEM_API_KEY or use --api-key-file."
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        doc("File of hashed API keys with their limits, made by `tandem key add`; read again when changed."),
    ] = None
    tls_cert: Annotated[str | None, doc("Serve HTTPS: PEM file with the certificate and its chain.")] = None
    tls_key: Annotated[str | None, doc("PEM file with the key of --tls-cert.")] = None
    root_path: Annotated[
        Annotated[str, Meta(pattern=r"^/[^?#]*[^/?#]$")] | None,
        doc("Prefix of the API's paths behind a proxy, as in /llm; requests may have it or not."),
    ] = None
    allowed_origins: Annotated[
        str | None,
        doc("Origins whose pages may use the API from a browser, comma-separated, or `*`. Default: none."),
    ] = None
    max_body_bytes: Annotated[PositiveInt, doc("Largest HTTP request body.")] = 16 * 1024 * 1024
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000), doc("Most log-probabilities that a request may ask for.")
    ] = 20
    max_n: Annotated[
        PositiveInt, doc("Most sequences that one HTTP request may start (prompts times n).")
    ] = 128
    max_queued_requests: Annotated[
        PositiveInt,
        doc("Most unfinished requests; above it new requests get 429, or less urgent waiting ones do."),
    ] = 4096
    enable_embeddings: Annotated[
        bool,
        doc(
            "Serve /v1/embeddings, /score and /v1/rerank; an embedding is the last token's state, scaled "
            "to length one."
        ),
    ] = False
    response_store: Annotated[
        str | None,
        doc("File that stores the answers of /v1/responses, shared by several routers; default: memory."),
    ] = None
    max_stored_responses: Annotated[
        int, Meta(ge=0), doc("Most stored responses; the oldest are dropped first. 0 stores none.")
    ] = 1000
    max_stored_response_bytes: Annotated[
        PositiveInt, doc("Most bytes that all stored responses may take.")
    ] = 256 * 1024 * 1024
    request_timeout: Annotated[PositiveSeconds, doc("Seconds after which a request fails.")] = 600.0
    slo_ttft: Annotated[
        PositiveSeconds | None,
        doc("Seconds to the first token: requests that are expected to miss it get 429 at once."),
    ] = None
    slo_tpot: Annotated[
        PositiveSeconds | None,
        doc("Seconds between two tokens: requests that are expected to miss it get 429 at once."),
    ] = None
    shutdown_timeout: Annotated[float, Meta(ge=0), doc("Seconds that running requests get at shutdown.")] = (
        10.0
    )
    otlp_traces_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/\s]+")] | None,
        doc("URL that receives each request as OpenTelemetry spans, as in http://localhost:4318/v1/traces."),
    ] = None
    metric_names: Annotated[
        Literal["tandem", "vllm"],
        doc("`vllm`: metrics that vLLM has too begin with `vllm:` on /metrics, for tools that read these."),
    ] = "tandem"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], doc("Least level of logged messages.")
    ] = "info"
    log_format: Annotated[
        LogFormat, doc("`json`: each log line is an object, with the ids of its requests.")
    ] = "text"
    enable_log_requests: Annotated[
        bool, doc("Log a line for each finished request, with its times or the reason why it failed.")
    ] = False

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the API keys without repetition. If empty, no client needs a key."""
        return tuple(dict.fromkeys(listed(self.api_key)))

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the origins whose pages may use the API."""
        return listed(self.allowed_origins)

    @property
    def needs_api_key(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(RoleOptions):
    """The number, place and supervision of workers and routers, and the placement of requests."""

    disaggregation: Annotated[bool, doc("Prefill and decode on separate workers.")] = True
    placement: Annotated[
        str,
        doc(
            "Placement policy: cost, cache_aware, least_loaded, power_of_two, round_robin, "
            "or `module:name` of your own."
        ),
    ] = "cost"
    prefill_placement: Annotated[str | None, doc("Policy for prefill; default: --placement.")] = None
    decode_placement: Annotated[str | None, doc("Policy for decode; default: --placement.")] = None
    router_replicas: Annotated[
        int,
        Meta(ge=1, le=64),
        doc("Router processes; all listen on --port, and each on a further port of its own."),
    ] = 1
    autoscale: Annotated[
        dict[str, WorkerRange] | None,
        doc(
            "Minimum and maximum of workers of roles that scale automatically, as in prefill=1:4,decode=1:8."
        ),
    ] = None
    scale_down_after: Annotated[
        PositiveSeconds, doc("Seconds that fewer workers must have sufficed before --autoscale removes one.")
    ] = 300.0
    scale_timeout: Annotated[
        PositiveSeconds, doc("Seconds that an added worker waits for a node with room.")
    ] = 300.0
    drain_timeout: Annotated[
        PositiveSeconds,
        doc("Seconds that a leaving worker gets to move its requests to others or to finish them."),
    ] = 30.0
    worker_timeout: Annotated[
        PositiveSeconds, doc("Seconds of silence after which a worker's requests move to others.")
    ] = 2.0
    start_timeout: Annotated[PositiveSeconds, doc("Seconds that workers get to load and register.")] = 600.0
    ray_address: Annotated[str | None, doc("Ray cluster to join; default: start a local one.")] = None
    min_nodes: Annotated[
        int,
        Meta(ge=1, le=4096),
        doc(
            "Nodes of the Ray cluster to spread workers over. A start waits for them up to 30 seconds, or up "
            "to 10 minutes while Ray sets hosts up."
        ),
    ] = 1
    worker_host: Annotated[str | None, doc("Address that workers bind to; default: their node's.")] = None
    worker_ports: Annotated[
        str | None,
        doc("Ports that workers and routers listen on for each other, as in 6500-6599; default: any."),
    ] = None
    worker_threads: Annotated[
        PositiveInt | None,
        doc("CPU threads per worker; default: its share of the host's cores, plus cores of idle workers."),
    ] = None

    def num_replicas(self, role: RoleSpec) -> int:
        """Return the number of deployed workers of a role."""
        if role.needs_disaggregation and not self.disaggregation:
            return 0
        return int(getattr(self, role.replicas))

    def num_ranks(self, role: RoleSpec) -> int:
        """Return the number of processes of each worker of a role."""
        return int(getattr(self, role.ranks)) if role.ranks else 1

    @property
    def num_workers(self) -> int:
        """Return the number of deployed workers, of all roles."""
        return sum(self.num_replicas(role) for role in ROLES.values())

    @property
    def total_ranks(self) -> int:
        """Return the number of processes of all deployed workers."""
        return sum(self.num_replicas(role) * self.num_ranks(role) for role in ROLES.values())


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """The way of KV from one pool to another."""

    kv_transports: Annotated[
        str,
        doc(
            "Transports to offer, best first, comma-separated: shm, ucx, tcp, and object_store, "
            "which moves blocks through Ray's object store."
        ),
    ] = "shm,ucx,tcp"
    kv_tcp_streams: Annotated[int, Meta(ge=1, le=64), doc("Connections per pair of workers over tcp.")] = 1
    kv_wire_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        doc("Format of KV over tcp: `auto` keeps it; `int8` and `fp8` halve the bytes and cost accuracy."),
    ] = "auto"
    kv_wire_codec: Annotated[
        Literal["auto", "off"],
        doc("Code bf16 KV without loss over tcp: `auto` where that is measured to be faster."),
    ] = "auto"
    kv_checksum: Annotated[
        Literal["off", "sampled", "full"],
        doc("Check received KV: a sixteenth of each block, or all of it. Damaged pieces are sent again."),
    ] = "off"
    kv_tls_cert: Annotated[
        str | None, doc("Encrypt tcp: PEM file with the workers' certificate, on every host.")
    ] = None
    kv_tls_key: Annotated[str | None, doc("PEM file with the key of --kv-tls-cert.")] = None
    kv_tls_ca: Annotated[
        str | None, doc("PEM file with the authority that must have issued peers' certificates.")
    ] = None
    handoff_timeout: Annotated[
        float,
        Meta(gt=0, le=MAX_HANDOFF_S),
        doc("Seconds without progress after which a hand-off fails; at most a day."),
    ] = 30.0

    @property
    def transport_names(self) -> list[str]:
        """The transports to offer, best first."""
        return list(listed(self.kv_transports))
