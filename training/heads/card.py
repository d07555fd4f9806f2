"""The README.md of trained heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_SERVED_AS = {"eagle3": "eagle", "medusa": "medusa"}


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a training run. A checkpoint with other settings is not resumed.

    `data` is a hash of the training tokens.
    """

    method: str
    model: str
    data: str
    steps: int
    batch_tokens: int
    length: int
    learning_rate: float
    seed: int
    options: dict[str, int | None]


def write(folder: Path, run: TrainingRun, rates: list[float], parameters: int, windows: int) -> None:
    """Write the card. `rates` is the held-out acceptance of each drafted position, measured on `windows`
    windows.
    """
    config = json.dumps({"method": _SERVED_AS[run.method], "model": str(folder)})
    rows = "\n".join(f"| {number} | {rate:.1%} |" for number, rate in enumerate(rates, start=1))
    (folder / "README.md").write_text(
        f"""# {folder.name}

{run.method} heads for `{run.model}`, {parameters:,} parameters, trained by `tandem speculate train`.

```sh
tandem serve --model {run.model} --speculative-config '{config}'
```

| drafted token | accepted, with all before it |
|---|---|
{rows}

Measured on the model's own greedy continuations of {windows} held-out texts, at every place of them: the
share of places where a greedy draft's tokens are what the model itself says. With all {len(rates)} drafted, a
step brings {1 + sum(rates):.2f} tokens in the mean.

Training: {run.steps} steps of {run.batch_tokens} tokens in windows of {run.length}, learning
rate {run.learning_rate:g}, seed {run.seed}.
""",
        encoding="utf-8",
    )
