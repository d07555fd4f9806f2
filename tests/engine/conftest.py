from tests.engine.quick_starts import quick_starts  # noqa: F401
