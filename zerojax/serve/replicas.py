"""Serves a model by several engines behind one port. This module runs a process for each, or knows their addresses, and passes requests on.

A replica is another `zerojax serve`: a process with devices of its own, on a port of this machine alone (`ServerProcess`), or a server
that somebody else started, on any machine (`Address`). Such servers may have several models. A request goes to the one that read the most
of its beginning before, among those with the fewest answers or at most `SLACK` more: their caches hold that beginning (`Engine.reuses`).
A process that ends is started again while the others answer, and an address that does not answer is left out until it does. Of what it
was answering, a request of which nothing had come back goes to another one, and a stream ends with an error. A request goes on to another
one too where a replica's queue is full, or where it has another model.
"""

import asyncio
import collections
import contextlib
import functools
import hashlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import h11
from starlette import requests as http_lib
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from zerojax import bounded, errors
from zerojax.errors import UserError
from zerojax.serve import app as app_lib
from zerojax.serve import responses, server
from zerojax.serve.requests import NotAnswered

SLACK = 2  # answers more than the fewest that a replica may have and yet be chosen for what it knows
BLOCK, MOST_BLOCKS = (
    512,
    1 << 14,
)  # letters of a text that are known or not, and blocks that are remembered of a replica
STARTS = 5  # that may fail one after the other before a replica is given up
_PAUSE = 1.0  # seconds before a start that follows a failed one, and between two questions after a server's health
_CONNECT = 5.0  # seconds in which a server accepts a connection
# Of a host that is gone without a word: seconds before it is asked whether it is there, between such questions, and how many are lost.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_READY = re.compile(r" is served at http://127\.0\.0\.1:(\d+)$")
# Replaces itself by the command, which ends when this process does (PR_SET_PDEATHSIG = 1; Linux alone has it).
_STARTER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_HANGS = f"nothing came in {_CONNECT:g} s"
# Tells a server that another one passes a request on. Of two such servers one could be the other's, so that a request went round.
_ROUTED, _LOOP = "zerojax-routed", 508
_IS_ROUTER = "it passes requests on itself (--route), to this server perhaps, or to others"
_NOT_READY = "no replica is ready; ask again later"
_NOT_SERVED = "model_not_found"  # the code where a replica has other models
_TIMEOUT = "timeout"  # the code where the time for an answer is over, which another replica would take once more
_LATE = 2.0  # seconds more than the limit of an answer in which a replica may tell that it is over
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]  # those that a replica refuses too
_KEPT = ("content-type", "authorization", "accept")  # headers that a replica reads
_CHUNK = 1 << 16  # bytes


class Replica:
    """A server to which requests are passed on.

    Args:
      number: from 0.
      host: its address.
      tell: is called with each line about it.

    Attributes:
      port: on which it answers; 0 while it does not.
      active: requests that were passed on to it and have not ended.
      starts: how often it was started, or began to answer.
      is_lost: whether it will not answer any more.
      hangs: whether it takes connections and answers nothing.
    """

    def __init__(self, number: int, host: str, tell: Callable[[str], None] = print):
        self.number, self.host, self._print = number, host, tell
        self.port, self.active, self.starts, self.is_lost, self.hangs = 0, 0, 0, False, False
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to see whether it answers."""
        self._thread.start()

    def end(self) -> None:
        """Ends it, if it is this server's own."""

    def wait(self, seconds: float) -> None:
        """Waits until it has ended, if it is this server's own, no longer than `seconds`."""

    def missed(self) -> None:
        """Notes that it did not answer."""

    def knows(self, blocks: Sequence[bytes]) -> int:
        """Returns how many of the first blocks of a text it read before."""
        return next((n for n, block in enumerate(blocks) if block not in self._known), len(blocks))

    def learn(self, blocks: Sequence[bytes]) -> None:
        """Remembers the blocks of a text that it reads."""
        for block in blocks:
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)

    def _run(self) -> None:
        raise NotImplementedError

    def _tell(self, line: str) -> None:
        """Tells a line. What cannot be printed, on a full disk or to a reader that is gone, ends no replica."""
        with contextlib.suppress(OSError):
            self._print(line)


class Address(Replica):
    """A server that somebody else started. It is asked for its health every second, and left out while it does not answer.

    Args:
      number, tell: see `Replica`.
      address: HOST:PORT of plain HTTP.

    Raises:
      UserError: the address is none.
    """

    def __init__(self, number: int, address: str, tell: Callable[[str], None] = print):
        try:
            found = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
            host, self._port = found.hostname, found.port or 0
            http.client.HTTPConnection(host or "", self._port)  # refuses blanks
            (host or "").encode("idna")  # as it is looked up
            is_plain = found.scheme == "http" and "@" not in found.netloc
            is_wrong = not is_plain or any((found.path.strip("/"), found.query, found.fragment))
        except (ValueError, http.client.InvalidURL):
            is_wrong, host = True, None
        if is_wrong or not host or not self._port:
            raise UserError(f"--route {errors.shown(address, 80)}: must be HOST:PORT of a server with plain HTTP")
        super().__init__(number, host, tell)
        self._fault: str | None = None  # why it does not answer; "" while it does, None before it is known

    @property
    def address(self) -> str:
        """Returns HOST:PORT."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self._port}"

    def is_at(self, bound: socket.socket) -> bool:
        """Returns whether it is the server that listens on a socket."""
        return server.is_own(self.host, self._port, bound)

    def missed(self, fault: str = "the connection ended") -> None:
        """See `Replica`."""
        if not self._fault:
            self.port, self._fault = 0, fault
            self._known.clear()  # the next server there begins with empty caches
            self._tell(
                f"[replica {self.number}] {self.address} does not answer ({fault}); it is left out until it does"
            )

    def _run(self) -> None:
        while True:
            fault = self._health()
            self.hangs = fault == _HANGS
            if fault:
                self.missed(fault)
            elif not self.port:
                self.starts, self.port, self._fault = self.starts + 1, self._port, ""
                self._tell(f"[replica {self.number}] {self.address} answers")
            time.sleep(_PAUSE)

    def _health(self) -> str:
        """Returns why it does not answer; "" if it does."""
        connection = http.client.HTTPConnection(self.host, self._port, timeout=_CONNECT)
        try:
            connection.request("GET", "/health", headers={"Host": "localhost", _ROUTED: "1"})
            status = connection.getresponse().status
            return {200: "", _LOOP: f"{_IS_ROUTER}: name those"}.get(status, f"its health is status {status}")
        except TimeoutError:
            return _HANGS
        except (OSError, http.client.HTTPException) as error:
            return errors.first_line(error)
        finally:
            connection.close()


def addresses(words: Sequence[str], tell: Callable[[str], None] = print) -> list[Address]:
    """Returns the servers of some addresses. Raises a UserError for one that is none, or is there twice."""
    found = [Address(number, word, tell) for number, word in enumerate(words)]
    counts = collections.Counter(one.address for one in found)
    if twice := [address for address, count in counts.items() if count > 1]:
        raise UserError(f"--route {twice[0]}: is given {counts[twice[0]]} times; give each server once")
    return found


class ServerProcess(Replica):
    """A process that serves on this machine, which is started again when it ends.

    Args:
      number, tell: see `Replica`; all lines that it prints are told.
      command, environ: of the process, which prints its address as `zerojax serve` does.
    """

    def __init__(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], tell: Callable[[str], None] = print
    ):
        super().__init__(number, "127.0.0.1", tell)
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[str] | None = None
        self._is_ending = False

    def end(self) -> None:
        """Lets the process answer what it has, and end."""
        self._is_ending = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        """Waits until the process has ended, and kills it after `seconds`."""
        self._thread.join(seconds)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _run(self) -> None:
        failed = 0
        while not self._is_ending:
            self.starts += 1
            began = self.starts
            with subprocess.Popen(
                [sys.executable, "-c", _STARTER, str(os.getpid()), *self._command],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C is the server's, which tells its replicas
            ) as self._process:
                if self._is_ending:  # told before there was a process
                    self._process.send_signal(signal.SIGTERM)
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    if found := _READY.search(line.rstrip()):  # an address that nobody else is to use
                        self.port = int(found[1])
                    else:
                        self._tell(f"[replica {self.number}] {line.rstrip()}")
            was_ready, self.port = bool(self.port), 0
            self._known.clear()
            failed = 0 if was_ready else failed + 1
            if self._is_ending:
                return
            status = self._process.returncode
            ended = f"[replica {self.number}] ended with status {status}"
            if failed >= STARTS or (status == 2 and not was_ready and began == 1):  # what it was told is wrong
                self.is_lost = True
                return self._tell(f"{ended}, and is not started again")
            self._tell(f"{ended}; starting it again")
            time.sleep(_PAUSE if failed else 0)


class Router:
    """The replicas as one service, with the attributes of `app.Service` that `server.serve` reads.

    Args:
      replicas: not started yet.
      name: the model's.
      limits: of requests.
      names, has_key: as of `app.Service`; replicas check the key.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        name: str,
        limits: app_lib.Limits,
        names: Collection[str] = (),
        has_key: bool = False,
    ):
        self.replicas, self.name, self._limits, self._has_key = replicas, name, limits, has_key
        self._names = {"localhost", *names}
        self._turn, self.is_draining, self.active = 0, False, 0
        self._too_late = (
            f"the answer took longer than the limit of {limits.seconds:g} s (--max_seconds); ask for fewer tokens"
        )

    @property
    def failure(self) -> str:
        """Returns why nothing is answered any more; "" while it can be."""
        return "no replica can be started" if all(replica.is_lost for replica in self.replicas) else ""

    def start(self, wait_for: Callable[[str], None]) -> None:
        """Starts the replicas, and waits until one is ready or none can be."""
        for replica in self.replicas:
            replica.start()
        while not self.failure and not any(replica.port for replica in self.replicas):
            wait_for(f"the first of {len(self.replicas)} replicas")
            time.sleep(0.05)

    def stop(self, seconds: float) -> None:
        """Ends the replicas."""
        for replica in self.replicas:
            replica.end()
        until = time.monotonic() + seconds
        for replica in self.replicas:
            replica.wait(max(0.0, until - time.monotonic()))

    def app(self) -> Any:
        """Returns the application."""
        routes = [
            Route("/health", self._guarded(self._health)),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/{path:path}", self._guarded(self._passed_on), methods=_METHODS),
        ]
        return Starlette(routes=routes)

    def _guarded(self, answer: Callable[[http_lib.Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def route(request: http_lib.Request) -> Response:
            try:
                if _ROUTED in request.headers and any(isinstance(replica, Address) for replica in self.replicas):
                    raise NotAnswered(_LOOP, f"{_IS_ROUTER}; route to the servers behind it", code="loop")
                if not self._has_key:
                    app_lib.check_host(request, self._names)
                return await answer(request)
            except NotAnswered as error:
                return app_lib.refusal(error)
            except http_lib.ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # a fault of ours; the server goes on
                return app_lib.refusal(NotAnswered(500, app_lib.told_fault(request.scope["route"].path, error)))

        return route

    async def _health(self, request: http_lib.Request) -> Response:
        ready = sum(bool(replica.port) for replica in self.replicas)
        status = "draining" if self.is_draining else "ok" if ready else "starting"
        return JSONResponse(
            {"status": status, "replicas": len(self.replicas), "ready": ready}, 200 if status == "ok" else 503
        )

    async def _metrics(self, request: http_lib.Request) -> Response:
        """Returns what the replicas count, each with its number, and the starts of each."""
        found: dict[str, None] = {}  # in order, a line once
        async for replica, answer in self._of_all(request):
            if answer.status_code == 401:  # the same key is each one's
                return answer
            if answer.status_code != 200:
                continue
            lines = bytes(answer.body).decode(errors="replace").splitlines()
            found |= dict.fromkeys(_numbered(line, replica.number) for line in lines)
        for replica in self.replicas:
            found[f'zerojax_replica_starts_total{{replica="{replica.number}"}} {replica.starts}'] = None
        return PlainTextResponse("\n".join(found) + "\n", media_type="text/plain; version=0.0.4")

    async def _models(self, request: http_lib.Request) -> Response:
        """Returns the models of all replicas, each once."""
        found, refused = dict[str, Any](), None
        async for _, answer in self._of_all(request):
            if answer.status_code == 401:  # the same key is each one's
                return answer
            if answer.status_code == 200:
                found |= {model["id"]: model for model in _models_of(bytes(answer.body))}
            else:
                refused = refused or answer
        if found:
            return JSONResponse({"object": "list", "data": list(found.values())})
        if refused is not None:
            return refused
        is_ready = any(replica.port for replica in self.replicas)
        raise NotAnswered(503, "no replica lists its models" if is_ready else _NOT_READY, code="starting")

    async def _of_all(self, request: http_lib.Request) -> AsyncGenerator[tuple[Replica, Response], None]:
        """Yields what each replica answers to a GET; those that do not are left out."""
        for replica in [one for one in self.replicas if one.port]:
            with contextlib.suppress(_Gone, _Late):
                ends = time.monotonic() + _CONNECT
                answer = await _asked(replica, "GET", request.scope["raw_path"], request.headers, b"", ends)
                yield replica, Response(await answer.whole(), answer.status, answer.headers)

    async def _passed_on(self, request: http_lib.Request) -> Response:
        """Returns a replica's answer."""
        if self.is_draining:
            raise NotAnswered(503, "the server is to end and takes no new requests", code="draining")
        body = await app_lib.body_of(request, self._limits) if request.method == "POST" else b""
        # As it was sent: in `request.url` escapes of blanks and letters are undone.
        path, query = request.scope["raw_path"], request.scope["query_string"]
        path += b"?" + query if query else b""
        blocks, tried, refused, is_full = list(_blocks(body)), set[Replica](), None, False
        ends = time.monotonic() + self._limits.seconds + _LATE  # the replica's own limit tells more
        while True:
            try:
                replica = self.choose(blocks, tried)
            except NotAnswered:
                if refused is None:
                    raise
                if not is_full:
                    self._refuse_model()
                return refused
            tried.add(replica)
            replica.learn(blocks)
            self._begin(replica)
            is_passed = False
            try:
                begun = asyncio.ensure_future(_asked(replica, request.method, path, request.headers, body, ends))
                answer = await self._unless_gone(request, replica, tried, begun)
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    is_passed = True
                    return _PassedOn(answer, replica.number, self._too_late, functools.partial(self._over, replica))
                begun = asyncio.ensure_future(answer.whole())
                whole = await self._unless_gone(request, replica, tried, begun)
                found = Response(whole, answer.status, answer.headers)
                code = _code_of(whole) if answer.status in (404, 429, 503) else ""
                if code == _NOT_SERVED:
                    refused = refused or found
                elif answer.status in (429, 503) and code != _TIMEOUT:  # its queue is full, or it ends
                    refused, is_full = found, True
                else:
                    return found
            except _Gone:  # another one is asked
                replica.missed()
            except _Late:
                raise NotAnswered(503, self._too_late, code=_TIMEOUT) from None
            finally:
                if not is_passed:
                    self._over(replica)

    def _refuse_model(self) -> None:
        """Refuses a request whose model no server has that is ready. It does nothing for a router's own processes, which have one model.

        Raises:
          NotAnswered: 503 where one that is not ready may have it, else 404.
        """
        if not all(isinstance(replica, Address) for replica in self.replicas):
            return
        away = sum(not replica.port for replica in self.replicas)
        if away:
            line = (
                f"model: no server that is ready has it; {away} of {len(self.replicas)} are not ready; ask again later"
            )
            raise NotAnswered(503, line, param="model", code="starting")
        raise NotAnswered(
            404, "model: no server has it; GET /v1/models lists what they have", param="model", code=_NOT_SERVED
        )

    def choose(self, blocks: Sequence[bytes], tried: Collection[Replica] = ()) -> Replica:
        """Returns the replica for a text.

        Raises:
          NotAnswered: none is ready that was not tried.
        """
        ready = [replica for replica in self.replicas if replica.port and replica not in tried]
        if not ready:
            raise NotAnswered(503, _NOT_READY, code="starting")
        fewest = min(replica.active for replica in ready)
        near = [replica for replica in ready if replica.active <= fewest + SLACK]
        self._turn += 1
        turn = lambda replica: (replica.number - self._turn) % len(self.replicas)  # noqa: E731
        return min(near, key=lambda replica: (-replica.knows(blocks), replica.active, turn(replica)))

    async def _unless_gone(
        self, request: http_lib.Request, replica: Replica, tried: Collection[Replica], answer: "asyncio.Future[Any]"
    ) -> Any:
        """Returns what is awaited. Raises ClientDisconnect if the client goes first, _Gone if the replica hangs and another is ready."""
        gone = asyncio.ensure_future(app_lib.until_gone(request))
        try:
            while not answer.done():
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=_PAUSE)
                if answer.done():
                    break
                if gone.done():
                    raise http_lib.ClientDisconnect
                if replica.hangs and any(other.port and other not in tried for other in self.replicas):
                    raise _Gone
            return answer.result()
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()

    def _begin(self, replica: Replica) -> None:
        replica.active, self.active = replica.active + 1, self.active + 1

    def _over(self, replica: Replica) -> None:
        replica.active, self.active = replica.active - 1, self.active - 1


class _Gone(Exception):
    """A replica ended, or closed its connection, before its answer was whole."""


class _Late(Exception):
    """The time for an answer is over."""


class _Answer:
    """An answer that has begun, and is read until a moment of the monotonic clock.

    Attributes:
      status, headers: of HTTP.
    """

    def __init__(self, begun: h11.Response, connection: h11.Connection, streams: tuple[Any, Any], ends: float):
        self.status, self._connection, (self._reader, self._writer) = begun.status_code, connection, streams
        self._ends = ends
        self.headers = {name.decode(): value.decode("latin-1") for name, value in begun.headers}
        for name in ("connection", "transfer-encoding", "content-length", "date"):
            self.headers.pop(name, None)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yields the body. Raises _Gone if it is cut, and _Late."""
        while not isinstance(event := await _next(self._connection, self._reader, self._ends), h11.EndOfMessage):
            yield bytes(event.data)

    async def whole(self) -> bytes:
        """Returns the body. Raises _Gone if it is cut, and _Late."""
        try:
            return b"".join([part async for part in self.parts()])
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection, by which an answer that has not ended is cancelled."""
        self._writer.close()


async def _asked(
    replica: Replica, method: str, path: bytes, headers: Mapping[str, str], body: bytes, ends: float
) -> _Answer:
    """Asks a replica. Raises _Gone if it ends before it answers, and _Late if it has not until `ends` by the monotonic clock."""
    own = {"host": "localhost", "connection": "close", "content-length": str(len(body)), _ROUTED: "1"}
    own |= {name: headers[name] for name in _KEPT if name in headers}
    sent = [(name.encode(), value.encode("latin-1")) for name, value in own.items()]
    connection = h11.Connection(h11.CLIENT)
    try:
        async with asyncio.timeout(_CONNECT):
            reader, writer = await asyncio.open_connection(replica.host, replica.port)
    except OSError as error:  # a TimeoutError is one
        raise _Gone from error
    _keep_alive(writer.get_extra_info("socket"))
    try:
        events = [h11.Request(method=method, target=path, headers=sent), h11.Data(body), h11.EndOfMessage()]
        writer.write(b"".join(filter(None, map(connection.send, events))))
        begun = await _next(connection, reader, ends)
        return _Answer(begun, connection, (reader, writer), ends)
    except BaseException:
        writer.close()
        raise


def _keep_alive(connection: socket.socket) -> None:
    """Ends a connection some seconds after its other end is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):  # Linux has all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _next(connection: h11.Connection, reader: asyncio.StreamReader, ends: float) -> Any:
    """Returns the next part of an answer. Raises _Gone if the connection ends, and _Late where nothing comes until `ends`."""
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(ends - time.monotonic()):
                connection.receive_data(await reader.read(_CHUNK))
    except TimeoutError as error:
        raise _Late from error
    except (OSError, h11.RemoteProtocolError) as error:
        raise _Gone from error
    if isinstance(event, h11.ConnectionClosed):
        raise _Gone
    return event


class _PassedOn(StreamingResponse):
    """A stream of a replica, whose end is told if the replica ends first, or by `too_late`. Calls `on_end` whatever happens."""

    def __init__(self, answer: _Answer, number: int, too_late: str, on_end: Callable[[], None]):
        super().__init__(self._parts(), answer.status, answer.headers)
        self._answer, self._number, self._too_late, self._on_end = answer, number, too_late, on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._on_end()

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        try:
            async for part in self._answer.parts():
                yield part
        except _Gone:
            line = f"replica {self._number} ended while it answered; ask again"
            yield b"\n\n" + responses.event(responses.error(502, line, None, "replica_ended"))
        except _Late:
            yield b"\n\n" + responses.event(responses.error(503, self._too_late, None, _TIMEOUT))


def _models_of(whole: bytes) -> list[Mapping[str, Any]]:
    """Returns the models that an answer lists; none if it is no list of models."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = bounded.parse_json(whole, is_strict=True)
        if not bounded.half_letter(found) and all(isinstance(model["id"], str) for model in found["data"]):
            return list(found["data"])
    return []


def _code_of(whole: bytes) -> str:
    """Returns the code of a refusal; "" if it has none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(bounded.parse_json(whole, is_strict=True)["error"]["code"])
    return ""


def _blocks(body: bytes) -> Iterator[bytes]:
    """Yields for each full block of a request's text the hash of the text up to its end."""
    try:
        found = bounded.parse_json(body, is_strict=True)
    except ValueError:
        return  # a replica says what is wrong
    if not isinstance(found, Mapping):
        return
    text = repr((found.get("model"), found.get("tools"), found.get("messages"), found.get("prompt"))).encode()
    digest = hashlib.sha256()
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK])
        yield digest.digest()[:16]


def _numbered(line: str, number: int) -> str:
    """Returns a line of Prometheus' format with the number of its replica."""
    name, is_labelled, rest = line.partition("{")
    if line.startswith("#") or not line:
        return line
    if is_labelled:
        return f'{name}{{replica="{number}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{replica="{number}"}} {value}'


def environments(count: int, names: Sequence[str], each: int) -> list[dict[str, str]]:
    """Returns the variables of each replica: of GPUs, those of its own.

    Args:
      count: replicas.
      names: of the GPUs; none on a host without.
      each: GPUs of a replica.
    """
    own = [names[each * number : each * (number + 1)] for number in range(count)]
    return [{**os.environ} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}) for gpus in own]
