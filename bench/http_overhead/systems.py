"""Both API servers, each before an engine of the same set rate, and the model folder that they share."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from bench.peers.ports import HOST, free_port
from bench.peers.process import Command
from bench.peers.systems import SERVED_NAME, Setting, System, parse_system
from bench.record import REPO
from bench.shapes import write_shape
from models.bundled import BUNDLED_MODEL

MAX_MODEL_LEN = 4096

_VLLM = (
    "vllm --distributed-executor-backend bench.peers.vllm_set_rate.SetRateExecutor"
    " --no-async-scheduling --enforce-eager --max-num-batched-tokens"
)


def write_model(folder: Path) -> None:
    """A shape that takes long prompts, with the bundled model's tokenizer."""
    write_shape("llama-29m", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)


def tandem(model: Path, step_s: float, stamps: Path) -> System:
    """The router in a process of its own; its worker writes its times to `stamps`."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    argv = [sys.executable, "-m", "bench.http_overhead.server", "--model", str(model), "--port", str(port)]
    argv += ["--served-model-name", SERVED_NAME, "--step-ms", str(step_s * 1e3), "--stamps", str(stamps)]
    argv += ["--max-model-len", str(MAX_MODEL_LEN)]
    command = Command("tandem", argv, f"{url}/ready", {"PYTHONPATH": str(REPO)})
    return System("tandem", url, SERVED_NAME, (command,))


def vllm(model: Path, env_dir: Path, step_s: float, streams: int) -> System:
    """vLLM's OpenAI server; its engine is a process of its own. Raises ValueError when it isn't installed."""
    setting = Setting(model, env_dir, MAX_MODEL_LEN, max_num_seqs=streams, kv_gib=4)
    system = parse_system(f"{_VLLM} {streams * MAX_MODEL_LEN}", setting)
    env = {"PYTHONPATH": str(REPO), "TANDEM_BENCH_STEP_S": str(step_s)}
    commands = [dataclasses.replace(each, env={**each.env, **env}) for each in system.commands]
    return dataclasses.replace(system, label="vllm", commands=tuple(commands))
