"""Transformers behind a minimal `/v1/completions`, so that the same load drives it as every other system.

Run with the peer's own Python. `--engine continuous-batching` uses Transformers' paged continuous batching;
`--engine generate` answers one request after another with plain `generate`. (`transformers serve` itself
takes neither token-id prompts nor `ignore_eos`.)
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.peers.http_server import LAST_CHUNK, Incoming, chunk, head, read_request
from bench.serve.http import MAX_HEAD_BYTES, HttpError

NO_EOS = -1


class Engine(Protocol):
    """Generates greedily; yields the new token ids as they come."""

    def stream(self, prompt: list[int], max_tokens: int, eos: int) -> AsyncIterator[list[int]]: ...


class _Relay(BaseStreamer):  # type: ignore[misc]
    """Passes `generate`'s tokens on; its first piece is the prompt."""

    def __init__(self, deliver: Callable[[list[int] | None], object]) -> None:
        self._deliver = deliver
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._deliver(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        self._deliver(None)


class GenerateEngine:
    """Plain `generate`, one request at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._turn = asyncio.Lock()

    async def stream(self, prompt: list[int], max_tokens: int, eos: int) -> AsyncIterator[list[int]]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        relay = _Relay(lambda tokens: loop.call_soon_threadsafe(queue.put_nowait, tokens))
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=None if eos == NO_EOS else eos
        )
        ids = torch.tensor([prompt])

        def run() -> None:
            with torch.inference_mode():
                self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=relay
                )

        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(run))
            # A failure ends the stream too; `await work` then raises it.
            work.add_done_callback(lambda _: queue.put_nowait(None))
            while (tokens := await queue.get()) is not None:
                yield tokens
            await work


class ContinuousBatchingEngine:
    """Transformers' own continuous batching over a paged cache."""

    def __init__(self, model: Any) -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, max_new_tokens=1)
        self._manager = model.init_continuous_batching(generation_config=config)
        self._manager.start()
        self._names = iter(range(2**62))

    async def stream(self, prompt: list[int], max_tokens: int, eos: int) -> AsyncIterator[list[int]]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        name = f"request-{next(self._names)}"
        self._manager.register_result_handler(name, queue.put_nowait)
        self._manager.add_request(
            prompt, request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=eos
        )
        sent = 0
        try:
            while True:
                output = await queue.get()
                if output.error:
                    raise RuntimeError(output.error)
                yield output.generated_tokens[sent:]
                sent = len(output.generated_tokens)
                if output.is_finished():
                    return
        finally:
            self._manager.cancel_request(name)


class Server:
    """Answers `/health` and streamed `/v1/completions` with token-id prompts."""

    def __init__(self, engine: Engine, tokenizer: Any, eos: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos = eos

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            incoming = await read_request(reader)
            if incoming.path == "/health":
                writer.write(head(200, 0))
            else:
                await self._complete(incoming, writer)
        except (HttpError, ValueError, KeyError) as error:
            body = json.dumps({"error": {"message": repr(error)}}).encode()
            writer.write(head(400, len(body)) + body)
        finally:
            writer.close()

    async def _complete(self, incoming: Incoming, writer: asyncio.StreamWriter) -> None:
        fields = json.loads(incoming.body)
        prompt, max_tokens = fields["prompt"], fields["max_tokens"]
        if isinstance(prompt, str):
            prompt = self._tokenizer(prompt)["input_ids"]
        eos = NO_EOS if fields.get("ignore_eos") else self._eos
        writer.write(head(200, None, "text/event-stream"))
        count = 0
        async for tokens in self._engine.stream(prompt, max_tokens, eos):
            if tokens:
                count += len(tokens)
                writer.write(_event({"choices": [{"index": 0, "text": self._tokenizer.decode(tokens)}]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        writer.write(_event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


def _event(fields: dict[str, Any]) -> bytes:
    return chunk(b"data: %b\n\n" % json.dumps(fields).encode())


async def serve(arguments: argparse.Namespace) -> None:
    """Load the model and answer until cancelled."""
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    engines: dict[str, Callable[[Any], Engine]] = {
        "generate": GenerateEngine,
        "continuous-batching": ContinuousBatchingEngine,
    }
    eos = model.config.eos_token_id
    server = Server(engines[arguments.engine](model), tokenizer, NO_EOS if eos is None else eos)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", arguments.port, limit=MAX_HEAD_BYTES)
    async with listener:
        await listener.serve_forever()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=("generate", "continuous-batching"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
