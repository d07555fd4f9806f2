"""The served model's limits and names, which are needed to read a request."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from router.errors import ApiError
from router.text.generation_defaults import GenerationDefaults


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """The model's limits, its defaults, and the names that requests may use: its own and its adapters'."""

    max_model_len: int
    vocab_size: int
    names: tuple[str, ...]
    defaults: GenerationDefaults = GenerationDefaults()

    def check_name(self, name: str | None) -> None:
        """Raise `ApiError` 404 if no served model has this name."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)


def unknown_model(name: str, known: Collection[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} does not exist; this server has {', '.join(known)}",
        param="model",
        code="model_not_found",
    )
