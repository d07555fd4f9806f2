"""The answers and the calls that clients ask for, by their schemas."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel):
    """A meeting. Without more fields, which this model would think of."""

    model_config = ConfigDict(extra="forbid")
    day: Literal["Monday", "Friday"]
    guests: list[Literal["Alice", "Bob"]] = Field(max_length=2)
    hour: int = Field(ge=8, le=18)


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
