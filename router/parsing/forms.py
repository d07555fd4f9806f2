"""How models write calls, for grammars that have them written so."""

from __future__ import annotations

import msgspec

from router.parsing import deepseek, granite, harmony, hermes, mistral


class CallForm(msgspec.Struct, frozen=True):
    """A block is `open`, calls with `separator` between them, and `close`; a call is `begin` with its name,
    arguments, and `end`. Without a separator a block has one call, and blocks follow each other with
    `between`.
    """

    trigger: str
    """What a block begins with and no text has; empty: a block is the whole answer."""
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
"""Ends with the answer: the mark behind a call is a token that ends it."""
