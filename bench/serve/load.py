"""The description of a load, and its requests."""

from dataclasses import dataclass
from pathlib import Path

from bench.serve import workload
from bench.serve.workload import LoadRequest
from planner.trace import TraceFit, read_trace

# Measured loads use other seeds, so a warm-up never fills the prefix cache for them.
WARMUP_SEED = 2**32 - 1
DEFAULT_NUM_PROMPTS = 100


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load to send. Field names are the flags of `tandem bench serve`.

    Prompts are random token ids, unless `prompt_file` or `trace` is given. `num_prompts` of None means 100
    random prompts, or all that the file holds. With no `request_rate`, a trace keeps its own times and
    everything else is sent at once.
    """

    num_prompts: int | None = None
    random_input_len: int = 256
    random_output_len: int = 128
    random_prefix_len: int = 0
    random_range_ratio: float = 0.0
    vocab_size: int = 4096
    prompt_file: Path | None = None
    trace: Path | None = None
    trace_scale_lengths: float = 1.0
    trace_speedup: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0

    def requests(self) -> list[LoadRequest]:
        """Return the requests, in order of arrival. Raises ValueError that names the wrong field."""
        requests = self._prompts()
        if self.request_rate is None:
            return requests
        return workload.with_arrivals(requests, self.request_rate, self.burstiness, self.seed)

    def _prompts(self) -> list[LoadRequest]:
        if self.prompt_file is not None and self.trace is not None:
            raise ValueError("--prompt-file and --trace exclude each other")
        if self.trace is not None:
            fit = TraceFit(
                self.trace_scale_lengths, self.max_input_len, self.max_output_len, self.trace_speedup
            )
            lines = read_trace(self.trace, self.num_prompts)
            return workload.from_trace(lines, fit, self.vocab_size, self.seed)
        if self.prompt_file is not None:
            return workload.from_prompt_file(self.prompt_file, self.random_output_len, self.num_prompts)
        return workload.synthetic(
            self.num_prompts or DEFAULT_NUM_PROMPTS,
            self.random_input_len,
            self.random_output_len,
            self.vocab_size,
            self.seed,
            self.random_prefix_len,
            self.random_range_ratio,
        )

    def warmups(self, count: int, first: LoadRequest) -> list[LoadRequest]:
        """Return `count` requests of the size of `first`, with other prompts; a text prompt is repeated."""
        if isinstance(first.prompt, str):
            return [LoadRequest(first.prompt, first.output_len)] * count
        input_len = len(first.prompt)
        return workload.synthetic(count, input_len, first.output_len, self.vocab_size, WARMUP_SEED)
