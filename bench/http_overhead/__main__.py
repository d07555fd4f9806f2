"""`python -m bench.http_overhead`: what the HTTP API adds to a request and to a token, and its CPU time
beside that of vLLM's own API server, before engines that take the same set time for a step.

Both servers run and take turns, round by round; the client is a process of its own. Ratios are taken
within rounds.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.http_overhead import systems
from bench.http_overhead.measure import CpuTime, Latency, make_prompts, measure_cpu, measure_latency
from bench.peers.process import RunningSystem
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.record import write_results
from bench.serve.client import Target

START_TIMEOUT_S = 180.0
NUM_LATENCY_REQUESTS = 32


class Round(msgspec.Struct, frozen=True):
    latency: Latency
    tandem: CpuTime
    vllm: CpuTime | None = None


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    streams: Annotated[int, typer.Option(min=1)] = 64,
    input_len: Annotated[int, typer.Option(min=1, max=3000, help="tokens per prompt, about")] = 2048,
    output_len: Annotated[int, typer.Option(min=2, max=1000)] = 256,
    step_ms: Annotated[float, typer.Option(min=1.0, help="between two tokens of a stream")] = 20.0,
    with_vllm: Annotated[bool, typer.Option("--vllm/--no-vllm", help="beside vLLM's server")] = True,
    env_dir: Annotated[Path, typer.Option(help="the peers' environments")] = DEFAULT_ENV_DIR,
    output: Annotated[Path | None, typer.Option(help="folder for the figures")] = None,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        model, stamps = folder / "model", folder / "stamps.json"
        systems.write_model(model)
        prompts = make_prompts(model / "tokenizer.json", streams, input_len)
        started = [systems.tandem(model, step_ms / 1e3, stamps)]
        if with_vllm:
            started.append(systems.vllm(model, env_dir.expanduser(), step_ms / 1e3, streams))
        pids = [
            running.enter_context(RunningSystem(each.commands, folder / "logs", START_TIMEOUT_S)).pids[0]
            for each in started
        ]
        targets = [Target(each.base_url, each.model, ignore_eos=True) for each in started]
        found = []
        for _ in range(rounds):
            latency = measure_latency(targets[0], prompts[:NUM_LATENCY_REQUESTS], stamps)
            cpu = [
                measure_cpu(target, pid, prompts, output_len)
                for target, pid in zip(targets, pids, strict=True)
            ]
            found.append(Round(latency, *cpu))
            print(describe(found[-1:]), flush=True)
    print(f"\nmedians of {rounds} rounds\n{describe(found)}")
    if output is not None:
        command = shlex.join(["python", "-m", "bench.http_overhead", *sys.argv[1:]])
        write_results(output, command, {"rounds": msgspec.to_builtins(found)})


def describe(rounds: list[Round]) -> str:
    """Medians, in milliseconds and microseconds."""
    request = statistics.median(each.latency.request_s for each in rounds) * 1e3
    token = statistics.median(each.latency.token_s for each in rounds) * 1e3
    lines = [
        f"prompts of {rounds[0].tandem.prompt_tokens:.0f} tokens: request in to message out "
        f"{request:.2f} ms, token in to event out {token:.2f} ms, together {request + token:.2f} ms",
        f"Tandem's router: {_cpu_of([each.tandem for each in rounds])}",
    ]
    pairs = [(each.tandem, each.vllm) for each in rounds if each.vllm is not None]
    if pairs:
        ratio = statistics.median(ours.per_token_s / theirs.per_token_s for ours, theirs in pairs)
        lines.append(f"vLLM's API server: {_cpu_of([theirs for _, theirs in pairs])}")
        lines.append(f"ratio of the CPU time per token: {ratio:.2f}")
    return "\n".join(lines)


def _cpu_of(found: list[CpuTime]) -> str:
    token = statistics.median(each.per_token_s for each in found) * 1e6
    request = statistics.median(each.per_request_s for each in found) * 1e3
    wall_s = statistics.median(each.wall_s for each in found)
    return f"CPU time {token:.1f} us per token, {request:.2f} ms per request; the streams took {wall_s:.1f} s"


if __name__ == "__main__":
    typer.run(main)
