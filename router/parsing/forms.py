"""The forms in which grammars have models write calls."""

from __future__ import annotations

import re

import msgspec

from router.parsing import harmony, json_formats
from router.parsing.literals import GEMMA, PYTHON, Literals
from router.parsing.tagged import Tags


class CallForm(msgspec.Struct, frozen=True):
    """The spelling of calls. A block is `open`, calls with `separator` between them, and `close`. A call is
    `begin` with its name for `%s` and any number for `%d`, then its arguments, then `end`. Without a
    separator a block has one call, and blocks are joined by `between`.
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
    notation: Literals | None = None
    """The arguments' notation; None: JSON."""
    elsewhere: str = ""
    """A regular expression of what begins calls outside of blocks."""
    tags: Tags | None = None
    """The spelling of arguments that are tagged parameters; None: they are JSON."""


def tagged(tags: Tags) -> CallForm:
    return CallForm(
        tags.open or tags.call,
        tags.line if tags.open else "",
        f"{tags.call if tags.open else ''}%s{tags.name_end}{tags.line}",
        tags.call_end + (tags.line if tags.close else ""),
        tags.close,
        separator="" if tags.has_several else None,
        between=None if tags.has_several else tags.line,
        elsewhere=re.escape(tags.call) if tags.open else "",
        tags=tags,
    )


_OBJECT = '{"name": "%s", "arguments": '
_PARAMETERS = '{"name": "%s", "parameters": '
HERMES = CallForm(
    json_formats.HERMES.open[0], "\n", _OBJECT, "}", f"\n{json_formats.HERMES.close}", between="\n"
)
LLAMA3 = CallForm("", "", _PARAMETERS, "}", separator="; ", elsewhere=r"<\|python_tag\|>")
GRANITE = CallForm(
    json_formats.GRANITE.open[0],
    "[",
    _OBJECT,
    "}",
    "]",
    separator=", ",
    elsewhere=json_formats.GRANITE.open[1],
)
HUNYUAN = CallForm(
    json_formats.HUNYUAN.open[0], "[", _OBJECT, "}", f"]{json_formats.HUNYUAN.close}", separator=", "
)
INTERNLM = CallForm(
    json_formats.INTERNLM.open[0], "\n", _PARAMETERS, "}", json_formats.INTERNLM.close, between=""
)
PHI4 = CallForm(json_formats.PHI4.open[0], "", _OBJECT, "}", json_formats.PHI4.close, separator=", ")
XLAM = CallForm("", "[", _OBJECT, "}", "]", separator=", ", elsewhere=r"```(json)?\s*[\[{]")
PYTHONIC = CallForm(
    "", "[", "%s(", ")", "]", separator=", ", notation=PYTHON, elsewhere=r"<\|python_start\|>"
)
GEMMA4 = CallForm(
    json_formats.GEMMA4.open[0],
    "",
    "call:%s{",
    "}",
    json_formats.GEMMA4.close,
    between="",
    notation=GEMMA,
)
MISTRAL = CallForm(json_formats.MISTRAL.open, "[", _OBJECT, "}", "]", separator=", ")
MISTRAL_NAMED = CallForm(json_formats.MISTRAL.open, "", f"%s{json_formats.MISTRAL.begin}", "", between="")


def _named(marks: json_formats.Named, begin: str, end: str, separator: str) -> CallForm:
    return CallForm(
        marks.open,
        "",
        f"{marks.call}{marks.lead}{begin}",
        f"{end}{marks.ends[-1]}",
        marks.close,
        separator=separator,
        elsewhere=re.escape(marks.call),
    )


DEEPSEEK_V3 = _named(json_formats.DEEPSEEK_V3, "%s\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = _named(json_formats.DEEPSEEK_V31, f"%s{json_formats.DEEPSEEK_V31.begin}", "", "")
KIMI_K2 = _named(json_formats.KIMI_K2, f"%s:%d{json_formats.KIMI_K2.begin}", "", "")
HARMONY = CallForm(
    harmony.CHANNEL, "commentary to=functions.", f"%s {harmony.CONSTRAIN}json{harmony.MESSAGE}", ""
)
"""Ends with the answer: the mark after a call is a token that ends it."""
