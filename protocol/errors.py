"""Errors that cross a process boundary or reach a user."""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""

    exit_status = 1


class ConfigError(TandemError):
    """A flag, environment variable or file entry is invalid; the message names it."""

    exit_status = 2


class InvalidRequestError(TandemError):
    """A request's field, called `field` by the client, is invalid."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ProtocolError(TandemError):
    """A peer's message does not decode or exceeds a bound. It is counted and dropped."""


class UnsupportedModelError(ValueError):
    """The model asks for something that the engine would compute wrongly; the message names it."""
