"""Checks that docstrings begin with a subject or a verb: `python -m tests.plain_docstrings`.

Every string that stands alone as a statement counts as a docstring, so comments of attributes are checked,
too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_FRAGMENT = re.compile(r"(Of|What|Where|Whose|Who|Those|Beside|Behind)\b")
_PRONOUN = re.compile(r"(It|Its|They|These|That|As|None|Until|Whoever|Whatever|Nobody)\b")
"""Openings that need the lines before to be understood. In tests the subject is the test's name."""


def fragments(path: Path) -> Iterator[str]:
    """Yield `path:line: first line` of each docstring that begins with a relative clause, a preposition or,
    outside of tests, a pronoun.
    """
    patterns = [_FRAGMENT] if path.parts[0] == "tests" else [_FRAGMENT, _PRONOUN]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and any(each.match(text.strip()) for each in patterns):
                yield f"{path}:{node.lineno}: docstring begins with a fragment: {text[:60]!r}"


def main() -> int:
    found = [line for path in sorted(Path().glob("[a-z]*/**/*.py")) for line in fragments(path)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
