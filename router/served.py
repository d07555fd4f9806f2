"""The served model's limits and names, which reading a request needs."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from router.errors import ApiError


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """Its limits, and the names that requests may ask for: its own and its adapters'."""

    max_model_len: int
    vocab_size: int
    names: tuple[str, ...]

    def check_name(self, name: str | None) -> None:
        """Raises `ApiError` 404."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)


def unknown_model(name: str, known: Collection[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} does not exist; this server has {', '.join(known)}",
        param="model",
        code="model_not_found",
    )
