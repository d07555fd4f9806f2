"""The forms in which grammars have models write calls."""

from __future__ import annotations

import msgspec

from router.parsing import deepseek, granite, harmony, hermes, mistral


class CallForm(msgspec.Struct, frozen=True):
    """The spelling of calls. A block is `open`, calls with `separator` between them, and `close`. A call is
    `begin` with its name, then its arguments, then `end`. Without a separator a block has one call, and
    blocks are joined by `between`.
    """

    trigger: str
    """The text with which a block begins and which no other text contains; empty: a block is the whole
    answer.
    """
    open: str
    begin: str
    end: str
    close: str = ""
    separator: str | None = None
    between: str | None = None


_OBJECT = '{"name": "%s", "arguments": '
HERMES = CallForm(hermes.OPEN, "\n", _OBJECT, "}", f"\n{hermes.CLOSE}", between="\n")
LLAMA3 = CallForm("", "", '{"name": "%s", "parameters": ', "}", separator="; ")
GRANITE = CallForm(granite.OPEN[0], "[", _OBJECT, "}", "]", separator=", ")
MISTRAL = CallForm(mistral.OPEN, "[", _OBJECT, "}", "]", separator=", ")
MISTRAL_NAMED = CallForm(mistral.OPEN, "", f"%s{mistral.ARGS}", "", between="")
DEEPSEEK = CallForm(
    deepseek.OPEN,
    "",
    f"{deepseek.CALL}function{deepseek.SEPARATOR}%s\n```json\n",
    f"\n```{deepseek.CALL_END}",
    deepseek.CLOSE,
    separator="\n",
)
DEEPSEEK_PLAIN = CallForm(
    deepseek.OPEN,
    "",
    f"{deepseek.CALL}%s{deepseek.SEPARATOR}",
    deepseek.CALL_END,
    deepseek.CLOSE,
    separator="",
)
HARMONY = CallForm(
    harmony.CHANNEL, "commentary to=functions.", f"%s {harmony.CONSTRAIN}json{harmony.MESSAGE}", ""
)
"""Ends with the answer: the mark after a call is a token that ends it."""
