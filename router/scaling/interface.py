"""What a router asks of the launcher when the number of workers is to change, and what it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """So many workers of each role are wanted; roles that are not named keep theirs.

    `worth` has the ids of the workers that the router knows, those first that are the least loss.
    """

    targets: dict[str, int]
    worth: list[str]


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """With a `refusal`, which is about `field`, nothing has changed. Otherwise workers `started` are on their
    way, and those `leaving` are to be drained by who asked.
    """

    refusal: str = ""
    field: str = ""
    started: list[str] = []
    leaving: list[str] = []


AskToScale = Callable[[ScaleRequest], Awaitable[ScaleAnswer]]


async def nobody_scales(request: ScaleRequest) -> ScaleAnswer:
    """Where no launcher keeps the workers."""
    return ScaleAnswer(
        refusal="these workers were not started by a launcher", field=min(request.targets, default="")
    )
