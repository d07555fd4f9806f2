"""The list of models is what the loader does."""

from __future__ import annotations

from tests.docs.models_table import DOCUMENT, document


def test_the_list_of_models_is_fresh() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.docs.models_table"
