"""Errors that cross a process boundary or reach a user."""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""

    exit_status = 1


class ConfigError(TandemError):
    """A flag, environment variable or file entry is not acceptable; the message names it."""

    exit_status = 2


class InvalidRequestError(TandemError):
    """A request's field, called `field` by the client, is not acceptable."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ProtocolError(TandemError):
    """A peer's message does not decode or breaks a bound. It is counted and dropped."""


class UnsupportedModelError(ValueError):
    """The model asks for something the engine would compute wrongly; the message names it."""
