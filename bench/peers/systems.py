"""The systems that can be compared, each as the commands that start it.

A spec is `[label=]name [flags...]`: a system's name, then flags that its server gets unchanged; or
`[label=]http://... [model name]` for a server that already runs. Peers run from their own environments, made
by `tandem bench setup`.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from bench.peers.llama_cpp import LlamaCpp
from bench.report import REPO
from bench.servers import HOST, Command, free_port, tandem_command
from checkpoints.source import hf_source

SERVED_NAME = "model"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """Settings shared by all systems of a comparison."""

    model: Path
    env_dir: Path
    max_model_len: int = 2048
    max_num_seqs: int = 32
    kv_gib: int = 2
    threads: int = 2


@dataclass(frozen=True, slots=True)
class System:
    """A system ready to start. `commands` is empty if its server already runs."""

    label: str
    base_url: str
    model: str
    commands: tuple[Command, ...] = ()


Builder = Callable[[SystemSettings, Sequence[str]], list[Command]]
"""A function that returns a system's commands with these server flags; the last command has its URL."""


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _tandem(setting: SystemSettings, extra: Sequence[str], fixed: Sequence[str]) -> list[Command]:
    options = ["--model", str(setting.model), "--served-model-name", SERVED_NAME]
    options += ["--max-model-len", str(setting.max_model_len)]
    options += ["--max-num-seqs", str(setting.max_num_seqs)]
    options += ["--kv-cache-memory-bytes", str(setting.kv_gib << 30), "--dtype", "bfloat16"]
    return [tandem_command(*options, *fixed, *extra)]


def _vllm_command(
    setting: SystemSettings,
    name: str,
    port: int,
    extra: Sequence[str],
    env: dict[str, str],
    launcher: Sequence[str],
) -> Command:
    python = setting.env_dir / "vllm" / "bin" / "python"
    argv = [str(python), *launcher, "--model", str(setting.model), "--served-model-name", SERVED_NAME]
    argv += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    argv += ["--max-model-len", str(setting.max_model_len), "--max-num-seqs", str(setting.max_num_seqs)]
    argv += ["--no-enable-log-requests", "--disable-uvicorn-access-log", *extra]
    common = {
        "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(name, argv, f"{_url(port)}/health", common | env)


_VLLM_SERVER = ("-m", "vllm.entrypoints.openai.api_server")


def _vllm_threads(setting: SystemSettings, threads: int) -> dict[str, str]:
    """Return an environment in which vLLM's server runs `threads` threads, bound to no core, with the OpenMP
    library that its manual advises.

    As shipped, vLLM binds its threads to cores and leaves one core (with a connector, two) to its scheduler.
    """
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(threads),
    }
    openmp = setting.env_dir / "vllm" / "lib" / "libiomp5.so"
    return env | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _vllm(setting: SystemSettings, extra: Sequence[str], tamed: bool) -> list[Command]:
    """Return one server. Tamed, it uses all threads."""
    env = _vllm_threads(setting, setting.threads) if tamed else {}
    return [_vllm_command(setting, "vllm", free_port(), extra, env, _VLLM_SERVER)]


def _vllm_disaggregated(setting: SystemSettings, extra: Sequence[str], tamed: bool) -> list[Command]:
    """Return one prefill and one decode server with our proxy in front.

    Tamed, NIXL's progress thread waits for events instead of spinning, and each server gets its share of the
    threads without being bound to cores; as shipped both bind to the same core.
    """
    launcher = (str(_HERE / "vllm_tamed.py"),) if tamed else _VLLM_SERVER
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
    if tamed:
        env |= _vllm_threads(setting, max(1, setting.threads // 2))
    commands, ports = [], []
    for role, name in (("kv_producer", "vllm-prefill"), ("kv_consumer", "vllm-decode")):
        port = free_port()
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        flags = ["--kv-transfer-config", json.dumps(transfer), *extra]
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        commands.append(_vllm_command(setting, name, port, flags, env | side, launcher))
        ports.append(port)
    port = free_port()
    argv = [sys.executable, "-m", "bench.peers.vllm_proxy", "--host", HOST, "--port", str(port)]
    argv += ["--prefill", _url(ports[0]), "--decode", _url(ports[1])]
    return [*commands, Command("vllm-proxy", argv, f"{_url(port)}/health", {"PYTHONPATH": str(REPO)})]


def _llama_cpp(setting: SystemSettings, extra: Sequence[str], type: str) -> list[Command]:
    """Return llama-server with weights in this GGUF type, and a separate KV cache for each request."""
    port = free_port()
    llama = LlamaCpp(setting.env_dir / "llama.cpp")
    llama.check_installed()
    argv = [sys.executable, "-m", "bench.peers.llama_cpp", "--home", str(llama.home)]
    argv += ["--model", str(setting.model), "--type", type]
    argv += ["--", "--host", HOST, "--port", str(port), "--alias", SERVED_NAME]
    argv += ["--threads", str(setting.threads), "--parallel", str(setting.max_num_seqs), "--no-kv-unified"]
    argv += ["--ctx-size", str(setting.max_num_seqs * setting.max_model_len), *extra]
    return [Command("llama.cpp", argv, f"{_url(port)}/health", {"PYTHONPATH": str(REPO)})]


SYSTEMS: dict[str, Builder] = {
    "tandem": partial(_tandem, fixed=("--prefill-replicas", "1", "--decode-replicas", "1")),
    "tandem-colocated": partial(_tandem, fixed=("--no-disaggregation",)),
    "vllm": partial(_vllm, tamed=False),
    "vllm-tamed": partial(_vllm, tamed=True),
    "vllm-disaggregated": partial(_vllm_disaggregated, tamed=False),
    "vllm-disaggregated-tamed": partial(_vllm_disaggregated, tamed=True),
    "llama.cpp": partial(_llama_cpp, type="bf16"),
    "llama.cpp-q8_0": partial(_llama_cpp, type="q8_0"),
    "llama.cpp-q4_0": partial(_llama_cpp, type="q4_0"),
}


def labels_of(specs: Sequence[str], setting: SystemSettings) -> list[str]:
    """Return the systems' labels. Raises BadParameter if a spec is wrong, or two systems have one label."""
    try:
        labels = [parse_system(spec, setting).label for spec in specs]
    except ValueError as error:
        raise typer.BadParameter(f"--system: {error}") from error
    for label in labels:
        if labels.count(label) > 1:
            raise typer.BadParameter(f"--system: two are labelled {label!r}; name one as in other={label}")
    return labels


def parse_system(spec: str, setting: SystemSettings) -> System:
    """Parse a spec and reserve its ports. Raises ValueError if the system is unknown or its environment is
    missing.
    """
    words = shlex.split(spec)
    if not words:
        raise ValueError("a system's spec is empty")
    label, _, name = words[0].rpartition("=")
    if name.startswith(("http://", "https://")):
        return System(label or name, name, words[1] if len(words) > 1 else SERVED_NAME)
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}, or a URL")
    commands = SYSTEMS[name](setting, words[1:])
    for command in commands:
        if not os.access(command.argv[0], os.X_OK):
            raise ValueError(f"{command.argv[0]} is missing: run `tandem bench setup`")
    return System(label or spec, commands[-1].base_url, SERVED_NAME, tuple(commands))


def vocab_size_of(model: Path) -> int:
    """Return the vocabulary size from the configuration of a model's folder or GGUF file."""
    config = Path(hf_source(str(model))) / "config.json"
    return int(json.loads(config.read_text())["vocab_size"])
