"""Which tests may run beside which."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

STARTS_RAY = (
    "tests/deploy/test_restart.py",
    "tests/deploy/test_routers.py",
    "tests/deploy/test_scale.py",
    "tests/deploy/test_serve.py",
    "tests/e2e/test_object_store_serving.py",
    "tests/examples/test_examples.py",
    "tests/kvtransfer/test_object_store.py",
)
"""One after the other: Rays that start at the same moment may choose the same ports."""

WAITING = (
    "tests/faults/test_schedules.py",
    "tests/faults/test_freezes.py",
    "tests/faults/test_networks.py",
    "tests/faults/test_wires.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_pools_and_leases.py",
    "tests/faults/test_faulty_conversions.py",
    "tests/worker/test_prefill_redirect.py",
    "tests/router/test_failover.py",
    "tests/router/test_draft_plans.py",
    "tests/router/test_scripted_faults.py",
    "tests/worker/test_decode_reservations.py",
    "tests/router/test_slow_clients.py",
    "tests/worker/test_prefix_fetch.py",
    "tests/worker/test_prefill_handover.py",
    "tests/router/test_faults.py",
    "tests/e2e/test_timeouts.py",
    "tests/router/test_fairness.py",
    "tests/worker/test_coded_kv.py",
    "tests/router/test_several_routers.py",
    "tests/worker/test_worker_life.py",
    "tests/worker/test_transfer_timing.py",
    "tests/kvtransfer/test_handshake.py",
    "tests/kvtransfer/test_abort.py",
    "tests/router/test_parking.py",
    "tests/messaging/test_curve_sockets.py",
)
"""What waits for most of its time. One process begins with these, the others end with them: so the cores are
neither idle nor asked for by all at once.
"""

FIRST = (
    "ray",
    "tests/cluster/test_ray_up.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_failover.py",
    "tests/statistics/test_rejection_sampling.py",
    "tests/engine/test_interpreted_kernels.py",
    "tests/e2e/test_drain.py",
    "tests/worker/test_worker_speculation.py",
    "tests/kvtransfer/test_ucx_faults.py",
    "tests/cluster/test_autoscaling.py",
    "tests/deploy/test_template.py",
    "tests/e2e/test_token_equality.py",
    "tests/e2e/test_draft_worker.py",
    "tests/docs/test_gpu_table.py",
    "tests/cluster/test_links.py",
    "tests/speculation/test_token_equality.py",
    "tests/e2e/test_kill_storm.py",
    "tests/engine/test_packed_quantized.py",
    "tests/bench/test_bench_speculate.py",
    "tests/planner/test_calibration.py",
    "tests/faults/test_whole_requests.py",
    "tests/worker/test_fuzz_peers.py",
    "tests/statistics/test_kv_wire_accuracy.py",
    "tests/bench/test_bench_transfer.py",
    "tests/statistics/test_non_anticipation.py",
    "tests/e2e/test_doctor.py",
    "tests/engine/test_attention_build.py",
    "tests/speculation/test_run_ahead.py",
    "tests/e2e/test_fairness.py",
    "tests/e2e/test_tensor_parallel.py",
    "tests/e2e/test_quantized_weights.py",
    "tests/engine/test_tiers_properties.py",
    "tests/engine/test_block_manager_properties.py",
    "tests/e2e/test_placement.py",
)
"""What takes longest (`--durations`) begins first, or it ends last and alone; then what has most tests."""


class ByModule(LoadScopeScheduling):
    """A module's tests share its servers, so one process has them all.

    The mark `xdist_group` does not do: pytest-xdist 3.8 passes groups on in a way that pytest 9.2 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "ray" if module in STARTS_RAY else module

    def _assign_work_unit(self, node: WorkerController) -> None:
        order = [*FIRST, *(scope for scope in self.workqueue if scope not in WAITING)]
        if node.gateway.id == "gw0":
            order = [*WAITING, *order]
        first = next((scope for scope in order if scope in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
