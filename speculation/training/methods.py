"""The methods whose heads can be trained, by name."""

from __future__ import annotations

from typing import Literal

from speculation.training.head import BuildHead

TrainableMethod = Literal["eagle3", "medusa"]


def builder(method: TrainableMethod) -> BuildHead:
    match method:
        case "medusa":
            from speculation.medusa.training import build

            return build
        case "eagle3":
            from speculation.eagle.training import build_eagle3

            return build_eagle3
