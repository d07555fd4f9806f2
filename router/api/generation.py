"""What completions and chat share between a checked body and the running generation."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.sampling import SamplingParams
from router.choice import Choice, Prompt, TextOptions
from router.errors import ApiError
from router.formats import OutputOptions
from router.journal import Generation
from router.openai_types import GenerationBody
from router.state import RouterState
from router.validation import for_choice, scheduling, speculation


def make_generation(
    state: RouterState,
    body: GenerationBody,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
    n: int,
    text: TextOptions,
    output: OutputOptions,
    arrival: float,
) -> Generation:
    """`n` choices of each prompt, side by side, with the seeds that the prompt would get alone."""
    priority, salt = scheduling(body)
    choices: list[tuple[Choice, SamplingParams]] = []
    for prompt, params in prompts:
        offset = 0
        if output.echo and output.keep_details:
            offset = len(prompt.text or state.tokenizer.decode(prompt.token_ids, text.skip_special_tokens))
        for index in range(n):
            choice = Choice(
                len(choices),
                prompt,
                text,
                state.tokenizer.detokenizer(prompt.token_ids, text.skip_special_tokens),
                keep_details=output.keep_details,
                offset=offset,
            )
            choices.append((choice, for_choice(params, index)))
    return Generation(
        choices,
        arrival=arrival,
        priority=priority,
        cache_salt=salt,
        speculation=speculation(body, state.config),
    )


def stream_flags(body: GenerationBody) -> tuple[bool, bool, bool]:
    """(stream, include usage at the end, usage in each chunk)."""
    stream = bool(body.stream)
    options = body.stream_options
    if options is None:
        return stream, False, False
    if not stream:
        raise ApiError(400, "stream_options: only allowed with stream=true", param="stream_options")
    continuous = bool(options.continuous_usage_stats) and bool(options.include_usage)
    return stream, bool(options.include_usage), continuous
