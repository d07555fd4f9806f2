"""`python -m bench.http_overhead.server`: the real router and a worker without a model, a process each."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Annotated

import typer

from bench.compare import vocab_size_of
from bench.http_overhead.worker import SetRateWorker
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from router.server import RouterServer


def _work(
    endpoint: str, keys: ClusterKeys, step_s: float, vocab_size: int, max_model_len: int, stamps: Path
) -> None:
    SetRateWorker(endpoint, keys, step_s, vocab_size, max_model_len).run(stamps)


def main(
    model: Annotated[Path, typer.Option(help="folder with the tokenizer")],
    port: Annotated[int, typer.Option()],
    served_model_name: Annotated[str, typer.Option()],
    step_ms: Annotated[float, typer.Option(help="between two tokens of a stream")],
    stamps: Annotated[Path, typer.Option(help="where the worker's times go")],
    max_model_len: Annotated[int, typer.Option()] = 4096,
) -> None:
    """Serve until SIGTERM."""
    keys = ClusterKeys.generate()
    config = ServeConfig(model=str(model), port=port, served_model_name=served_model_name)
    server = RouterServer(config, keys)
    arguments = (server.worker_endpoint, keys, step_ms / 1e3, vocab_size_of(model), max_model_len, stamps)
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=arguments, daemon=True)
    worker.start()
    gc.freeze()  # as the product's process does
    server.run()
    worker.kill()


if __name__ == "__main__":
    typer.run(main)
