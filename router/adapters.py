"""The LoRA adapters that requests may name. All workers of the model have all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from protocol.errors import InvalidRequestError
from protocol.requests import MAX_ADAPTERS, Adapter
from protocol.router_to_worker import LoadAdapter, UnloadAdapter
from protocol.worker_to_router import AdapterLoaded
from router.dispatch import Core
from router.errors import ApiError, failed_generation, unavailable
from router.reading.prepared import unknown_model
from router.scaling.interface import ChangeTurns
from router.workers.registry import Worker

logger = logging.getLogger(__name__)


class AdapterTable:
    """The adapters by name. Only `find` may be called off the event loop.

    The first worker reports the adapters of `--lora-modules`; after that this table decides. A worker that
    registers must load and unload what differs before it gets a request. With several routers, one at a time
    changes the table and calls `publish` to inform the others.
    """

    def __init__(self, core: Core, turns: ChangeTurns) -> None:
        self._config, _, self._registry, _, self._send = core
        self._turns = turns
        self.publish: Callable[[str, Adapter | None], None] = lambda name, adapter: None
        """Called with a name and the adapter that it means now; None: it means no adapter."""
        self._named: dict[str, Adapter] | None = None
        self._early_changes: dict[str, Adapter | None] = {}
        """Changes that other routers reported before the first worker registered."""
        self._waiting: dict[tuple[Worker, str], asyncio.Future[AdapterLoaded]] = {}
        self._lock = asyncio.Lock()

    @property
    def named(self) -> Mapping[str, Adapter]:
        return self._named or {}

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._config.model_names, *self.named)

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of a request's `model`, None for the model itself. Raises `ApiError` 404."""
        if name is None or name in self._config.model_names:
            return None
        adapter = self.named.get(name)
        if adapter is None:
            raise unknown_model(name, self.names)
        return adapter

    def synchronize(self, worker: Worker) -> None:
        if worker.role.holds_draft:
            return
        if self._named is None:
            self._named = self._first_named(worker)
        for adapter in worker.adapters:
            if self._named.get(adapter.name) != adapter:
                self._send_unload(worker, adapter.name)
        for adapter in self._named.values():
            if adapter not in worker.adapters:
                self._send_load(worker, adapter.name, adapter.path, adapter.digest)

    def _first_named(self, worker: Worker) -> dict[str, Adapter]:
        """Return the adapters that the first worker reports, with the changes that other routers reported.

        With several routers only the adapters of `--lora-modules` count: the worker's other adapters are
        still being loaded by another router, which will report them.
        """
        at_start = self._config.lora_modules or {}
        is_alone = self._config.router_replicas == 1
        own = {each.name: each for each in worker.adapters if is_alone or each.name in at_start}
        return {name: adapter for name, adapter in (own | self._early_changes).items() if adapter is not None}

    def answered(self, message: AdapterLoaded) -> None:
        worker = self._registry.current(message.worker_id, message.incarnation)
        waiting = self._waiting.pop((worker, message.name), None) if worker is not None else None
        if waiting is not None:
            waiting.set_result(message)
        elif message.error:
            logger.error("worker %s has no adapter %s: %s", message.worker_id, message.name, message.error)

    def lost(self, worker: Worker) -> None:
        """Cancel the worker's pending loads. Its next incarnation must load them when it registers."""
        for key, waiting in list(self._waiting.items()):
            if key[0] is worker:
                del self._waiting[key]
                waiting.cancel()

    def apply(self, name: str, adapter: Adapter | None) -> None:
        """Apply a change of the adapter that a name means, made here or reported by another router."""
        if self._named is None:
            self._early_changes[name] = adapter
        elif adapter is None:
            self._named.pop(name, None)
            self._forget(name)
        else:
            self._named[name] = adapter
            for worker in self._registry:  # includes workers that came in the meantime
                if not worker.role.holds_draft:
                    self._send_load(worker, name, adapter.path, adapter.digest)

    async def load(self, name: str, path: str) -> None:
        """Load the adapter on every worker, or on none. Raises `ApiError` or `InvalidRequestError`."""
        async with self._turn():
            self._check_new(name)
            workers = [each for each in self._registry if each.live and not each.role.holds_draft]
            if self._named is None or not workers:
                raise unavailable("no worker is ready")
            answers = await self._ask(workers, name, path)
            failed = [answer for answer in answers if answer.error]
            errors = [answer.error for answer in failed]
            if not errors and len({answer.digest for answer in answers}) > 1:
                errors = ["the workers' hosts have different files there"]
            if errors or not answers:
                self._forget(name)
                if failed and failed[0].error_kind != "invalid":
                    raise failed_generation(failed[0].error_kind, f"lora_path: {failed[0].error}")
                raise InvalidRequestError("lora_path", errors[0] if errors else "every worker was lost")
            self._change(name, Adapter(name=name, path=path, digest=answers[0].digest))

    async def unload(self, name: str) -> None:
        """Unload the adapter. Requests that use it run to their end. Raises `ApiError`."""
        async with self._turn():
            if name not in self.named:
                raise ApiError(404, f"lora_name: there is no adapter {name!r}", param="lora_name")
            self._change(name, None)

    def _change(self, name: str, adapter: Adapter | None) -> None:
        self.apply(name, adapter)
        self.publish(name, adapter)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Exclude every other change of adapters, also of other routers. Raises `ApiError`."""
        if not self._config.serves_adapters:
            raise ApiError(400, "adapters are not served: start the server with --enable-lora")
        async with self._lock, self._turns.hold("change of adapters"):
            yield

    def _check_new(self, name: str) -> None:
        if name in self._config.model_names:
            raise InvalidRequestError("lora_name", f"{name!r} is the model's name")
        if name in self.named:
            raise InvalidRequestError("lora_name", f"{name!r} is served already: unload it first")
        if len(self.named) >= MAX_ADAPTERS:
            raise InvalidRequestError("lora_name", f"at most {MAX_ADAPTERS} adapters, all are loaded")

    async def _ask(self, workers: list[Worker], name: str, path: str) -> list[AdapterLoaded]:
        """Return the answers of workers that stay alive. Raises `ApiError` if an answer is late."""
        loop, waiting = asyncio.get_running_loop(), []
        for worker in workers:
            if self._send_load(worker, name, path):
                self._waiting[worker, name] = loop.create_future()
                waiting.append(self._waiting[worker, name])
        if not waiting:
            return []
        _, late = await asyncio.wait(waiting, timeout=self._config.request_timeout)
        if late:
            for worker in workers:
                self._waiting.pop((worker, name), None)
            self._forget(name)
            limit = self._config.request_timeout
            raise ApiError(504, f"lora_path: {len(late)} workers have not loaded it within {limit:g} s")
        return [each.result() for each in waiting if not each.cancelled()]

    def _forget(self, name: str) -> None:
        for worker in self._registry:
            if not worker.role.holds_draft:
                self._send_unload(worker, name)

    def _send_load(self, worker: Worker, name: str, path: str, digest: str = "") -> bool:
        incarnation = worker.key.incarnation
        return self._send(worker, LoadAdapter(incarnation=incarnation, name=name, path=path, digest=digest))

    def _send_unload(self, worker: Worker, name: str) -> None:
        self._send(worker, UnloadAdapter(incarnation=worker.key.incarnation, name=name))
