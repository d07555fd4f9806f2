"""Records which lines of some files run, and whether processes were started meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.system")


class Trace:
    def __init__(self, root: Path, files: Collection[str]) -> None:
        self._lines: dict[str, set[int]] = {str(root / file): set() for file in files}
        self._files = dict(zip(self._lines, files, strict=True))
        self._starts = False
        sys.addaudithook(self._audit)
        self._watch_processes()

    def begin(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def take(self) -> tuple[dict[str, list[int]], bool]:
        """Return the lines that ran since the last call, and whether processes were started."""
        lines = {self._files[path]: sorted(found) for path, found in self._lines.items() if found}
        started = self._starts
        for found in self._lines.values():
            found.clear()
        self._starts = False
        return lines, started

    def put(self, lines: dict[str, list[int]], started: bool) -> None:
        """Put recorded lines back."""
        for path, file in self._files.items():
            self._lines[path].update(lines.get(file, ()))
        self._starts |= started

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        lines = self._lines.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)

        def step(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return step

        return step

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self._starts = True

    def _watch_processes(self) -> None:
        """Watch `multiprocessing` as well, since no audit event reports its processes."""
        start = BaseProcess.start

        def noticed(process: BaseProcess) -> None:
            self._starts = True
            start(process)

        BaseProcess.start = noticed
