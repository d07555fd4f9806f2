"""The only declaration of each metric. `/metrics` exposes them, `docs/metrics.md` lists them.

Names follow vLLM's where vLLM has the metric, and get the prefix `tandem_` on `/metrics`. Names contain the
unit: seconds or bytes. Workers report metrics with each heartbeat, as `name` or `name{label="value"}`;
undeclared metrics are dropped.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

PREFIX = "tandem_"
Kind = Literal["counter", "gauge", "histogram"]

_NAME = re.compile(r"([a-z][a-z0-9_]{0,99})(?:\{([^{}]*)\})?\Z")
_LABEL = re.compile(r'\s*([a-z][a-z0-9_]*)="?([^",]*)"?\s*\Z')


class Metric(msgspec.Struct, frozen=True):
    """A metric. Its `labels` are in addition to the labels of all metrics of its group."""

    name: str
    help: str
    labels: tuple[str, ...]
    kind: Kind
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, labels, "counter")


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, labels, "gauge")


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, text, (), "histogram", buckets)


_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TRANSFER = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 10.0, 30.0),
)
_COUNT = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0),
    *(50000.0, 100000.0, 200000.0, 500000.0, 1000000.0),
)
_BYTES = tuple(float(4**power) for power in range(6, 19))

ROUTER = (
    _counter("prompt_tokens_total", "Prompt tokens of requests that started."),
    _counter("generation_tokens_total", "Tokens generated."),
    _counter("request_success_total", "Sequences finished.", "finished_reason"),
    _counter("request_failures_total", "Requests that failed.", "kind"),
    _counter("requests_refused_total", "HTTP requests refused, or shed for more urgent ones.", "reason"),
    _counter("messages_dropped_total", "Messages from workers that the router dropped.", "reason"),
    _counter("kv_events_dropped_total", "KV events that the router did not add to its index.", "reason"),
    _counter("kv_event_gaps_total", "Times that the router asked a worker for missed KV events."),
    _gauge("kv_index_blocks", "Distinct blocks in the router's index of the workers' caches."),
    _counter("placements_total", "Placement decisions.", "kind"),
    _counter("draft_plans_total", "Plans of new requests, by where their drafts are made.", "place"),
    _counter("draft_replans_total", "Plans changed during a request.", "reason"),
    _counter("draft_plan_steps_total", "Steps of requests, by where their drafts were made.", "place"),
    _counter("draft_plan_predicted_tokens_total", "Tokens that plans predicted for these steps.", "place"),
    _counter("draft_plan_observed_tokens_total", "Tokens that these steps generated.", "place"),
    _counter("placement_predicted_seconds_total", "Sum of the times that placements predicted.", "quantity"),
    _counter("placement_observed_seconds_total", "Sum of the same times as measured.", "quantity"),
    _counter("placement_error_seconds_total", "Sum of the absolute differences.", "quantity"),
    _gauge("ready", "1 while /ready answers 200, else 0."),
    _gauge("num_workers_awaited", "Workers that should serve but are not ready."),
    _counter("workers_lost_total", "Workers that ended, fell silent or got stuck.", "reason"),
    _counter("processes_replaced_total", "Restarts of workers, actors, templates and Ray.", "process"),
    _counter("requests_placed_again_total", "Requests moved to other workers without their KV.", "reason"),
    _counter("requests_tools_unseen_total", "Requests whose tools the chat template does not show."),
    _counter("requests_fields_ignored_total", "Requests with fields that the server does not know."),
    _counter("requests_lost_total", "Requests that their worker did not know because a message was lost."),
    _counter("races_total", "Copies of requests started on other workers because their own were suspect."),
    _counter("races_unpaid_total", "Times that requests could not race because the budget was spent."),
    _counter("raced_tokens_total", "Tokens that copies had to compute."),
    _counter("raced_seconds_total", "Predicted time of these tokens on their workers."),
    _counter("requests_migrated_total", "Running requests moved to another worker with their KV."),
    _counter("scaling_decisions_total", "Changes of workers' number by --autoscale.", "role", "direction"),
    _counter("scaling_failures_total", "Of these, the ones that were refused or found no node."),
    _gauge("workers_wanted", "Workers that --autoscale wants now.", "role"),
    _counter("handoff_redirects_total", "Hand-offs sent on to another decode worker.", "reason"),
    _counter("handoff_takeovers_total", "Requests that their prefill worker decodes itself.", "reason"),
    _counter("role_fallbacks_total", "Requests served by one worker for lack of the other role.", "missing"),
    _counter("requests_parked_total", "Requests that had to wait for a worker to start."),
    _gauge("num_requests_parked", "Requests that wait for a worker to start."),
    _gauge("num_requests_held", "Requests that wait in the router because their worker is busy.", "api_key"),
    _counter("request_held_seconds_total", "Time that these requests waited.", "api_key"),
    _counter("api_key_tokens_total", "Uncached prompt tokens and expected output sent.", "api_key"),
    _counter("router_cpu_seconds_total", "CPU time of the router's event loop."),
    _counter("router_core_wait_seconds_total", "Time for which the router's event loop waited for a core."),
    _histogram("router_loop_lag_seconds", "Delay of the event loop's timer, four times a second.", _TOKEN),
    _counter("http_responses_total", "HTTP responses.", "status"),
    _counter("http_connections_ended_total", "HTTP connections closed because of the client.", "reason"),
    _counter(
        "preprocessing_failures_total",
        "Tasks that the preprocessor did not finish: it reached a limit, ended or got stuck.",
        "reason",
    ),
    _counter("api_key_reloads_total", "Times that --api-key-file changed and was read.", "outcome"),
    _counter("stored_responses_dropped_total", "Responses deleted for newer ones, or not stored.", "reason"),
    _counter("trace_spans_dropped_total", "Spans that did not reach --otlp-traces-endpoint.", "reason"),
    _histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST),
    _histogram("inter_token_latency_seconds", "Between a sequence's outputs.", _TOKEN),
    _histogram("request_time_per_output_token_seconds", "Mean per sequence, without the first.", _TOKEN),
    _histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST),
    _histogram("request_queue_time_seconds", "Time at a worker before the first chunk.", _REQUEST),
    _histogram("request_prefill_time_seconds", "From the first chunk to the first token.", _REQUEST),
    _histogram("request_decode_time_seconds", "From the first to the last token.", _REQUEST),
    _histogram("request_prompt_tokens", "Prompt tokens of a sequence that finished.", _COUNT),
    _histogram("request_generation_tokens", "Tokens generated for a sequence that finished.", _COUNT),
    _histogram("request_max_num_generation_tokens", "Tokens of a request's longest sequence.", _COUNT),
    _histogram("request_kv_reserve_time_seconds", "Asking the decode worker for blocks.", _TRANSFER),
    _histogram("request_kv_transfer_time_seconds", "From the first push to the last block.", _TRANSFER),
    _histogram(
        "request_kv_transfer_exposed_time_seconds", "The transfer's part after the prefill.", _TRANSFER
    ),
    _histogram("request_kv_transfer_wait_time_seconds", "Time that pieces waited for their turn.", _TRANSFER),
    _histogram("request_kv_handoff_time_seconds", "From the last block to the first decode step.", _TRANSFER),
    _histogram("request_kv_transfer_bytes", "Bytes sent for a prompt.", _BYTES),
)
"""Metrics of the router itself, with the label `model_name`."""

WORKER = (
    _gauge("num_requests_running", "Requests in the running batch."),
    _gauge("num_requests_waiting", "Requests in the queue."),
    _gauge("kv_cache_usage_perc", "Share of the KV pool that requests hold, 0 to 1."),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _counter("num_preemptions_total", "Requests preempted."),
    _counter("engine_steps_total", "Steps run."),
)
"""Metrics of each worker's load, with labels `worker`, `role` and `model_name`."""

WORKER_COUNTERS = (
    _counter("handoffs_total", "Hand-offs acknowledged (prefill) or taken over (decode)."),
    _counter("handoff_seconds_total", "Time from asking for blocks to the acknowledgement."),
    _counter("handoff_failures_total", "Hand-offs that failed."),
    _counter("handoffs_expired_total", "Hand-offs given up for lack of progress."),
    _counter("handoffs_redirected_total", "Hand-offs sent to another decode worker."),
    _counter("handoffs_kept_total", "Requests that the prefill worker continued itself."),
    _counter("reservations_total", "Reservations of blocks granted."),
    _counter("reservation_wait_seconds_total", "Time that reservations waited for room."),
    _counter("reservations_refused_total", "Reservations refused."),
    _counter("reservations_expired_total", "Reservations whose lease ran out."),
    _counter("reservations_released_total", "Reservations given back by the prefill worker."),
    _counter("kv_transfer_failures_total", "Transfers that failed."),
    _counter("kv_blocks_pushed_total", "Blocks pushed."),
    _counter("kv_blocks_skipped_total", "Blocks that the decode worker already had."),
    _counter("prefix_fetches_total", "Prefixes requested from other workers."),
    _counter("prefix_fetch_failures_total", "Requested prefixes that did not arrive."),
    _counter("prefix_fetch_seconds_total", "Time from the request of a prefix to its arrival."),
    _counter("prefix_blocks_fetched_total", "Blocks fetched from other workers."),
    _counter("prefix_blocks_lent_total", "Blocks pushed to workers that requested them."),
    _counter("kv_events_replayed_total", "Batches of KV events sent again because the router missed them."),
    _counter("kv_events_restated_total", "Times that the router got the full list of held blocks again."),
    _counter("remote_drafts_total", "Drafts that draft workers sent."),
    _counter("remote_drafts_stale_total", "Of these, drafts that differed from tokens committed meanwhile."),
    _counter("remote_drafts_late_total", "Of these, drafts that did not go beyond the committed tokens."),
    _counter("remote_drafts_refused_total", "Requests that a draft worker refused to draft for."),
    _counter("draft_workers_lost_total", "Times that a draft worker no longer answered."),
    _gauge("draft_requests_open", "Requests that a draft worker drafts for."),
    _counter("draft_requests_opened_total", "Requests opened at a draft worker."),
    _counter("draft_requests_refused_total", "Requests that a draft worker refused, as for lack of room."),
    _counter("draft_requests_orphaned_total", "Requests whose decode worker was lost, on a draft worker."),
    _counter("draft_requests_expired_total", "Requests that a draft worker dropped because no message came."),
    _counter("drafted_tokens_total", "Tokens that a draft worker drafted."),
    _counter("drafted_tokens_wrong_total", "Of these, tokens that the target rejected."),
    _counter("drafts_overtaken_total", "Times that a target was ahead of its draft worker."),
    _counter("adapter_loads_stalled_total", "Adapter loads given up because no bytes arrived for 10 s."),
    _counter("orphaned_requests_total", "Requests ended because their router was gone."),
    _counter("stale_messages_total", "Messages for an earlier incarnation."),
    _counter("dropped_messages_total", "Messages that could not be sent or read."),
    _counter("duplicate_messages_total", "Messages that came twice, or after a later one."),
    _counter("step_failures_total", "Steps that failed."),
    _counter("loop_seconds_total", "Time in the worker's loop outside steps."),
    _counter("engine_seconds_total", "Time in steps."),
    _counter("lent_core_steps_total", "Steps that also used cores of idle workers on the host."),
    _counter("computed_tokens_total", "Tokens computed."),
)
"""Counters of `worker.parts`, with the same labels."""

REPORTED = (
    *WORKER_COUNTERS,
    _counter("kv_room_wait_seconds_total", "Time in which a request waited for blocks of the KV pool."),
    _counter("kernel_compilations_total", "GPU kernels compiled or loaded after the start."),
    _counter("kernel_compilation_seconds_total", "Time that these took."),
    _gauge("kept_states", "States of recurrent layers in the KV pool, from which prompts can continue."),
    _gauge("kept_state_bytes", "Bytes of the KV pool that these states use."),
    _counter("kept_state_hits_total", "Times that a sequence continued from such a state."),
    _counter("kept_states_saved_total", "Such states saved."),
    _counter("kept_states_evicted_total", "Such states evicted to make room."),
    _gauge("kv_host_blocks", "Blocks that fit into the host tier."),
    _gauge("kv_host_used_blocks", "Blocks in the host tier."),
    _counter("kv_host_hit_blocks_total", "Blocks loaded from the host tier."),
    _counter("kv_host_miss_blocks_total", "Blocks looked up in the host tier but not found."),
    _counter("kv_host_saved_blocks_total", "Blocks saved to the host tier."),
    _counter("kv_host_saved_bytes_total", "Bytes saved to the host tier."),
    _counter("kv_host_save_seconds_total", "Time spent on saving to the host tier."),
    _counter("kv_host_loaded_bytes_total", "Bytes loaded from the host tier."),
    _counter("kv_host_load_seconds_total", "Time spent on loading from the host tier."),
    _counter("kv_host_evicted_blocks_total", "Blocks evicted from the host tier."),
    _gauge("kv_disk_blocks", "Blocks that fit into the disk tier."),
    _gauge("kv_disk_used_blocks", "Blocks in the disk tier."),
    _gauge("kv_disk_queued_blocks", "Blocks queued for reading or writing by the disk tier."),
    _counter("kv_disk_hit_blocks_total", "Blocks read from the disk tier."),
    _counter("kv_disk_miss_blocks_total", "Blocks looked up in the disk tier but not found."),
    _counter("kv_disk_written_blocks_total", "Blocks written to the disk tier."),
    _counter("kv_disk_written_bytes_total", "Bytes written to the disk tier."),
    _counter("kv_disk_write_seconds_total", "Time spent on writing to the disk tier."),
    _counter("kv_disk_read_bytes_total", "Bytes read from the disk tier."),
    _counter("kv_disk_read_seconds_total", "Time spent on reading from the disk tier."),
    _counter("kv_disk_evicted_blocks_total", "Blocks evicted from the disk tier."),
    _counter("kv_disk_dropped_blocks_total", "Blocks lost because the disk was too slow or full."),
    _counter("kv_disk_corrupt_blocks_total", "Blocks on the disk whose checksum was wrong."),
    _counter("kv_disk_foreign_files_total", "Files in the disk tier's folder of another model or format."),
    _counter("kv_disk_io_errors_total", "Reads and writes of the disk tier that failed."),
    _counter("kv_disk_fetch_timeouts_total", "Reads of the disk tier that took too long."),
    _counter("kv_connections_made_total", "Connections for KV made to other workers."),
    _counter("kv_connections_accepted_total", "Connections for KV accepted from other workers."),
    _counter("kv_handshakes_refused_total", "Handshakes for KV refused."),
    _counter("kv_handshakes_dropped_total", "Handshakes for KV dropped because too many ran."),
    _counter("kv_leases_completed_total", "Leases whose blocks all arrived."),
    _counter("kv_leases_failed_total", "Leases given up by the sender."),
    _counter("kv_leases_lost_total", "Leases that ended with their connection."),
    _counter("kv_lease_seconds_total", "Duration of completed leases, summed."),
    _counter("spec_decode_num_drafts_total", "Drafts verified: one for each request and step.", "method"),
    _counter("spec_decode_num_draft_tokens_total", "Drafted tokens that were verified.", "method"),
    _counter("spec_decode_num_accepted_tokens_total", "Drafted tokens that became output.", "method"),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Accepted tokens by place in the draft, from 0.",
        "method",
        "position",
    ),
    _counter("spec_decode_cut_tokens_total", "Drafted tokens that a grammar forbids, unverified.", "method"),
    _counter("spec_decode_draft_seconds_total", "Time spent on drafting.", "method"),
    _counter("spec_decode_choices_total", "Decisions to draft k tokens for up to 64 steps.", "method", "k"),
    _counter("spec_decode_steps_total", "Steps with drafts to verify (`yes`) and without (`no`).", "drafts"),
    _counter("spec_decode_verify_seconds_total", "Time of forwards that verified drafts, with sampling."),
    _counter("spec_decode_lost_drafts_total", "Requests that lost the drafter's state in their hand-off."),
    _counter(
        "spec_decode_unavailable_total", "Requests whose method cannot draft on the worker's host.", "method"
    ),
    _counter("spec_decode_refused_drafts_total", "Invalid drafts of a custom drafter."),
    _counter(
        "spec_acceptance_collapsed_total",
        "Times that acceptance fell below half of its usual value.",
        "method",
        "origin",
    ),
)
"""All metrics that workers report, with the same labels."""

PAIR_STATE = (
    _gauge("kv_transport", "1 for the transport over which a worker sends to its peer."),
    _gauge("kv_transport_refused", "1 for a transport that can't serve this pair, or any pair.", "reason"),
    _gauge("kv_transfer_overlap_ratio", "Share of busy time in which the prompt was still being computed."),
)
PAIR_COUNTERS = (
    _counter("kv_transfer_bytes_total", "Bytes sent to the peer."),
    _counter("kv_transfer_uncoded_bytes_total", "The same bytes before lossless coding."),
    _counter("kv_transfer_pieces_total", "Pieces that the peer acknowledged."),
    _counter("kv_transfer_extents_total", "Runs of adjacent blocks in the pieces."),
    _counter("kv_transfer_wire_seconds_total", "Time in which at least one piece was in flight."),
    _counter("kv_transfer_wait_seconds_total", "Time that pieces waited for their turn, summed."),
    _counter("kv_transfers_total", "Prompts handed over, from the first push to the last acknowledgement."),
    _counter("kv_transfers_failed_total", "Prompts whose transfer to the peer was given up."),
    _counter("kv_transfer_seconds_total", "Duration of transfers, summed."),
    _counter("kv_transfer_busy_seconds_total", "Time in which a part of a prompt was in flight."),
    _counter("kv_transfer_hidden_seconds_total", "Busy time in which the prompt was still being computed."),
    _counter("kv_transfer_resent_pieces_total", "Pieces sent again."),
    _counter("kv_transfer_fallbacks_total", "Changes to this transport because a better one failed."),
    _counter("kv_transfer_recoveries_total", "Changes back to this transport from a worse one."),
    _counter("kv_transfer_leases_expired_total", "Hand-offs given up for lack of progress."),
    _counter("kv_transfer_errors_total", "Errors on the wire; most are repaired by sending again.", "kind"),
    _counter("kv_receive_bytes_total", "Bytes received from the peer."),
    _counter("kv_receive_pieces_total", "Pieces received from the peer."),
    _counter("kv_receive_seconds_total", "From each piece's announcement to its place in the pool, summed."),
)
"""Counters of each worker's transfers with a peer, with the additional labels `peer` and `transport`."""


VLLM = (
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    "request_max_num_generation_tokens",
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
)
"""Metrics that vLLM has under the same names, with the prefix `vllm:`. For load gauges see
`router/observe/metrics.py`.
"""


def reported(key: str, metrics: dict[str, Metric]) -> tuple[Metric, list[str]] | None:
    """Return the metric of `name{label="value",...}` and its labels' values, or None if undeclared."""
    match = _NAME.match(key)
    metric = metrics.get(match[1]) if match else None
    if match is None or metric is None:
        return None
    labels = [_LABEL.match(part) for part in filter(None, (match[2] or "").split(","))]
    values = {label[1]: label[2] for label in labels if label is not None}
    if len(labels) != len(metric.labels) or set(values) != set(metric.labels):
        return None
    return metric, [values[name] for name in metric.labels]
