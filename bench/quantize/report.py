"""The table of the costs and gains of formats."""

from __future__ import annotations

from collections.abc import Sequence

from bench.quantize.compare import Row
from bench.report import markdown_table


def as_markdown(title: str, rows: Sequence[Row]) -> str:
    """Return the report. The first row is the plain one."""
    plain, concurrencies = rows[0].speed, list(rows[0].speed.decode)
    columns = ["weights", "KV", "MB of weights", "bytes of a token's KV", "MB in all", "prefill, tok/s"]
    columns += [f"decode, {each}" for each in concurrencies]
    if rows[0].quality is not None:
        columns += ["bits per byte", "KL to bf16, nats", "same next token"]
    lines = []
    for row in rows:
        cells = [row.formats.weights, row.formats.kv, f"{row.weight_bytes / 1e6:.1f}"]
        cells += [f"{row.kv_token_bytes:,}", f"{row.memory / 1e6:.1f}"]
        cells += [_rate(row.speed.prefill, plain.prefill)]
        cells += [_rate(row.speed.decode[each], plain.decode[each]) for each in concurrencies]
        if row.quality is not None:
            found = row.quality
            cells += [f"{found.bits_per_byte:.4f}", f"{found.divergence:.5f}", f"{found.agreement:.2%}"]
        lines.append(cells)
    return f"# {title}\n\nIn brackets: times bf16.\n\n{markdown_table(columns, lines, texts=2)}\n"


def _rate(rate: float, plain: float) -> str:
    return f"{rate:.1f} ({rate / plain:.2f})"
