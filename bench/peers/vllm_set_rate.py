"""An engine for vLLM's own server whose steps take a set time and repeat one more token of each prompt.

`--distributed-executor-backend bench.peers.vllm_set_rate.SetRateExecutor`, in vLLM's environment, with the
seconds of a step in TANDEM_BENCH_STEP_S. API server, scheduler and the messages between their processes are
vLLM's; the model is loaded and never run.
"""

import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class _Running:
    prompt: list[int]
    num_computed: int
    num_sent: int = 0

    def advance(self, num_tokens: int) -> list[int]:
        self.num_computed += num_tokens
        if self.num_computed < len(self.prompt):
            return []
        self.num_sent += 1
        return [self.prompt[(self.num_sent - 1) % len(self.prompt)]]


class SetRateExecutor(UniProcExecutor):
    """Needs `--no-async-scheduling`."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._step_s = float(os.environ["TANDEM_BENCH_STEP_S"])
        self._next_step = time.monotonic()
        self._running: dict[str, _Running] = {}

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._running.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._running[new.req_id] = _Running(new.prompt_token_ids, new.num_computed_tokens)
        scheduled = scheduler_output.num_scheduled_tokens
        tokens = [self._running[request_id].advance(count) for request_id, count in scheduled.items()]
        if scheduled:
            time.sleep(max(0.0, self._next_step - time.monotonic()))
            self._next_step = max(self._next_step + self._step_s, time.monotonic())
        output = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
            sampled_token_ids=tokens,
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future
