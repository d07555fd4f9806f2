"""The methods whose heads can be trained, by name."""

from __future__ import annotations

from typing import Literal

from training.heads.contract import BuildHead

TrainableMethod = Literal["eagle3", "medusa"]


def builder(method: TrainableMethod) -> BuildHead:
    match method:
        case "medusa":
            from training.heads.medusa import build

            return build
        case "eagle3":
            from training.heads.eagle import build_eagle3

            return build_eagle3
