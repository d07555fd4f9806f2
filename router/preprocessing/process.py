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

import msgspec

from native.heap import freeze_heap
from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.preprocessing.tasks import (
    ACCEPTED,
    DIED,
    LENGTH,
    REFUSED,
    RESULT,
    Setup,
    TaskCall,
    TaskError,
    Tasks,
    framed,
)

DONE, LEAVING = b"d", b"l"
"""Messages of a child after a task: it accepts another task, or it ends."""
LIGHT_S = 0.25
"""Most CPU time of a task after which a child accepts another: longer tasks leave much memory in use."""


class Parent:
    """The parent process: gives each task to an idle child or to a new one. The router limits tasks at once.

    If the router closes a task's connection, the task is ended with its child.
    """

    def __init__(self, control: socket.socket, tasks: Tasks) -> None:
        self._control = control
        self._tasks = tasks
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children: dict[int, _Child] = {}
        """Children by the file descriptors of their channels."""
        self._busy: dict[int, _Child] = {}
        """Busy children by the file descriptors of their tasks' connections."""

    def serve(self) -> None:
        """Run tasks until the router closes the control socket."""
        while True:
            # handle closed descriptors before opening new ones, which reuse their numbers
            events = [descriptor for descriptor, _ in self._poll.poll()]
            for child in [self._children[each] for each in events if each in self._children]:
                self._on_message(child)
            for descriptor in [each for each in events if each in self._busy]:
                self._abandon(descriptor)
            if self._control.fileno() in events:
                if (connection := _received(self._control)) is None:
                    return self._end()
                self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        idle = (child for child in self._children.values() if child.connection is None and child.stays)
        child = next(idle, None) or self._fork()
        child.connection = connection
        self._busy[connection.fileno()] = child
        self._poll.register(connection, 0)  # reports when the other end is closed
        _send(connection, ACCEPTED, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):  # the child has died, as `_on_message` will notice
            socket.send_fds(child.channel, [DONE], [connection.fileno()])

    def _fork(self) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_all()
                ours.close()
                _serve_tasks(theirs, self._tasks)
            finally:
                os._exit(1)
        theirs.close()
        child = self._children[ours.fileno()] = _Child(pid, ours)
        self._poll.register(ours, select.POLLIN)
        return child

    def _on_message(self, child: _Child) -> None:
        message = b""
        with contextlib.suppress(ConnectionResetError):  # the child died before it read its task
            message = child.channel.recv(1)
        if message:
            child.stays = message == DONE
            self._release(child)
            return
        _, status = os.waitpid(child.pid, 0)
        if child.connection is not None:
            _send(child.connection, DIED + bytes([os.WTERMSIG(status)]), socket.MSG_DONTWAIT)
            self._release(child)
        del self._children[child.channel.fileno()]
        self._poll.unregister(child.channel)
        child.channel.close()

    def _abandon(self, connection: int) -> None:
        """End a task that is not done: the router has closed its connection, as it also does at the end."""
        child = self._busy[connection]
        if not _is_readable(child.channel):
            self._poll.unregister(connection)
            os.kill(child.pid, signal.SIGKILL)

    def _release(self, child: _Child) -> None:
        """Note that the child's task has ended."""
        connection, child.connection = child.connection, None
        if connection is not None:
            del self._busy[connection.fileno()]
            with contextlib.suppress(KeyError):
                self._poll.unregister(connection)
            connection.close()

    def _close_all(self) -> None:
        self._control.close()
        for child in self._children.values():
            child.channel.close()
            if child.connection is not None:
                child.connection.close()

    def _end(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)


class _Child:
    """A child process, the `connection` of its task if any, and whether it `stays` after the task."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.connection: socket.socket | None = None
        self.stays = True


def _serve_tasks(channel: socket.socket, tasks: Tasks) -> None:
    """Run tasks in a child process until its channel is closed."""
    while (connection := _received(channel)) is not None:
        with connection:
            header, argument = _framed(connection), _framed(connection)
            if header is None or argument is None:  # the router has given the task up
                channel.sendall(DONE)
                continue
            call = msgspec.msgpack.decode(header, type=TaskCall)
            signal.setitimer(signal.ITIMER_PROF, call.cpu_s)
            answer = _answer(tasks, call, argument)
            left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, answer)
            is_light = call.cpu_s - left_s <= LIGHT_S
            channel.sendall(DONE if is_light else LEAVING)
            connection.shutdown(socket.SHUT_WR)
        if not is_light:
            os._exit(0)
    os._exit(0)


def _answer(tasks: Tasks, call: TaskCall, argument: bytes) -> bytes:
    try:
        return RESULT + framed(tasks.run(call, argument))
    except (InvalidRequestError, ApiError) as error:
        failed = TaskError.from_error(error)
    except Exception:
        traceback.print_exc()
        failed = TaskError.from_error(ApiError(500, "internal error; the server's log has the details"))
    return REFUSED + framed(msgspec.msgpack.encode(failed))


def _received(channel: socket.socket) -> socket.socket | None:
    """Return the next connection; None if the other end is closed."""
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _is_readable(channel: socket.socket) -> bool:
    try:
        channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def _framed(connection: socket.socket) -> bytes | None:
    """Read a frame. Return None if the connection ends within it."""
    length = _read(connection, LENGTH.size)
    return None if length is None else _read(connection, *LENGTH.unpack(length))


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
    tasks = Tasks(msgspec.msgpack.decode(text, type=Setup))
    del text
    freeze_heap()
    Parent(socket.socket(fileno=control), tasks).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
