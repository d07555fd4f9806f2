"""Tells of grammars whether they can be served: `python -m router.compiler_process`, for a `GrammarCompiler`.

llguidance's own limits do not bound all that it does, and a thread that is in it cannot be ended. So each
grammar is compiled in a fork, which the kernel ends at its time limit, with all that it has taken.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_REASON = 400


def serve(line: socket.socket) -> None:
    """The vocabulary comes first, then `[number, seconds, grammar]`, each in a line. What is answered is
    `[number, problem]`: "" where there is none, and nothing after so many seconds. The vocabulary is 0.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    requests = line.makefile("rb")
    try:
        tokenizer = LLTokenizer(json.loads(requests.readline()))
    except ValueError as error:
        _answer(line, 0, f"not with this model's tokenizer: {error}")
        return
    _answer(line, 0, "")
    for request in requests:
        number, seconds, grammar = json.loads(request)
        if os.fork() == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            _answer(line, number, _problem(tokenizer, grammar))
            os._exit(0)


def _answer(line: socket.socket, number: int, problem: str) -> None:
    line.sendall(json.dumps([number, problem[:MAX_REASON]]).encode() + b"\n")


def _problem(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        first = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if matcher.is_error():
            return "no text satisfies it, or it is too complex"
    return matcher.get_error().strip()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
