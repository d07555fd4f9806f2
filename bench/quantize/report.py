"""Tables and a figure of the costs and gains of formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.quantize.cells import KV_FORMATS
from bench.quantize.compare import Row


def as_markdown(title: str, rows: Sequence[Row], plot: str) -> str:
    """Return the report. The first row is the plain one."""
    plain, concurrencies = rows[0].speed, list(rows[0].speed.decode)
    columns = ["weights", "KV", "MB of weights", "bytes of a token's KV", "MB in all", "prefill, tok/s"]
    columns += [f"decode, {each}" for each in concurrencies]
    if rows[0].quality is not None:
        columns += ["bits per byte", "KL to bf16, nats", "same next token"]
    lines = [f"# {title}", "", "In brackets: times bf16.", "", _line(columns), _line(["---"] * len(columns))]
    for row in rows:
        cells = [row.cell.weights, row.cell.kv, f"{row.weight_bytes / 1e6:.1f}", f"{row.kv_token_bytes:,}"]
        cells += [f"{row.memory / 1e6:.1f}", _rate(row.speed.prefill, plain.prefill)]
        cells += [_rate(row.speed.decode[each], plain.decode[each]) for each in concurrencies]
        if row.quality is not None:
            found = row.quality
            cells += [f"{found.bits_per_byte:.4f}", f"{found.divergence:.5f}", f"{found.agreement:.2%}"]
        lines.append(_line(cells))
    return "\n".join([*lines, "", f"![{title}]({plot})"]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rate(rate: float, plain: float) -> str:
    return f"{rate:.1f} ({rate / plain:.2f})"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot each format's quality against its memory, and its decoding speedup by concurrency."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    has_quality = rows[0].quality is not None
    figure, grid = pyplot.subplots(
        1, 1 + has_quality, figsize=(6 * (1 + has_quality), 4.5), squeeze=False, layout="constrained"
    )
    colours = {weights: f"C{i}" for i, weights in enumerate(dict.fromkeys(row.cell.weights for row in rows))}
    if has_quality:
        _plot_quality(grid[0][0], rows, colours)
    _plot_speed(grid[0][-1], rows, colours)
    figure.savefig(path)
    pyplot.close(figure)


_MARKERS = dict(zip(KV_FORMATS, ("o", "s", "^"), strict=True))
_LINES = dict(zip(KV_FORMATS, ("-", "--", ":"), strict=True))


def _plot_quality(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    for row in rows:
        assert row.quality is not None
        point = row.memory / 1e6, row.quality.bits_per_byte
        axes.plot(*point, _MARKERS[row.cell.kv], color=colours[row.cell.weights], label=row.cell.name)
    axes.set(xlabel="MB of weights and KV", ylabel="bits per byte", title="held-out code: less is better")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)


def _plot_speed(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    plain = rows[0].speed.decode
    for row in rows:
        ratios = [rate / plain[each] for each, rate in row.speed.decode.items()]
        style = {"color": colours[row.cell.weights], "linestyle": _LINES[row.cell.kv]}
        axes.plot(list(plain), ratios, marker=_MARKERS[row.cell.kv], label=row.cell.name, **style)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(plain), [str(each) for each in plain])
    axes.set(xlabel="requests at once", ylabel="times bf16", title="decoding", ylim=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)
