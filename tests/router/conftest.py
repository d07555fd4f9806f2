"""Fixtures: a small tokenizer, a running router, and workers that connect to it."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from router.server import RouterPlace, RouterServer
from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.router_clients import answer, openai_client, post

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the hunter",
    "def main(arguments):\n    return arguments.get('name', None)\n",
    "naïve café déjà vu, straße, übergröße; 日本語のテキスト, смешанный текст, 🙂🚀👩‍👩‍👧",
    "numbers 0 1 2 3 4 5 6 7 8 9 and punctuation . , ; : ! ? ( ) [ ] { }",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 600) -> FastTokenizer:
    return FastTokenizer.from_str(_trained(vocab_size))


@functools.cache
def _trained(vocab_size: int) -> str:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def fast_tokenizer() -> FastTokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, fast_tokenizer: FastTokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "test-model"
    folder.mkdir()
    fast_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class RunningRouter:
    """A router with uvicorn in a thread, on random ports. `place` is its index among several.

    With `prepares` its preprocessor starts at once, which most tests do not need.
    """

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys | None = None,
        place: RouterPlace | None = None,
        prepares: bool = False,
    ) -> None:
        self.keys = keys or ClusterKeys.generate()
        self.server = RouterServer(config, self.keys, place=place)
        self.url = self.server.url
        self.workers: list[FakeWorker] = []
        started = threading.Event()
        self.thread = threading.Thread(
            target=self.server.run, args=[started.set], kwargs={"prepares": prepares}, daemon=True
        )
        self.thread.start()
        assert started.wait(30)
        # Plain HTTP verifies nothing, and reading the certificate authorities takes longer than all the rest.
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False)

    def add_worker(self, worker_id: str = "decode-0", role: str = "decode", **options: Any) -> FakeWorker:
        endpoints = [self.server.state.link.endpoint]
        worker = FakeWorker(endpoints, self.keys, worker_id, role, **options).start()
        self.workers.append(worker)
        return worker

    def kill(self, worker: FakeWorker) -> None:
        self.workers.remove(worker)
        worker.stop()

    def metric(self, name: str, **labels: str) -> float:
        registry = self.server.state.metrics.registry
        model = {"model_name": self.server.config.model_name}
        return registry.get_sample_value(name, {**labels, **model}) or 0.0

    def close(self) -> None:
        self.http.close()
        self.server.stop()
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        for worker in self.workers:
            worker.stop()


@pytest.fixture
def make_router(model_folder: Path) -> Iterator[Callable[..., RunningRouter]]:
    routers: list[RunningRouter] = []

    def make(prepares: bool = False, **options: Any) -> RunningRouter:
        config = ServeConfig(
            **{"model": str(model_folder), "port": 0, "placement": "least_loaded", **options}
        )
        routers.append(RunningRouter(config, prepares=prepares))
        return routers[-1]

    yield make
    for router in routers:
        router.close()


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield a function that returns an undisturbed worker's answer, without id and time."""
    running = RunningRouter(ServeConfig(model=str(model_folder), port=0, placement="least_loaded"))
    running.add_worker()
    yield lambda **fields: answer(post(running, **fields))
    running.close()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a router whose model says what the test wants, with calls in Hermes' form."""
    from tests.router.scripted import HERMES, Scripted

    folder = tmp_path_factory.mktemp("models") / "hermes"
    scripted = Scripted(folder, HERMES, enable_prefix_caching=True)
    yield scripted
    scripted.close()


@pytest.fixture
def make_scripted(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that starts routers whose model says what the test wants."""
    from tests.router.scripted import Scripted

    made: list[Scripted] = []

    def make(name: str, template: Any, **options: Any) -> Scripted:
        made.append(Scripted(tmp_path / name, template, **options))
        return made[-1]

    yield make
    for scripted in made:
        scripted.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as executor:
        yield executor


@pytest.fixture(scope="module")
def router(model_folder: Path) -> Iterator[RunningRouter]:
    """Start a router with one prefill and one decode worker that repeat the prompt."""
    running = RunningRouter(ServeConfig(model=str(model_folder), port=0, placement="least_loaded"))
    decode = running.add_worker("decode-0", "decode")
    running.add_worker("prefill-0", "prefill", peers={"decode-0": decode})
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(router: RunningRouter) -> Iterator[Any]:
    with openai_client(router.url) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(router: RunningRouter) -> Tokenizer:
    return router.server.state.tokenizer
