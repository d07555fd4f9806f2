"""`tandem batch`: sends a file of requests in the Batch API's format, at low priority, and writes their
answers.

Each answer is written as one line when it is final, so the same command continues an interrupted batch.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import httpx
import msgspec
from msgspec import Meta
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.client import ServerError, authorization, mounts
from deploy.processes import OTHER_FILES
from native.ownership import OwnershipError, open_own, takes_lock
from native.process import raise_file_limit
from protocol.errors import ConfigError, TandemError

MAX_ATTEMPTS = 10
CONNECT_TIMEOUT_S = 30.0
MAX_WAIT_S = 30.0
_NOT_ALLOWED = (401, 403)
_PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP statuses of errors that may pass. Such requests are sent again."""


class BatchRequest(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1)]
    url: Annotated[str, Meta(pattern=r"^/v1/[a-z_/]+\Z")]
    body: dict[str, Any]
    method: str = "POST"


_START = b'{"id":"batch_req_'
"""The bytes with which each line of an output begins."""


class _Answered(msgspec.Struct):
    """The part of an output's line that is read again."""

    custom_id: str
    response: dict[str, Any]
    error: Any = None


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Raises `ConfigError`, which names the line and the field."""
    decode = msgspec.json.Decoder(BatchRequest).decode
    seen: set[str] = set()
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                request = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            problem = _problem(request, seen)
            if problem is not None:
                raise ConfigError(f"{path}, line {number}: {problem}")
            seen.add(request.custom_id)
            yield request


def _problem(request: BatchRequest, seen: Set[str]) -> str | None:
    if request.custom_id in seen:
        return f"custom_id: {request.custom_id!r} occurs twice"
    if request.method != "POST":
        return f"method: must be POST, got {request.method!r}"
    if request.body.get("stream"):
        return "body.stream: a batch cannot stream"
    return None


def read_answered(lines: BinaryIO, path: Path) -> dict[str, str]:
    """Return the error of each answer in an output, by custom_id. Removes an answer that was cut off.

    Raises `ConfigError` if the file is something else, which stays as it is.
    """
    decode = msgspec.json.Decoder(_Answered).decode
    answered: dict[str, str] = {}
    whole = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            if line[: len(_START)] != _START[: len(line)]:
                raise ConfigError(f"{path}, line {number}: not an answer of a batch: it has no end of line")
            break
        try:
            answer = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: not an answer of a batch: {error}") from error
        answered[answer.custom_id] = _message(answer.error)
        whole += len(line)
    lines.seek(whole)
    lines.truncate()
    return answered


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _opened_output(path: Path) -> io.BufferedRandom:
    """Open the output for reading and appending, by this run alone. Refuses another user's file, which could
    be forged.
    """
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666, private=False)
    except OwnershipError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not takes_lock(descriptor):
        os.close(descriptor)
        raise ConfigError(f"{path}: another run of `tandem batch` writes to it")
    return open(descriptor, "r+b")


def run_batch(
    url: str, api_key: str | None, source: Path, target: Path, *, concurrency: int, priority: int
) -> None:
    """Send the requests and print the outcome. Raises `ConfigError`, and `ServerError` for failures."""
    raise_file_limit(concurrency + OTHER_FILES)
    names = {request.custom_id for request in read_requests(source)}
    total = len(names)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _opened_output(target) as output, Progress(*columns) as progress:
        answered = {name: error for name, error in read_answered(output, target).items() if name in names}
        task = progress.add_task("requests", total=total, completed=len(answered))
        left = (request for request in read_requests(source) if request.custom_id not in answered)
        batch = _Batch(left, output.raw, priority, answered, lambda: progress.advance(task))
        ended: BaseException | None = None
        try:
            asyncio.run(batch.run(url, api_key, concurrency))
        except ExceptionGroup as group:
            ended = group.exceptions[0]
        except KeyboardInterrupt as interrupt:
            ended = interrupt
    failed = [f"{name}: {error}" for name, error in answered.items() if error]
    left_over = total - len(answered)
    outcome = f"{len(answered) - len(failed)} completed, {len(failed)} failed"
    print(outcome + (f", {left_over} without an answer" if left_over else ""))
    if ended is not None:
        raise ended
    if batch.unanswered:
        rest = f"{left_over} of {total} requests have no answer; run it again for them"
        raise ServerError(f"{rest}. {batch.unanswered[0]}")
    if failed:
        raise ServerError(f"{len(failed)} of {total} requests failed. {failed[0]}")


class _Batch:
    """A batch being sent, several requests at a time. `answered` has errors by id, `unanswered` reasons."""

    def __init__(
        self,
        left: Iterator[BatchRequest],
        output: io.RawIOBase,
        priority: int,
        answered: dict[str, str],
        done: Callable[[], object],
    ) -> None:
        self._left = left
        self._output = output
        self._priority = priority
        self._answered = answered
        self._done = done
        self.unanswered: list[str] = []

    async def run(self, url: str, api_key: str | None, concurrency: int) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=concurrency)
        headers, mounted = authorization(api_key), mounts(httpx.AsyncHTTPTransport, limits)
        async with (
            httpx.AsyncClient(
                base_url=url, headers=headers, timeout=timeout, limits=limits, mounts=mounted
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(concurrency):
                group.create_task(self._work(http))

    async def _work(self, http: httpx.AsyncClient) -> None:
        for request in self._left:
            answer = await self._ask(http, request)
            if answer is not None:
                self._write(msgspec.json.encode(answer) + b"\n")
                self._answered[request.custom_id] = _message(answer["error"])
                self._done()

    def _write(self, line: bytes) -> None:
        """Append an answer. If a full disk cuts it off, the next run removes it."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._output.write(rest) or 0 :]
        except OSError as error:
            raise TandemError(f"the answers cannot be written: {error.strerror}") from error

    async def _ask(self, http: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any] | None:
        """Return the final answer, or None. Raises `ServerError` if no request can succeed."""
        body = {"priority": self._priority, **request.body}
        reason = ""
        for attempt in range(MAX_ATTEMPTS):
            wait_s = min(MAX_WAIT_S, 0.1 * 2**attempt)
            try:
                response = await http.post(request.url, json=body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                if attempt + 1 == MAX_ATTEMPTS:
                    raise ServerError(f"{http.base_url}: {reason}") from error
            else:
                if response.status_code in _NOT_ALLOWED:
                    raise ServerError(f"{response.url}: {response.status_code}: {response.text[:500]}")
                if response.status_code not in _PASSING:
                    return _answer(request, response)
                reason = f"{response.status_code}: {response.text[:500]}"
                wait_s = max(wait_s, _retry_after_s(response))
            if attempt + 1 < MAX_ATTEMPTS:
                await asyncio.sleep(wait_s)
        self.unanswered.append(f"{request.custom_id}: {reason}")
        return None


def _message(error: Any) -> str:
    """Return the message of an answer's error, or "" if there is none."""
    if error is None:
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500] or "failed"


def _answer(request: BatchRequest, response: httpx.Response) -> dict[str, Any]:
    request_id = response.headers.get("x-request-id", "")
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        body = response.text
    error = None
    if not response.is_success:
        reported = body.get("error") if isinstance(body, dict) else None
        error = reported if isinstance(reported, dict) else {"message": str(body)[:500]}
    return {
        "id": f"batch_req_{request_id or os.urandom(8).hex()}",
        "custom_id": request.custom_id,
        "response": {"status_code": response.status_code, "request_id": request_id, "body": body},
        "error": error,
    }


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(MAX_WAIT_S, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
