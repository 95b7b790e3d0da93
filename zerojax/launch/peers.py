"""Tells the processes of a run of each other's end. This module also keeps XLA from aborting them when process 0 ends.

XLA notices a process that died by its missing heartbeats, after 100 s, and the end of process 0 at once. Either way it aborts the others
with a C++ stack trace, which Python cannot catch. So the processes are connected by sockets of their own:

    process 0:  HOST:PORT (front) ------ who calls proves the secret of the run, and says what the connection is
                   | "relay": to XLA's coordination service, on a port of 127.0.0.1 that only this host reaches
                   | "process": the end of either process closes this connection
    process I:  watches HOST:PORT, and relays the connections of its own XLA client to it. When process 0 ends, XLA sees nothing,
                and this process ends with a line.

The proof: process 0 begins with a random word; the caller answers with one of its own and with the HMAC-SHA256, by the secret, of both
words and of all it says; process 0 answers with that of both words. So neither is believed without the secret, and no answer serves twice.
What follows is neither signed nor hidden: the proof keeps strangers out, not those who read and change packets on their way.

All sockets are served by one daemon thread.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import queue
import re
import secrets
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax import bounded, errors
from zerojax.errors import UserError
from zerojax.launch import ending

GRACE_SECONDS = 3.0  # from the end of a process to the end of the others, which may have a line of their own to print
LOCAL = "127.0.0.1"
# Seconds, seconds, tries: a lost host counts as dead after 60 s
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
BLOCK = 1 << 16  # bytes
FIRST_LINE_SECONDS = 30
VARIABLE = "ZEROJAX_SECRET"  # in which processes get the secret
# Connections without a proof at once, beyond four a process, which all may come together. The oldest makes room for the next.
STRANGERS = 64
PROCESS, RELAY = "process", "relay"  # what a connection is
_GREETING = re.compile(rb"zerojax ([0-9a-f]{32})\n")
_CALL = re.compile(rb"zerojax (process|relay) ([0-9]{1,9}) of ([0-9]{1,9}) ([0-9a-f]{32}) ([0-9a-f]{64})\n")
UNPROVEN = "is no process of this run, as it does not prove the secret of the run"
LONGEST_LINE = 2000  # characters of another process's line that are shown
LONGEST_ORDER = 1 << 26  # bytes of what process 0 orders at once


class News(NamedTuple):
    """The end of a process: its index, its exit status, and its line, "" if it ended without a word."""

    process: int
    status: int
    line: str

    def __str__(self) -> str:
        how = f"ended with status {self.status}: {self.line.removeprefix('zerojax: ')}" if self.line else "is gone"
        return f"zerojax: process {self.process} {how}" + (
            "" if self.line else "; this process ends too, and the same command resumes"
        )


class Caller(NamedTuple):
    """Who proved the secret to process 0: what the connection is, the process, how many it takes part with, and the answer to its proof."""

    kind: str
    process: int
    processes: int
    answer: str


class Peers:
    """The other processes of a run. Each process makes one and connects it once.

    Args:
      index: of this process.
      count: of all.
      secret: that all of them know; b"" if there is none, and whoever calls is believed.
    """

    def __init__(self, index: int, count: int, secret: bytes = b""):
        self._index, self._count, self._secret = index, count, secret
        self._loop = asyncio.new_event_loop()
        self._writers: dict[int, asyncio.StreamWriter] = {}  # to all others from process 0, and from them to it
        self._tasks: set[asyncio.Task] = set()
        self._done: set[int] = set()  # processes that wait for the others at their end
        self._all_here, self._all_done, self._told = threading.Event(), threading.Event(), threading.Event()
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()  # from process 0, in its order
        self._news: News | None = None
        self._reserved: socket.socket | None = None
        self._servers: list[asyncio.Server] = []
        self._connections: list[asyncio.StreamWriter] = []
        self._strangers: list[asyncio.StreamWriter] = []  # connections to process 0 that have proven nothing yet
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)
        self._thread.start()

    def listen(self, host: str | Sequence[str] | None, port: int) -> str:
        """On process 0: listens for the others, and returns the address for its own XLA service.

        Args:
          host: the address or the addresses; None for all of this host's.
          port: of each of them.

        Raises:
          OSError: the address cannot be opened.
        """
        # XLA's server sets SO_REUSEPORT too. Until it listens, no other connection of this host can get the port.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((LOCAL, 0))
        service = self._reserved.getsockname()[1]

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # by `_close`; Python 3.11 would print it
                await self._answer(service, reader, writer)

        self._servers.append(self._run(asyncio.start_server(answer, host, port)))
        return f"{LOCAL}:{service}"

    @property
    def is_open(self) -> bool:
        """Returns whether other hosts reach process 0, and need no secret."""
        addresses = [listening.getsockname()[0] for server in self._servers for listening in server.sockets]
        return not self._secret and not all(
            ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in addresses
        )

    def join(self, host: str, port: int) -> str:
        """On the others: connects to process 0, and returns the address for its own XLA client.

        Raises:
          OSError: nothing answers, or what answers does not know the secret.
          UserError: process 0 refuses this one.
        """
        relay = self._run(self._join(host, port))
        return f"{LOCAL}:{relay}"

    def wait(self, seconds: float) -> list[int]:
        """Waits until all processes are here, and returns the indices of those that process 0 still lacks; [-1] elsewhere."""
        self._note_if_all_here()
        if self._all_here.wait(seconds):
            return []
        return sorted(set(range(1, self._count)) - set(self._writers)) if self._index == 0 else [-1]

    def news(self, seconds: float) -> News | None:
        """Returns the end of the first process that failed, and waits up to `seconds` for it."""
        self._told.wait(seconds)
        return self._news

    def tell(self, status: int, line: str) -> None:
        """Tells the others that this process ends now."""
        self._run(self._send({"status": status, "line": (line or f"status {status}")[:LONGEST_LINE]}))

    def order(self, what: object) -> None:
        """On process 0: gives all others a value of JSON, which each gets by `next_order`. Waits only if they are far behind."""
        self._run(self._send({"order": what}))

    def next_order(self) -> Any:
        """On the others: returns what process 0 ordered next, and waits for it."""
        return self._orders.get()

    def finish(self) -> None:
        """Waits until every process has called this. Then all may end, in any order."""
        self._run(self._finish())
        self._all_done.wait()

    def close(self) -> None:
        """Closes all connections and ends the thread. The others take it for the end of this process."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._reserved is not None:
            self._reserved.close()

    async def _close(self) -> None:
        self._news = self._news or News(self._index, 0, "")  # what follows is no news
        for server in self._servers:
            server.close()
        for writer in self._connections + self._strangers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, service: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection to process 0. A stranger is told off."""
        self._strangers.append(writer)
        if len(self._strangers) > STRANGERS + 4 * self._count:
            self._strangers.pop(0).transport.abort()
        caller = None
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            caller = await asyncio.wait_for(self._caller(reader, writer), FIRST_LINE_SECONDS)
        if writer in self._strangers:
            self._strangers.remove(writer)
        if caller is None or writer.is_closing():
            return writer.close()
        self._connections.append(writer)
        greeting = {"proof": caller.answer}
        if caller.kind == RELAY:
            await _write(writer, greeting)
            return await self._relay(reader, writer, LOCAL, service)
        refusal = self._refusal(caller.process, caller.processes)
        if refusal:
            await _write(writer, greeting | {"refused": refusal})
            return writer.close()
        return await self._watch(caller.process, reader, writer, greeting)

    async def _caller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Caller | None:
        """Returns who calls process 0, or None for one that does not prove the secret, who is told so."""
        own = secrets.token_hex(16)
        writer.write(b"zerojax %s\n" % own.encode())
        if found := _CALL.fullmatch(await _short_line(reader)):
            kind, index, count, word, proof = (part.decode() for part in found.groups())
            if hmac.compare_digest(proof, self._proof(kind, index, count, own, word)):
                return Caller(kind, int(index), int(count), self._proof(own, word))
        await _write(writer, {"refused": f"--coordinator: this {UNPROVEN}; give all of them the same {VARIABLE}"})
        return None

    def _proof(self, *words: str) -> str:
        return hmac.digest(self._secret, " ".join(words).encode(), "sha256").hex()

    def _refusal(self, index: int, count: int) -> str:
        """Returns why a process cannot join, or ""."""
        if count != self._count:
            return f"--num_processes: process {index} has {count}, and process 0 has {self._count}; start all with the same"
        if index in self._writers or not 0 < index < count:
            return f"--process_id: there is a process {index} already; give each process its own"
        return ""

    async def _call(self, kind: str, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection to process 0, each of the two proving the secret to the other.

        Raises:
          OSError: nothing answers, or something that is not process 0.
          UserError: process 0 refuses this one.
        """
        reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_ORDER)
        self._connections.append(writer)
        try:
            greeting = _GREETING.fullmatch(await asyncio.wait_for(_short_line(reader), FIRST_LINE_SECONDS))
            if greeting is None:
                raise ConnectionError("another program listens there")
            far, own = greeting[1].decode(), secrets.token_hex(16)
            words = (kind, str(self._index), str(self._count))
            call = "zerojax {} {} of {} {} {}\n".format(*words, own, self._proof(*words, far, own))
            writer.write(call.encode())
            said = await asyncio.wait_for(_short_line(reader), FIRST_LINE_SECONDS)
            if not said:
                raise ConnectionError("the connection was closed")
            answer = _message(said)
            if refused := answer.get("refused"):
                raise UserError(str(refused))
            if not hmac.compare_digest(str(answer.get("proof")).encode(), self._proof(far, own).encode()):
                raise ConnectionError(f"what listens there {UNPROVEN}")
        except BaseException as error:
            self._connections.remove(writer)
            writer.transport.abort()
            if isinstance(error, ValueError) and not isinstance(error, UserError):
                raise ConnectionError(f"another program listens there ({errors.first_line(error)})") from error
            raise
        return reader, writer

    async def _join(self, host: str, port: int) -> int:
        """Connects to process 0, and returns the port that relays to it."""
        reader, writer = await self._call(PROCESS, host, port)

        async def relayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._relay(reader, writer, host, port)

        server = await asyncio.start_server(relayed, LOCAL, 0)
        self._servers.append(server)
        self._start(self._watch(0, reader, writer))
        return server.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        """Copies a connection of an XLA client to `port` and back. The client never sees that the other end is closed.

        On process 0 the port is that of XLA's service, and on the others that of process 0.
        """
        self._connections.append(writer)
        try:
            far_reader, far_writer = await (
                self._call(RELAY, host, port) if self._index else asyncio.open_connection(host, port)
            )
        except (OSError, UserError, TimeoutError):  # process 0 is gone, and `_watch` notices
            return await _never()
        self._connections.append(far_writer)
        self._start(_copy(far_reader, writer))
        await _copy(reader, far_writer)
        far_writer.close()
        return None if reader.at_eof() else await _never()  # the end of this function would close the connection

    async def _watch(
        self,
        other: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads what another process says, until it ends. Process 0 first answers with its proof."""
        _keep_alive(writer.get_extra_info("socket"))
        self._writers[other] = writer
        if greeting is not None:
            await _write(writer, greeting)
            self._note_if_all_here()
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                said = _message(line)
                if "status" in said:
                    news = News(said.get("process", other), said["status"], said.get("line", 0))
                    if list(map(type, news)) != [int, int, str]:
                        raise ValueError(f"no news: {line!r}")
                    await self._learn(news)
                elif "done" in said:
                    self._done.add(other)
                    await self._note_if_all_done()
                elif "here" in said:
                    self._all_here.set()
                elif "order" in said and other == 0:
                    self._orders.put(said["order"])
        if not self._all_done.is_set():
            await self._learn(News(other, 1, ""))

    async def _learn(self, news: News) -> None:
        """Ends this process soon, because another one ended. Process 0 tells the rest."""
        if self._news is not None:
            return
        self._news = news
        self._told.set()
        timer = threading.Timer(GRACE_SECONDS, ending.leave, (news.status or 1, str(news)))
        timer.daemon = True
        timer.start()
        if self._index == 0:
            await self._send(news._asdict())

    async def _finish(self) -> None:
        self._done.add(self._index)
        if self._index:
            await self._send({"done": True})
        await self._note_if_all_done()

    async def _note_if_all_done(self) -> None:
        """On process 0: lets all end once all are done. On the others: process 0 said so."""
        if (self._index and 0 in self._done) or len(self._done) == self._count:
            await self._send({"done": True})
            self._all_done.set()

    def _note_if_all_here(self) -> None:
        """On process 0: tells all that they can start, once all are here."""
        if self._index == 0 and len(self._writers) == self._count - 1 and not self._all_here.is_set():
            self._all_here.set()
            asyncio.run_coroutine_threadsafe(self._send({"here": True}), self._loop)

    async def _send(self, message: Mapping[str, Any]) -> None:
        for writer in list(self._writers.values()):
            with contextlib.suppress(OSError):
                await _write(writer, message)


def _message(line: bytes) -> dict[str, Any]:
    """Returns what another process wrote. Raises ValueError if no process of ours wrote it."""
    found = bounded.parse_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"no message: {line!r}")
    return found


async def _write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _short_line(reader: asyncio.StreamReader, most: int = 1000) -> bytes:
    """Returns a line of one who has proven nothing, or its first bytes, with nothing read beyond it."""
    line = b""
    while len(line) < most and not line.endswith(b"\n") and (byte := await reader.read(1)):
        line += byte
    return line


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until the end of either connection."""
    with contextlib.suppress(OSError):
        while data := await reader.read(BLOCK):
            writer.write(data)
            await writer.drain()


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice that the other host is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
