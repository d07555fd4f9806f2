"""The README.md of trained heads."""

from __future__ import annotations

import json
from pathlib import Path

from speculation.training.trainer import Schedule

_SERVED_AS = {"eagle3": "eagle", "medusa": "medusa"}


def write(
    folder: Path, method: str, schedule: Schedule, rates: list[float], parameters: int, windows: int
) -> None:
    """`rates`: the held-out acceptance of each drafted position, measured on so many `windows`."""
    config = json.dumps({"method": _SERVED_AS[method], "model": str(folder)})
    rows = "\n".join(f"| {number} | {rate:.1%} |" for number, rate in enumerate(rates, start=1))
    (folder / "README.md").write_text(
        f"""# {folder.name}

{method} heads for `{schedule.model}`, {parameters:,} parameters, trained by `tandem speculate train`.

```sh
tandem serve --model {schedule.model} --speculative-config '{config}'
```

| drafted token | accepted, with all before it |
|---|---|
{rows}

Measured on the model's own greedy continuations of {windows} held-out texts, at every place of them: the
share of places where a greedy draft's tokens are what the model itself says. With all {len(rates)} drafted, a
step brings {1 + sum(rates):.2f} tokens in the mean.

Training: {schedule.steps} steps of {schedule.batch_tokens} tokens in windows of {schedule.length}, learning
rate {schedule.learning_rate:g}, seed {schedule.seed}.
""",
        encoding="utf-8",
    )
