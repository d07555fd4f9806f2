"""Schemas of the answers and the calls that clients ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel):
    """A meeting. The schema allows no more fields, since the random model would invent some."""

    model_config = ConfigDict(extra="forbid")
    day: Literal["Monday", "Friday"]
    guests: list[Literal["Alice", "Bob"]] = Field(max_length=2)
    hour: int = Field(ge=8, le=18)


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
