"""Checks sockets. What a served process does is in tests/commands/test_serve.py. This module tests zerojax.serve.server."""

import asyncio
import gc
import logging
import socket
import threading
import types
import weakref

import httpx
import pytest

from zerojax.errors import UserError
from zerojax.serve import server


def test_an_address_is_bound_or_refused_in_one_line():
    with server.bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert server.is_loopback(bound) and server.url(bound) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):  # until it is served
            socket.create_connection(("127.0.0.1", port))
        bound.listen()
        with pytest.raises(UserError, match=f"--port {port}: is taken on 127.0.0.1"):
            server.bind("127.0.0.1", port)
    with server.bind("0.0.0.0", 0) as everywhere:
        assert not server.is_loopback(everywhere)
        own = socket.gethostname().lower()
        assert server.names("Node7", everywhere) >= {"node7", own, own.partition(".")[0], socket.getfqdn().lower()}
    for host in ("x" * 300, "192.0.2.1"):
        with pytest.raises(UserError, match="--host"):
            server.bind(host, 0)


def test_a_port_is_free_again_when_its_server_has_ended():
    with server.bind("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), bound.accept()[0] as answer:
            answer.close()  # the side that closes first keeps the port for a minute
    server.bind("127.0.0.1", port).close()


def test_who_is_told_of_the_start_can_connect_and_an_engine_that_failed_ends_it():
    service = types.SimpleNamespace(app=lambda: None, is_draining=False, active=0, failure="")
    before = gc.get_freeze_count()

    def on_start(_):
        service.failure = "it failed"
        socket.create_connection(bound.getsockname()).close()
        assert not logging.getLogger("asyncio").isEnabledFor(logging.WARNING), "it warns of clients that leave"
        assert gc.get_freeze_count() > before, "what the start made is not collected with what requests leave"

    with server.bind("127.0.0.1", 0) as bound:
        server.serve(lambda _: service, bound, on_start)
    assert service.is_draining
    with server.bind("127.0.0.1", 0) as bound:
        server.serve(lambda _: service, bound, pytest.fail)  # it failed while it was made: nobody is told of an address


def test_while_a_service_is_made_requests_get_503_with_what_is_waited_for_and_then_its_answers():
    go_on = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def make(wait_for):
        wait_for("reading the weights")
        assert go_on.wait(30)
        return types.SimpleNamespace(app=lambda: app, is_draining=False, active=0, failure="")

    async def run():
        with server.bind("127.0.0.1", 0) as bound:
            running = asyncio.ensure_future(server._serve(make, bound, made.append))
            async with httpx.AsyncClient(base_url=server.url(bound), timeout=10) as client:
                health = await until(client, lambda found: found.json()["waits_for"] == "reading the weights")
                assert health.status_code == 503 and health.headers["retry-after"] == "1"
                assert health.json() == {"status": "starting", "waits_for": "reading the weights"}
                for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/")):
                    answer = await client.request(method, path, json={})
                    error = answer.json()["error"]
                    assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "starting")
                    assert error["message"] == "the server is not ready (reading the weights); ask again later"
                assert not made
                go_on.set()
                await until(client, lambda found: found.status_code == 200)
            made[0].is_draining = True
            assert await asyncio.wait_for(running, 10) is made[0]

    async def until(client, is_so):
        while True:
            try:
                if is_so(found := await client.get("/health")):
                    return found
            except httpx.ConnectError:  # it does not listen yet
                pass
            await asyncio.sleep(0.01)

    made = []
    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_service_that_cannot_be_made_ends_the_server_with_its_error():
    def make(wait_for):
        raise UserError("config.json: is missing")

    with server.bind("127.0.0.1", 0) as bound, pytest.raises(UserError, match=r"^config\.json: is missing$"):
        server.serve(make, bound, pytest.fail)


def test_a_connection_without_a_request_ends_and_others_are_answered(monkeypatch):
    """A client sends half of a request's headers, one nothing, and one half of a second request's."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.2)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def talk(port, *texts):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = b""
        for text in texts:
            writer.write(text)
            if text.endswith(b"\r\n\r\n"):
                found += await asyncio.wait_for(reader.readuntil(b"ok"), 5)
        found += await asyncio.wait_for(reader.read(), 3)  # until the server closes
        writer.close()
        await writer.wait_closed()
        return found.count(b"200 OK")

    async def run():
        with server.bind("127.0.0.1", 0) as bound:
            service = types.SimpleNamespace(app=lambda: app, is_draining=False, active=0, failure="")
            whole, half = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"GET / HTTP/1.1\r\nhost:"
            loop, port = asyncio.get_running_loop(), bound.getsockname()[1]
            started = loop.create_future()
            running = asyncio.ensure_future(server._serve(lambda wait_for: service, bound, started.set_result))
            await started
            try:
                assert await asyncio.gather(talk(port, half), talk(port), talk(port, whole, half)) == [0, 0, 1]
            finally:
                service.is_draining = True
                await asyncio.wait_for(running, 10)

    asyncio.run(run())


def test_a_client_that_reads_nothing_does_not_keep_the_server_from_its_end_and_a_slow_one_gets_all(monkeypatch):
    monkeypatch.setattr(server, "READ_SECONDS", 0.5)
    body = bytes(8 * 2**20)  # more than the kernel takes

    async def app(scope, receive, send):
        service.active += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2):  # the second waits for a reader
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            service.active -= 1

    async def run():
        with server.bind("127.0.0.1", 0) as bound:
            started = asyncio.get_running_loop().create_future()
            running = asyncio.ensure_future(server._serve(lambda wait_for: service, bound, started.set_result))
            await started
            clients = [await asyncio.open_connection(*bound.getsockname(), limit=2**18) for _ in range(2)]
            for _, writer in clients:
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            found, slow = 0, clients[0][0]
            while found < 2 * len(body):
                await asyncio.sleep(0.01)
                found += len(await slow.read(2**18))
            service.is_draining = True
            await running
            for _, writer in clients:
                writer.transport.abort()

    service = types.SimpleNamespace(app=lambda: app, is_draining=False, active=0, failure="")
    asyncio.run(asyncio.wait_for(run(), 30))


def test_of_connections_that_have_ended_nothing_is_left(monkeypatch):
    made = weakref.WeakSet()

    class Watched(server._Timed):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.add(self)

    monkeypatch.setattr(server, "_Timed", Watched)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def left():
        gc.collect(1)  # the young objects, of which a long run of tests has few
        return len(made)

    async def run():
        with server.bind("127.0.0.1", 0) as bound:
            served = server.made(app)
            running = asyncio.ensure_future(served.serve([bound]))
            while not served.started:
                await asyncio.sleep(0.01)
            for request in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
                _, writer = await asyncio.open_connection(*bound.getsockname())
                writer.write(request)
                await asyncio.sleep(0.1)
                assert left() == 1
                writer.close()
            await asyncio.sleep(0.1)
            found = left()  # before their headers would have been late
            served.should_exit = True
            await running
            return found

    assert asyncio.run(asyncio.wait_for(run(), server.HEADER_SECONDS)) == 0
