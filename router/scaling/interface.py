"""The router's requests to the launcher for a change of the number of workers, and its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers wanted for each role; roles that are not named keep theirs.

    `worth` lists the ids of the workers that the router knows, the ones that are least loss first.
    """

    targets: dict[str, int]
    worth: list[str]


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's answer. With a `refusal`, which concerns `field`, nothing has changed. Otherwise the
    workers in `started` are starting, and the caller must drain those in `leaving`.
    """

    refusal: str = ""
    field: str = ""
    started: list[str] = []
    leaving: list[str] = []


AskToScale = Callable[[ScaleRequest], Awaitable[ScaleAnswer]]


async def refuse_to_scale(request: ScaleRequest) -> ScaleAnswer:
    """Refuse a change because no launcher manages the workers."""
    return ScaleAnswer(
        refusal="these workers were not started by a launcher", field=min(request.targets, default="")
    )
