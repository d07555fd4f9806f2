"""What the launcher asks of the one router in its own process, or of several in theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from router.scaling.interface import ScaleAnswer, ScaleRequest


class Routers(Protocol):
    """`RouterServer` and `RouterPool` have these methods; all but `run` are for any thread."""

    @property
    def url(self) -> str: ...

    @property
    def worker_endpoints(self) -> list[str]: ...

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None: ...

    def expect(self, roles: Mapping[str, str], room: Mapping[str, int]) -> None: ...

    def on_leave(
        self, let_go: Callable[[str, bool], str], renew: Callable[[str, str, str], None]
    ) -> None: ...

    def on_scale(self, scale: Callable[[ScaleRequest], ScaleAnswer]) -> None: ...

    def gave_up(self, worker_id: str, reason: str) -> None: ...

    def silence_of(self, worker_id: str, incarnation: str) -> float | None: ...

    def start_ups(self) -> dict[str, Mapping[str, str]]: ...

    def restore_signals(self) -> None: ...

    def stop(self) -> None: ...

    def run(self, on_start: Callable[[], None] = ..., on_signal: Callable[[], None] | None = ...) -> None: ...
