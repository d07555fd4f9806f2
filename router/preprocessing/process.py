"""`python -m router.preprocessing.process`: the preprocessor, which the router's `Preprocessor` starts.

No library limits all that it does, and a thread inside a library cannot be ended. So tasks run in child
processes with a limit of CPU time, forked in milliseconds from a parent that has the tokenizers loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import traceback
from typing import NamedTuple

import msgspec

from native.process import freeze_heap
from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.preprocessing import tasks as messages

LIGHT_S = 0.25
"""Most CPU time of a task after which a child accepts another: longer tasks leave much memory in use."""


class _Child(NamedTuple):
    pid: int
    death: int
    """File descriptor that is readable once the child has ended."""
    connection: socket.socket


class Parent:
    """The parent process: forks a child for each connection of the router, and tells it of the child's death.

    If the router closes a connection, its child is killed.
    """

    def __init__(self, control: socket.socket, tasks: messages.Tasks) -> None:
        self._control = control
        self._tasks = tasks
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children: list[_Child] = []

    def serve(self) -> None:
        """Serve connections until the router closes the control socket."""
        while True:
            # handle closed descriptors before opening new ones, which reuse their numbers
            events = {descriptor for descriptor, _ in self._poll.poll()}
            for child in self._children[:]:
                if child.death in events:
                    self._bury(child)
                elif child.connection.fileno() in events:
                    self._poll.unregister(child.connection)
                    os.kill(child.pid, signal.SIGKILL)
            if self._control.fileno() in events:
                if (connection := _received(self._control)) is None:
                    return self._end()
                self._fork(connection)

    def _fork(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                for child in self._children:
                    child.connection.close()
                _serve_tasks(connection, self._tasks)
            finally:
                os._exit(1)
        child = _Child(pid, os.pidfd_open(pid), connection)
        self._children.append(child)
        self._poll.register(child.death, select.POLLIN)
        self._poll.register(connection, 0)  # reports when the other end is closed

    def _bury(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        _send(child.connection, messages.DIED + bytes([os.WTERMSIG(status)]), socket.MSG_DONTWAIT)
        with contextlib.suppress(KeyError):
            self._poll.unregister(child.connection)
        self._poll.unregister(child.death)
        os.close(child.death)
        child.connection.close()
        self._children.remove(child)

    def _end(self) -> None:
        for child in self._children:
            os.kill(child.pid, signal.SIGKILL)


def _serve_tasks(connection: socket.socket, tasks: messages.Tasks) -> None:
    """Run tasks in a child process until its connection is closed, or a task was heavy."""
    is_light = True
    while is_light and (header := _framed(connection)) is not None:
        _send(connection, messages.ACCEPTED)
        if (argument := _framed(connection)) is None:  # the router has given the child up
            break
        call = msgspec.msgpack.decode(header, type=messages.TaskCall)
        signal.setitimer(signal.ITIMER_PROF, call.cpu_s)
        answer = _answer(tasks, call, argument)
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        is_light = call.cpu_s - left_s <= LIGHT_S
        _send(connection, (messages.DONE if is_light else messages.LEAVING) + answer)
    os._exit(0)


def _answer(tasks: messages.Tasks, call: messages.TaskCall, argument: bytes) -> bytes:
    try:
        return messages.RESULT + messages.framed(tasks.run(call, argument))
    except (InvalidRequestError, ApiError) as error:
        failed = messages.TaskError.from_error(error)
    except Exception:
        traceback.print_exc()
        failed = messages.TaskError.from_error(
            ApiError(500, "internal error; the server's log has the details")
        )
    return messages.REFUSED + messages.framed(msgspec.msgpack.encode(failed))


def _received(channel: socket.socket) -> socket.socket | None:
    """Return the next connection; None if the other end is closed."""
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _framed(connection: socket.socket) -> bytes | None:
    """Read a frame. Return None if the connection ends within it."""
    length = _read(connection, messages.LENGTH.size)
    return None if length is None else _read(connection, *messages.LENGTH.unpack(length))


def _read(connection: socket.socket, size: int) -> bytes | None:
    read = bytearray(size)
    left = memoryview(read)
    while left:
        received = connection.recv_into(left)
        if not received:
            return None
        left = left[received:]
    return bytes(read)


def _send(connection: socket.socket, data: bytes, flags: int = 0) -> None:
    with contextlib.suppress(OSError):  # the router has given the task up, or does not read
        connection.sendall(data, flags)


def main(control: int, setup: int) -> None:
    logging.basicConfig(level=logging.ERROR)  # the router has already warned of features that the model lacks
    text = os.pread(setup, os.fstat(setup).st_size, 0)
    os.close(setup)
    tasks = messages.Tasks(msgspec.msgpack.decode(text, type=messages.Setup))
    del text
    freeze_heap()
    Parent(socket.socket(fileno=control), tasks).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
