"""The panels of each Grafana dashboard."""

from __future__ import annotations

from deploy.promql import Panel, counters, quantiles, rate, share, value
from protocol.metrics import PREFIX

W = "worker"
THIS = '{worker=~"$worker"}'

DASHBOARDS: dict[str, list[Panel]] = {
    "overview": [
        Panel(
            "Requests",
            "reqps",
            {"{{finished_reason}}": rate("request_success_total", "finished_reason")}
            | {"failed: {{kind}}": rate("request_failures_total", "kind")}
            | {"refused: {{reason}}": rate("requests_refused_total", "reason")},
        ),
        Panel(
            "Tokens", "short", counters({"prompt": "prompt_tokens_total", "out": "generation_tokens_total"})
        ),
        Panel("HTTP responses", "reqps", {"{{status}}": rate("http_responses_total", "status")}),
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
        Panel("Time of a request", "s", quantiles("e2e_request_latency_seconds")),
        Panel(
            "Requests at workers",
            "short",
            {"{{worker}} running": value("num_requests_running", W)}
            | {"{{worker}} waiting": value("num_requests_waiting", W)},
        ),
        Panel(
            "Requests in the router",
            "short",
            {"parked": value("num_requests_parked"), "held": value("num_requests_held")},
        ),
        Panel("KV pool in use", "percentunit", {"{{worker}}": value("kv_cache_usage_perc", W)}),
        Panel(
            "Failover",
            "reqps",
            {"placed again: {{reason}}": rate("requests_placed_again_total", "reason")}
            | counters({"lost": "requests_lost_total", "migrated": "requests_migrated_total"}),
        ),
        Panel(
            "Workers that report", "short", {"{{role}}": f"count by (role) ({PREFIX}num_requests_running)"}
        ),
        Panel(
            "Router",
            "percentunit",
            counters(
                {"CPU": "router_cpu_seconds_total", "waits for a core": "router_core_wait_seconds_total"}
            ),
        ),
    ],
    "transfer": [
        Panel("Bytes sent", "Bps", {"{{worker}} to {{peer}}": rate("kv_transfer_bytes_total", W, "peer")}),
        Panel("Transport in use", "short", {"{{transport}}": value("kv_transport", "transport")}),
        Panel(
            "Share of transfers hidden by the prefill",
            "percentunit",
            {
                "{{worker}}": share(
                    rate("kv_transfer_hidden_seconds_total", W), rate("kv_transfer_busy_seconds_total", W)
                )
            },
        ),
        Panel("Transfer of a prompt", "s", quantiles("request_kv_transfer_time_seconds")),
        Panel("Of that, after the prefill", "s", quantiles("request_kv_transfer_exposed_time_seconds")),
        Panel("Hand-off", "s", quantiles("request_kv_handoff_time_seconds")),
        Panel("Bytes of a prompt", "bytes", quantiles("request_kv_transfer_bytes")),
        Panel("Asking for blocks", "s", quantiles("request_kv_reserve_time_seconds")),
        Panel("Pieces waiting", "s", quantiles("request_kv_transfer_wait_time_seconds")),
        Panel(
            "Fallbacks and repairs",
            "ops",
            {"fallback to {{transport}}": rate("kv_transfer_fallbacks_total", "transport")}
            | {"back to {{transport}}": rate("kv_transfer_recoveries_total", "transport")}
            | {"{{transport}}: {{kind}}": rate("kv_transfer_errors_total", "transport", "kind")}
            | counters({"sent again": "kv_transfer_resent_pieces_total"}),
        ),
        Panel(
            "Hand-offs",
            "ops",
            counters(
                {
                    "done": "handoffs_total",
                    "failed": "handoff_failures_total",
                    "expired": "handoffs_expired_total",
                    "redirected": "handoffs_redirected_total",
                    "kept": "handoffs_kept_total",
                },
                "role",
            ),
        ),
        Panel(
            "Leases that ended badly",
            "ops",
            counters(
                {
                    "failed": "kv_leases_failed_total",
                    "lost": "kv_leases_lost_total",
                    "expired": "reservations_expired_total",
                    "refused": "reservations_refused_total",
                }
            ),
        ),
    ],
    "speculation": [
        Panel(
            "Acceptance rate",
            "percentunit",
            {
                "{{worker}} {{method}}": share(
                    rate("spec_decode_num_accepted_tokens_total", W, "method"),
                    rate("spec_decode_num_draft_tokens_total", W, "method"),
                )
            },
        ),
        Panel(
            "Tokens of a round with drafts",
            "short",
            {
                "{{worker}} {{method}}": "1 + "
                + share(
                    rate("spec_decode_num_accepted_tokens_total", W, "method"),
                    rate("spec_decode_num_drafts_total", W, "method"),
                )
            },
        ),
        Panel(
            "Accepted by place in the draft",
            "short",
            {"place {{position}}": rate("spec_decode_num_accepted_tokens_per_pos_total", "position")},
        ),
        Panel("Tokens chosen to draft", "ops", {"K = {{k}}": rate("spec_decode_choices_total", "k")}),
        Panel("Steps with drafts", "ops", {"{{drafts}}": rate("spec_decode_steps_total", "drafts")}),
        Panel(
            "Time spent",
            "percentunit",
            {"drafting by {{method}}": rate("spec_decode_draft_seconds_total", "method")}
            | counters({"verifying": "spec_decode_verify_seconds_total"}),
        ),
        Panel("Plans, by place", "ops", {"{{place}}": rate("draft_plans_total", "place")}),
        Panel(
            "Tokens of a planned step",
            "short",
            {
                f"{name} {{{{place}}}}": share(
                    rate(f"draft_plan_{name}_tokens_total", "place"), rate("draft_plan_steps_total", "place")
                )
                for name in ("predicted", "observed")
            },
        ),
        Panel(
            "Changes of plans",
            "ops",
            {"{{reason}}": rate("draft_replans_total", "reason")}
            | {"trial: {{place}}": rate("draft_trials_total", "place")},
        ),
        Panel(
            "Draft workers",
            "short",
            {
                "{{worker}} drafted": rate("drafted_tokens_total", W),
                "{{worker}} wrong": rate("drafted_tokens_wrong_total", W),
            },
        ),
        Panel(
            "Useless drafts",
            "ops",
            counters(
                {
                    "stale": "remote_drafts_stale_total",
                    "late": "remote_drafts_late_total",
                    "refused": "remote_drafts_refused_total",
                    "overtaken": "drafts_overtaken_total",
                }
            ),
        ),
        Panel(
            "Trouble",
            "ops",
            {"collapsed: {{method}}": rate("spec_acceptance_collapsed_total", "method")}
            | counters(
                {
                    "lost draft": "spec_decode_lost_drafts_total",
                    "refused draft": "spec_decode_refused_drafts_total",
                    "lost worker": "draft_workers_lost_total",
                }
            ),
        ),
    ],
    "cache": [
        Panel(
            "Share of prompts found",
            "percentunit",
            {"{{worker}}": share(rate("prefix_cache_hits_total", W), rate("prefix_cache_queries_total", W))},
        ),
        Panel("KV pool in use", "percentunit", {"{{worker}}": value("kv_cache_usage_perc", W)}),
        Panel(
            "Lack of room",
            "short",
            {
                "{{worker}} preemptions": rate("num_preemptions_total", W),
                "{{worker}} s/s waited": rate("kv_room_wait_seconds_total", W),
            },
        ),
        *(
            Panel(
                f"{tier.title()} tier",
                "short",
                {
                    "{{worker}} used": value(f"kv_{tier}_used_blocks", W),
                    "{{worker}} room": value(f"kv_{tier}_blocks", W),
                },
            )
            for tier in ("host", "disk")
        ),
        Panel(
            "Share of blocks found in tiers",
            "percentunit",
            {
                tier: share(
                    rate(f"kv_{tier}_hit_blocks_total"),
                    rate(f"kv_{tier}_hit_blocks_total"),
                    rate(f"kv_{tier}_miss_blocks_total"),
                )
                for tier in ("host", "disk")
            },
        ),
        Panel(
            "Bytes to and from tiers",
            "Bps",
            counters(
                {
                    "host, saved": "kv_host_saved_bytes_total",
                    "host, loaded": "kv_host_loaded_bytes_total",
                    "disk, written": "kv_disk_written_bytes_total",
                    "disk, read": "kv_disk_read_bytes_total",
                }
            ),
        ),
        Panel(
            "Disk trouble",
            "ops",
            counters(
                {
                    "dropped": "kv_disk_dropped_blocks_total",
                    "corrupt": "kv_disk_corrupt_blocks_total",
                    "errors": "kv_disk_io_errors_total",
                    "late": "kv_disk_fetch_timeouts_total",
                }
            ),
        ),
        Panel(
            "Prefixes from other workers",
            "ops",
            counters(
                {
                    "asked": "prefix_fetches_total",
                    "failed": "prefix_fetch_failures_total",
                    "blocks": "prefix_blocks_fetched_total",
                },
                W,
            ),
        ),
        Panel("Blocks that the router knows", "short", {"blocks": value("kv_index_blocks")}),
        Panel(
            "KV events missed",
            "ops",
            counters({"gaps": "kv_event_gaps_total", "restated": "kv_events_restated_total"})
            | {"dropped: {{reason}}": rate("kv_events_dropped_total", "reason")},
        ),
    ],
    "placement": [
        Panel("Decisions", "ops", {"{{kind}}": rate("placements_total", "kind")}),
        *(
            Panel(
                f"{quantity.upper()}: predicted and observed",
                "short",
                {
                    name: rate(f"placement_{name}_seconds_total", where=f'{{quantity="{quantity}"}}')
                    for name in ("predicted", "observed", "error")
                },
            )
            for quantity in ("ttft", "tpot")
        ),
        Panel("Requests at workers", "short", {"{{worker}}": value("num_requests_running", W)}),
        Panel("Queue at workers", "s", quantiles("request_queue_time_seconds")),
        Panel("Prefill", "s", quantiles("request_prefill_time_seconds")),
        Panel(
            "Held in the router, by API key",
            "short",
            {"{{api_key}}": value("num_requests_held", "api_key")},
        ),
        Panel("Tokens sent, by API key", "short", {"{{api_key}}": rate("api_key_tokens_total", "api_key")}),
        Panel("Refused", "reqps", {"{{reason}}": rate("requests_refused_total", "reason")}),
        Panel(
            "Other than planned",
            "ops",
            {"redirected: {{reason}}": rate("handoff_redirects_total", "reason")}
            | {"taken over: {{reason}}": rate("handoff_takeovers_total", "reason")}
            | {"no {{missing}} worker": rate("role_fallbacks_total", "missing")}
            | counters({"parked": "requests_parked_total"}),
        ),
        Panel("Lag of the router", "s", quantiles("router_loop_lag_seconds")),
    ],
    "worker": [
        Panel(
            "Requests",
            "short",
            {
                "{{worker}} running": value("num_requests_running", W, where=THIS),
                "{{worker}} waiting": value("num_requests_waiting", W, where=THIS),
            },
        ),
        Panel("Steps", "ops", {"{{worker}}": rate("engine_steps_total", W, where=THIS)}),
        Panel("Tokens computed", "short", {"{{worker}}": rate("computed_tokens_total", W, where=THIS)}),
        Panel(
            "Time of a step",
            "s",
            {
                "{{worker}}": share(
                    rate("engine_seconds_total", W, where=THIS), rate("engine_steps_total", W, where=THIS)
                )
            },
        ),
        Panel(
            "Where the time goes",
            "percentunit",
            {
                "{{worker}} in steps": rate("engine_seconds_total", W, where=THIS),
                "{{worker}} between steps": rate("loop_seconds_total", W, where=THIS),
            },
        ),
        Panel("KV pool in use", "percentunit", {"{{worker}}": value("kv_cache_usage_perc", W, where=THIS)}),
        Panel("Steps on lent cores", "ops", {"{{worker}}": rate("lent_core_steps_total", W, where=THIS)}),
        Panel(
            "Sent to peers",
            "Bps",
            {
                "to {{peer}} over {{transport}}": rate(
                    "kv_transfer_bytes_total", "peer", "transport", where=THIS
                )
            },
        ),
        Panel(
            "Received from peers",
            "Bps",
            {"from {{peer}}": rate("kv_receive_bytes_total", "peer", where=THIS)},
        ),
        Panel(
            "Trouble",
            "ops",
            counters(
                {
                    "failed steps": "step_failures_total",
                    "failed transfers": "kv_transfer_failures_total",
                    "dropped messages": "dropped_messages_total",
                    "stale messages": "stale_messages_total",
                    "duplicate messages": "duplicate_messages_total",
                },
                W,
                where=THIS,
            ),
        ),
    ],
}
