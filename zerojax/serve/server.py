"""Serves an application on a socket. This module is the process of a server: its socket, its signals, and its end.

The socket listens while the service is made, in another thread. The first SIGTERM or SIGINT after that drains: new requests are refused
with 503, those that run are answered, and the process ends with status 0. One before it, or a second one, ends the process at once.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import uvicorn
from uvicorn.protocols.http import h11_impl

from zerojax import errors
from zerojax.errors import UserError
from zerojax.launch import early, ending, start_up
from zerojax.serve import starting as starting_lib

HEADER_SECONDS = 10.0  # in which a request's headers must have come
READ_SECONDS = 60.0  # in which a client must have read some of what is sent to it
CONNECTIONS = 1024  # at once
_TICK = 0.05  # seconds between looks whether all answers have ended


class Servable(Protocol):
    """What is served.

    Attributes:
      failure: why nothing is answered any more, in one line; "" while it is.
      is_draining: whether new requests are refused.
      active: answers that have not ended.
    """

    is_draining: bool
    active: int

    @property
    def failure(self) -> str: ...

    def app(self) -> Any:
        """Returns the application."""


Service = TypeVar("Service", bound=Servable)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket of an address, on which nobody can connect before `serve` listens.

    Raises:
      UserError: the address is not this machine's, or is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host}: is not an address ({errors.first_line(error)}); give one of this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: is taken on {host}; give another, or 0 for one that is free") from error
        way_out = "give one above 1023" if error.errno == errno.EACCES else "give an address of this machine"
        raise UserError(
            f"--host {host}, --port {port}: cannot be served ({os.strerror(error.errno or 0)}); {way_out}"
        ) from error
    return bound


def url(bound: socket.socket) -> str:
    """Returns the URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether only this machine reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def names(host: str, bound: socket.socket) -> set[str]:
    """Returns the names by which clients reach a socket that was bound to `host`, beside localhost."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    far = set() if is_loopback(bound) else {socket.getfqdn().lower()}  # which may ask a server of names
    return {host.lower(), own, short, f"{short}.local", *far}


def is_own(host: str, port: int, bound: socket.socket) -> bool:
    """Returns whether an address is a socket's own, as far as this machine knows its names."""
    address, own_port = bound.getsockname()[:2]
    own = ipaddress.ip_address(address.partition("%")[0])
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        is_here = host == "localhost" or (own.is_unspecified and host in names("", bound))
        return port == own_port and is_here and (own.is_unspecified or own.is_loopback)
    return port == own_port and (found == own or (own.is_unspecified and found.is_loopback))


def serve(
    make: Callable[[Callable[[str], None]], Service],
    bound: socket.socket,
    on_start: Callable[[Service], None],
) -> Service:
    """Makes a service and serves it until a signal, or until its engine fails. Returns the service.

    Args:
      make: makes it, in a thread of its own, and says what it waits for by the function that it is given. Until it returns, requests get
        503 with that.
      bound: of `bind`.
      on_start: is called when requests are answered, unless the service has failed before.

    Raises:
      what `make` raises.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of most clients that leave a stream
    with start_up.collector_restored():
        return asyncio.run(_serve(make, bound, on_start))


def made(app: starting_lib.Application) -> "_Server":
    """Returns uvicorn's server of an application."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=_Timed,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # what fails is told in one line by the application
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
    )
    return _Server(config)


async def _serve(
    make: Callable[[Callable[[str], None]], Service],
    bound: socket.socket,
    on_start: Callable[[Service], None],
) -> Service:
    loop, former = asyncio.get_running_loop(), {}
    starting = starting_lib.Starting()
    server, service = made(starting), None

    def wait_for(what: str) -> None:
        starting.waits_for = what

    def stop(number: int) -> None:
        if service is None:
            ending.leave(early.status(number), early.line(number))
        if service.is_draining:
            ending.leave(early.status(number), f"zerojax: {early.INTERRUPTED[signal.Signals(number)]} while it drained")
        service.is_draining = True

    for number in filter(early.listens_for, early.STOPS):
        former[number] = signal.getsignal(number)
        loop.add_signal_handler(number, stop, number)
    running = asyncio.ensure_future(server.serve([bound]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        service = await asyncio.to_thread(make, wait_for)
        starting.become(service.app())
        start_up.spare_collector()  # or what requests leave in cycles stays until it is a fourth of all objects
        if not service.failure:
            on_start(service)
        while not running.done() and not service.failure and not (service.is_draining and not service.active):
            await asyncio.sleep(_TICK)
        service.is_draining = True
        await asyncio.sleep(_TICK)  # those that wait are told
        return service
    finally:
        server.should_exit = True
        await running
        for number in former:
            loop.remove_signal_handler(number)
            signal.signal(number, former[number])


class _Server(uvicorn.Server):
    """uvicorn's server without its own signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Timed(h11_impl.H11Protocol):
    """uvicorn's connection, which ends when a request's headers do not come, or when its client does not read."""

    _timer: Any = None
    _reader_timer: Any = None  # while something is not read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` tells of each byte that waits for the client
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_between() and self._timer is None:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()  # it would hold all of this until its time

    def _wait_for_reader(self) -> None:
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < left:
                self._wait_for_reader()
            else:
                self.transport.abort()  # its answers end, and the server can

        self._reader_timer = self.loop.call_later(READ_SECONDS, look)

    def _wait(self) -> None:
        cycle = self.cycle

        def end() -> None:
            self._timer = None
            if self._is_between() and self.cycle is cycle:
                self.transport.close()
            elif self._is_between():  # a request was answered since
                self._wait()

        self._timer = self.loop.call_later(HEADER_SECONDS, end)

    def _is_between(self) -> bool:
        """Returns whether no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete
