"""`tandem profile`: serves a model for a while, measures it under load, and writes its profile."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from deploy.config import load_config
from deploy.preflight import check_start
from deploy.processes import end_with_parent, import_paths
from deploy.resources import choose_threads
from messaging.files import check_output_file
from planner.calibration import ALWAYS_SPLIT, NUM_BURSTS, calibrate
from planner.profile import Profile, write_profile
from protocol.config import ServeConfig, flag_name
from protocol.errors import TandemError
from worker.cores import host_cores

END_S = 40.0
"""Seconds that the server gets to end before it is killed."""
_LISTENING = "Listening on "


def profile(flags: Mapping[str, Any], config_file: str | None, output: Path, console: Console) -> None:
    """Write the profile of a server with these options. Raises `ConfigError` and other `TandemError`s."""
    config = load_config(flags, config_file=config_file)
    check_start(config)
    check_output_file(output, "--output")
    arguments = _arguments(flags, config)
    if config_file is not None:
        arguments += ["--config", config_file]
    console.print(f"Starting a server of {config.model_name} ...")
    with _serving(arguments, config.start_timeout) as url, Progress(console=console) as bar:
        task = bar.add_task("bursts of requests", total=NUM_BURSTS)
        measured = calibrate(url, [_where(config)], config.api_key, lambda: bar.advance(task))
    measured = msgspec.structs.replace(
        measured, max_num_seqs=config.max_num_seqs, block_size=config.block_size
    )
    write_profile(measured, output)
    console.print(_summary(measured), highlight=False)
    console.print(f"Written: {output}", highlight=False)


def _arguments(flags: Mapping[str, Any], config: ServeConfig) -> list[str]:
    """Return the options as given, plus those that make workers keep to their own cores."""
    arguments = []
    for field, value in flags.items():
        if isinstance(value, bool):
            arguments.append(flag_name(field) if value else f"--no-{flag_name(field)[2:]}")
        elif value is not None:
            arguments += [flag_name(field), str(value)]
    threads = str(choose_threads(config, host_cores())[0])
    arguments += ["--worker-threads", threads, *ALWAYS_SPLIT, "--disaggregation"]
    return [*arguments, "--host", "127.0.0.1", "--port", "0"]


@contextmanager
def _serving(arguments: list[str], start_timeout: float) -> Iterator[str]:
    """Start a server with these arguments, and yield its URL once every worker is ready."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "deploy", "serve", *arguments]
        server = subprocess.Popen(
            command,
            env=os.environ | import_paths(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        overdue = Timer(start_timeout + END_S, server.kill)
        overdue.start()
        try:
            assert server.stdout is not None
            url = _listening(server.stdout)
            overdue.cancel()
            if url is None:
                log.seek(0)
                raise TandemError(f"the server did not start:\n{log.read()[-2000:]}")
            yield url
        finally:
            overdue.cancel()
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if server.stdout is not None:
                server.stdout.close()


def _listening(output: IO[str]) -> str | None:
    for line in output:
        if line.startswith(_LISTENING):
            return line.removeprefix(_LISTENING).split()[0]
    return None


def _where(config: ServeConfig) -> str:
    host = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    return f"Measured by tandem profile: {config.model_name} on {platform.node()}, {host}."


def _summary(measured: Profile) -> str:
    costs, link = measured.costs, measured.link
    return (
        f"A step: {costs.step_s * 1e3:.2f} ms, {costs.row_s * 1e3:.3f} for each sequence; a prompt's token: "
        f"{costs.token_s * 1e6:.1f} us; KV for {measured.kv_tokens} tokens; "
        f"wire: {link.bytes_per_s / 1e9:.2f} GB/s, {link.latency_s * 1e3:.2f} ms"
    )
