"""Tables of the measurements."""

from __future__ import annotations

from bench.gpu.measure import GpuPlan, Measured, Results, speedup
from bench.gpu.roofs import Roofs
from bench.report import markdown_table


def as_markdown(size: str, roofs: Roofs, reached: Roofs, plan: GpuPlan, results: Results) -> str:
    both_ways = [*zip(results.decode, results.eager_s, strict=True)]
    plain = [each for each in both_ways if each[0].rows_each == 1]
    chains = [each for each in both_ways if each[0].rows_each > 1]
    decode = [
        (
            each.sequences,
            *_roofline(each, roofs),
            f"{eager_s * 1e3:.3f}",
            f"{results.steps[each.sequences] * 1e3:.2f}",
            f"{results.sampled_steps[each.sequences] * 1e3:.2f}",
        )
        for each, eager_s in plain
    ]
    sweep = [
        (
            each.sequences,
            each.rows_each - 1,
            *_roofline(each, roofs),
            f"{eager_s * 1e3:.3f}",
            f"{speedup(results, each, plan.acceptance):.2f}",
        )
        for each, eager_s in chains
    ]
    prefill = [
        (each.context, *_roofline(each, roofs), f"{each.context / each.device_s:.0f}")
        for each in results.prefill
    ]
    if results.mixed is not None:
        decode.append((f"{results.mixed.sequences}, mixed", *_roofline(results.mixed, roofs), "-", "-", "-"))
    kernels = [
        (each.name, f"{each.ours_s * 1e6:.0f}", f"{each.torch_s * 1e6:.0f}", f"{each.ratio:.2f}")
        for each in results.kernels
    ]
    cut = [
        (tokens, f"{seconds * 1e3:.2f}", f"{tokens / seconds:.0f}")
        for tokens, seconds in results.cut_s.items()
    ]
    verdicts = [("pass" if passed else "FAIL", text) for text, passed in checks(results).items()]
    both = ("ms", "least ms", "share of the roof", "bound by", "host ms", "launches")
    return f"""# Qwen3-{size} on {roofs.name}

Random weights in bfloat16, contexts of {plan.context} tokens. Forward: {results.choice}.
Roofs ({roofs.source}): {_rates(roofs)}. A plain copy and a plain product reach {_rates(reached)}.
`host ms` is when the forward's call returns; `launches` are what it puts on the device; `eager ms` is the
forward without CUDA graphs.

## Checks

{markdown_table(("", "check"), verdicts, 2)}

## Decoding

`step ms`: of the engine, with scheduling and greedy sampling; `sampled ms`: with top-k and top-p. `mixed` has
one sequence of {plan.long_context} tokens.

{markdown_table(("requests", *both, "eager ms", "step ms", "sampled ms"), decode)}

## Verifying K drafted tokens

`speedup` over K = 0, if each token is accepted with a chance of {plan.acceptance:g} and drafts cost nothing.

{markdown_table(("requests", "K", *both, "eager ms", "speedup"), sweep)}

## Prompts

{markdown_table(("tokens", *both, "tokens/s"), prefill)}

In chunks of {plan.budget} tokens:

{markdown_table(("tokens", "ms", "tokens/s"), cut)}

## Kernels beside torch's

`ratio`: times as fast as torch's SDPA (from contiguous KV) or cuBLAS.

{markdown_table(("kernel", "us", "torch us", "ratio"), kernels)}
"""


def checks(results: Results) -> dict[str, bool]:
    """Return the requirements on a GPU, and whether this one met them."""
    compiled = int(results.compilations.get("kernel_compilations_total", 0))
    slower = [
        each.sequences
        for each, eager_s in zip(results.decode, results.eager_s, strict=True)
        if each.device_s > 1.1 * eager_s
    ]
    found = {
        f"no kernel is compiled after the start ({compiled} were)": not compiled,
        f"graphs are no slower than eager forwards (slower for {slower or 'none'})": not slower,
    }
    if results.mixed is not None:
        plain = [each.device_s for each in results.decode if each.sequences == results.mixed.sequences]
        ratio = results.mixed.device_s / plain[0]
        found[f"one long sequence costs the batch at most its half again ({ratio:.2f} times)"] = ratio < 1.5
    return found


def _rates(roofs: Roofs) -> str:
    return f"memory {roofs.bytes_per_s / 1e9:.0f} GB/s, products {roofs.flops / 1e12:.0f} TFLOP/s"


def _roofline(each: Measured, roofs: Roofs) -> tuple[object, ...]:
    least_s = each.work.least_s(roofs)
    return (
        f"{each.device_s * 1e3:.3f}",
        f"{least_s * 1e3:.3f}",
        f"{least_s / each.device_s:.2f}",
        each.work.bound(roofs),
        f"{each.host_s * 1e3:.3f}",
        "-" if each.launches is None else each.launches,
    )
