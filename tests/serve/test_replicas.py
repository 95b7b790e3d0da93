"""Passes requests on to small processes that stand for replicas. This module tests zerojax.serve.replicas."""

import asyncio
import contextlib
import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import httpx
import pytest
from programs import free_port

from zerojax.errors import UserError
from zerojax.serve import app, replicas, server
from zerojax.serve.requests import NotAnswered

LIMIT = 60  # seconds; what takes longer hangs
# Answers with its number and process, as a stream that never ends where a request asks for one, and 429 for the prompt "full".
STANDS_IN = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("asked", self.path)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/v1/models":
            own = {"id": sys.argv[1]}
            return self.answer(200, "application/json", json.dumps({"data": [own, {"id": "all"}]}).encode())
        self.answer(401 if self.headers.get("authorization") == "Bearer wrong" else 200, "text/plain", b'# HELP a b\\na 1\\nc{d="e"} 2\\n')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("prompt") == "full" and sys.argv[1] == "0":
            return self.answer(429, "application/json", b"{}")
        if asked.get("model", sys.argv[1]) not in (sys.argv[1], "all"):
            return self.answer(404, "application/json", b'{"error":{"code":"model_not_found"}}')
        if asked.get("prompt") == "late":
            print("was late", flush=True)
            return self.answer(503, "application/json", b'{"error":{"code":"timeout"}}')
        if not asked.get("stream"):
            time.sleep(asked.get("seconds", 0))
            return self.answer(200, "application/json", json.dumps([int(sys.argv[1]), os.getpid()]).encode())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while True:
                part = f"data: {os.getpid()}\\n\\n".encode()
                time.sleep(3 if asked.get("once") else 0)
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part))
                time.sleep(0.01)
        except OSError:
            print("nobody reads", flush=True)
own = http.server.ThreadingHTTPServer(("127.0.0.1", int((sys.argv + ["0"])[2])), Handler)
print(f"zerojax: it is served at http://127.0.0.1:{own.server_port}", flush=True)
own.serve_forever()
"""


def made(count, code=STANDS_IN, lines=None):
    tell = (lambda line: None) if lines is None else lines.append
    return [
        replicas.ServerProcess(n, [sys.executable, "-c", code, str(n)], dict(os.environ), tell) for n in range(count)
    ]


@contextlib.contextmanager
def served(count, lines=None, own=None, **limits):
    """Gives the router of stand-ins, or of other replicas, and a client of it, when all are ready."""
    router = replicas.Router(own or made(count, lines=lines), name="it", limits=app.Limits(**limits))
    router.start(lambda line: None)
    until(lambda: all(replica.port for replica in router.replicas))
    listening = server.made(router.app())
    with server.bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(listening.serve([bound])))
        thread.start()
        try:
            until(lambda: listening.started)
            with httpx.Client(base_url=server.url(bound), timeout=LIMIT) as client:
                yield router, client
        finally:
            listening.should_exit = True
            router.stop(LIMIT)
            thread.join(LIMIT)


def until(is_so):
    ends = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def blocks_of(text):
    return list(replicas._blocks(json.dumps({"prompt": text}).encode()))


def test_the_replica_with_the_fewest_answers_is_chosen_or_one_that_knows_more():
    own = made(3)
    router = replicas.Router(own, name="it", limits=app.Limits())
    with pytest.raises(NotAnswered, match="no replica is ready"):
        router.choose([])
    own[0].port = own[1].port = 1
    own[0].active = 1
    assert router.choose([]) is own[1]
    text = "a" * 5000
    own[0].learn(blocks_of(text))
    assert own[0].knows(blocks_of(text + "b" * 5000)) == own[0].knows(blocks_of(text)) - 0 > 8
    assert own[0].knows(blocks_of("b" + text)) == 0
    assert router.choose(blocks_of(text + "more")) is own[0]
    own[0].active = replicas.SLACK + 1
    assert router.choose(blocks_of(text)) is own[1]
    assert router.choose(blocks_of(text), [own[1]]) is own[0]
    own[0].active = 0
    assert {router.choose([]).number for _ in range(4)} == {0, 1}  # in turn


def test_what_is_remembered_of_a_replica_is_bounded(monkeypatch):
    monkeypatch.setattr(replicas, "MOST_BLOCKS", 10)
    (own,) = made(1)
    for number in range(5):
        own.learn(blocks_of(f"{number}" * 3000))
    assert len(own._known) == 10 and own.knows(blocks_of("4" * 3000)) == 5 and own.knows(blocks_of("0" * 3000)) == 0


class FullDisk(list):
    """Lines that are not written."""

    def append(self, line):
        super().append(line)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_one_that_is_killed_is_told_and_started_again_while_the_others_answer():
    lines = FullDisk()
    with served(2, lines) as (router, client):
        ask = lambda **more: client.post("/v1/completions", json={"prompt": "a", **more})  # noqa: E731
        assert {ask().json()[0] for _ in range(4)} == {0, 1}
        assert client.get("/health").json() == {"status": "ok", "replicas": 2, "ready": 2}
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as stream:
            events = stream.iter_lines()
            victim = int(next(events).removeprefix("data: "))
            number = next(r.number for r in router.replicas if r.active)
            os.kill(victim, signal.SIGKILL)
            told = json.loads([line for line in events if line.startswith("data: {")][-1].removeprefix("data: "))
        assert told["error"]["code"] == "replica_ended" and f"replica {number} " in told["error"]["message"]
        assert ask().json()[0] in (0, 1)
        until(lambda: router.replicas[number].starts == 2 and router.replicas[number].port)
        assert {ask().json()[0] for _ in range(4)} == {0, 1} and router.active == 0
        # A request of which nothing came back goes to another one
        slow = threading.Thread(target=lambda: found.append(ask(seconds=1).json()[1]))
        found: list[int] = []
        slow.start()
        until(lambda: any(r.active for r in router.replicas))
        busy = next(r for r in router.replicas if r.active)
        gone = busy._process.pid
        os.kill(gone, signal.SIGKILL)
        slow.join(LIMIT)
        assert found and found[0] != gone
    assert any(line == f"[replica {number}] ended with status -9; starting it again" for line in lines)


def test_a_full_queue_goes_on_to_another_and_counts_have_their_replica():
    with served(2) as (router, client):
        assert {client.post("/v1/completions", json={"prompt": "full"}).json()[0] for _ in range(4)} == {1}
        counts = client.get("/metrics").text.splitlines()
        assert counts.count("# HELP a b") == 1 and 'a{replica="1"} 1' in counts and 'c{replica="0",d="e"} 2' in counts
        assert 'zerojax_replica_starts_total{replica="0"} 1' in counts
        assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
        for headers, status in (({"host": "evil.example"}, 403), ({"content-type": "text/plain"}, 415)):
            assert client.post("/v1/completions", content=b"{}", headers=headers).status_code == status
        for path in ("/v1/models/a%20b", "/v1/models/%C3%BC", "/%00?a=%20"):
            found = client.get(path, headers={"authorization": b"Bearer \xfc"})
            assert (found.status_code, found.headers["asked"]) == (200, path)
        assert {client.request(method, "/v1/a").status_code for method in ("PUT", "DELETE", "OPTIONS")} == {501}
        with mock.patch.object(router, "choose", lambda *_: 1 / 0):
            fault = client.post("/v1/completions", json={})
        assert fault.status_code == 500 and "ZeroDivisionError" in fault.json()["error"]["message"]
        router.is_draining = True
        assert client.post("/v1/completions", json={}).status_code == client.get("/health").status_code == 503


def test_a_client_that_leaves_is_left_by_the_replica_too():
    lines = []
    with served(1, lines) as (router, client):
        with client.stream("POST", "/v1/completions", json={"stream": True}) as stream:
            next(stream.iter_lines())
        until(lambda: any("nobody reads" in line for line in lines))
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"seconds": 5}, timeout=0.3)
        until(lambda: router.active == 0)


def test_an_address_that_does_not_answer_is_left_out_until_it_does(monkeypatch):
    monkeypatch.setattr(replicas, "_PAUSE", 0.05)
    lines, ports = [], [free_port(), free_port()]
    start = lambda n: subprocess.Popen([sys.executable, "-c", STANDS_IN, str(n), str(ports[n])])  # noqa: E731
    running = [start(0), start(1)]
    own = [replicas.Address(n, f"127.0.0.1:{port}", lines.append) for n, port in enumerate(ports)]
    try:
        with served(2, own=own) as (_, client):
            ask = lambda: client.post("/v1/completions", json={"prompt": "a"}).json()  # noqa: E731
            assert {ask()[0] for _ in range(4)} == {0, 1}
            running[0].kill()
            running[0].wait()
            assert {ask()[0] for _ in range(4)} == {1}  # also before anybody has noticed
            until(lambda: client.get("/health").json() == {"status": "ok", "replicas": 2, "ready": 1})
            running[0] = start(0)
            until(lambda: own[0].port)
            assert {ask()[0] for _ in range(4)} == {0, 1} and (own[0].starts, own[1].starts) == (2, 1)
        assert all(process.poll() is None for process in running)  # they are somebody else's
    finally:
        for process in running:
            process.kill()
            process.wait()
    left_out = f"[replica 0] 127.0.0.1:{ports[0]} does not answer ("
    assert any(line.startswith(left_out) and "left out until it does" in line for line in lines)


def test_what_a_server_that_hangs_had_not_answered_goes_to_another(monkeypatch):
    monkeypatch.setattr(replicas, "_PAUSE", 0.05)
    monkeypatch.setattr(replicas, "_CONNECT", 0.5)
    behind = made(2)
    with served(2, own=behind):
        own = [replicas.Address(n, f"127.0.0.1:{one.port}", lambda line: None) for n, one in enumerate(behind)]
        with served(2, own=own) as (router, client):
            [first] = {client.post("/v1/completions", json={"prompt": "a"}).json()[0]}
            other = 1 - first
            os.kill(behind[other]._process.pid, signal.SIGSTOP)
            try:
                assert client.post("/v1/completions", json={"prompt": "a"}).json()[0] == first
                assert own[other].hangs and not own[other].port
                assert f'a{{replica="{first}"}}' in client.get("/metrics").text
            finally:
                os.kill(behind[other]._process.pid, signal.SIGCONT)
            until(lambda: own[other].port)
            assert router.active == 0


def test_a_server_that_passes_requests_on_is_no_replica_so_none_goes_round():
    lines = []
    with served(1) as (_, client):
        assert client.get("/health", headers={replicas._ROUTED: "1"}).status_code == 200  # replicas of its own
        own = [replicas.Address(0, str(client.base_url), lines.append)]
        with served(1, own=own) as (_, front):
            outer = replicas.Address(1, str(front.base_url), lines.append)
            outer.start()
            until(lambda: any(line.startswith("[replica 1] ") for line in lines))
            assert not outer.port
            answer = front.post("/v1/completions", json={"prompt": "a"}, headers={replicas._ROUTED: "1"})
            assert answer.status_code == 508 and "route to the servers behind it" in answer.text
    assert "(it passes requests on itself (--route), to this server perhaps" in lines[-1]


def test_a_request_goes_to_a_server_that_has_its_model_and_all_models_are_listed():
    with served(2) as (_, client):

        def ask(model, **more):
            return client.post("/v1/completions", json={"model": model, **more})

        assert [ask(name).json()[0] for name in "0110" * 2] == [0, 1, 1, 0] * 2
        assert {ask("all").json()[0] for _ in range(4)} == {0, 1}
        none = ask("x")
        assert (none.status_code, none.json()["error"]["code"]) == (404, "model_not_found")
        assert ask("1", prompt="full").json()[0] == 1 and ask("0", prompt="full").status_code == 429
        assert sorted(model["id"] for model in client.get("/v1/models").json()["data"]) == ["0", "1", "all"]


def test_a_model_that_no_server_has_may_come_back_with_one_that_is_not_ready():
    with served(1) as (_, client):
        own = [replicas.Address(0, str(client.base_url), lambda line: None)]
        with served(1, own=own) as (router, front):
            ask = lambda: front.post("/v1/completions", json={"model": "x"})  # noqa: E731
            none = ask()
            assert none.status_code == 404 and "no server has it; GET /v1/models" in none.json()["error"]["message"]
            router.replicas.append(replicas.Address(1, "127.0.0.1:1", lambda line: None))  # nothing is there
            away = ask()
            assert away.status_code == 503 and "1 of 2 are not ready" in away.json()["error"]["message"]


def test_a_server_that_lists_no_models_is_left_out_of_them():
    for text in (
        "<html>",
        "[1]",
        "{}",
        '{"data":5}',
        '{"data":["a"]}',
        '{"data":[{"id":[1]}]}',
        '{"data":[{"id":"\\ud800"}]}',
    ):
        assert replicas._models_of(text.encode()) == []
    listed = 'json.dumps({"data": [own, {"id": "all"}]}).encode()'
    assert listed in STANDS_IN
    with served(2, own=[*made(1), *made(1, STANDS_IN.replace(listed, "b'[1]'"))]) as (_, client):
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["0", "all"]
    with served(1, own=made(1, STANDS_IN.replace(listed, "b'[1]'"))) as (_, client):
        none = client.get("/v1/models")
        assert none.status_code == 503 and "lists its models" in none.json()["error"]["message"]


@pytest.mark.parametrize("of", ["127.0.0.1", "0.0.0.0"])
def test_a_servers_own_address_is_known(of):
    with server.bind(of, 0) as bound:
        port = bound.getsockname()[1]
        own = [
            name
            for name in ("localhost", "127.0.0.1", "127.0.0.2", "10.9.8.7", socket.gethostname(), "other")
            if server.is_own(name.lower(), port, bound)
        ]
        wanted = ["localhost", "127.0.0.1"]
        assert own == (wanted if of == "127.0.0.1" else [*wanted, "127.0.0.2", socket.gethostname()])
        assert not server.is_own("localhost", port + 1, bound)


def test_an_answer_takes_no_longer_than_the_limit_and_is_not_begun_anew(monkeypatch):
    monkeypatch.setattr(replicas, "_LATE", 0.2)
    lines = []
    with served(2, lines, seconds=0.2) as (router, client):
        late = client.post("/v1/completions", json={"prompt": "a", "seconds": 3})
        assert late.status_code == 503 and "limit of 0.2 s (--max_seconds)" in late.json()["error"]["message"]
        with client.stream("POST", "/v1/completions", json={"stream": True, "once": True}) as answer:
            assert "(--max_seconds)" in "".join(answer.iter_text())
        until(lambda: router.active == 0)
        assert client.post("/v1/completions", json={"prompt": "late"}).status_code == 503
    assert sum("was late" in line for line in lines) == 1


@pytest.mark.parametrize(
    "address",
    ["a", "a:0", "a:x", "https://a:1", "http://a:1/v1", ":1", "a b:1", "me@a:1", "a:1#b", "a..b:1", f"{'a' * 64}:1"],
)
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(UserError, match="must be HOST:PORT"):
        replicas.Address(0, address)


def test_an_address_that_is_given_twice_is_refused():
    with pytest.raises(UserError, match="--route a:1: is given 2 times"):
        replicas.addresses(["a:1", "b:1", "http://A:1/"])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_replicas_end_with_the_server_that_is_killed():
    code = f"""
import time
from zerojax.serve import replicas
own = replicas.ServerProcess(0, {[sys.executable, "-c", STANDS_IN, "0"]!r}, dict({{}}), lambda line: None)
own.start()
while not own.port:
    time.sleep(0.01)
print(own._process.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server_process:
        replica = int(server_process.stdout.readline())
        server_process.kill()
    until(lambda: not pathlib.Path(f"/proc/{replica}").exists() or "(zombie)" in state(replica))


def state(process):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/status").read_text()
    return "(zombie)"


@pytest.mark.parametrize("status, starts", [(2, 1), (1, replicas.STARTS)])
def test_a_replica_that_cannot_start_is_given_up(monkeypatch, status, starts):
    """With status 2 what it was told is wrong, so that it is not tried again."""
    monkeypatch.setattr(replicas, "_PAUSE", 0.0)
    router = replicas.Router(made(2, f"import sys; sys.exit({status})"), name="it", limits=app.Limits())
    router.start(lambda line: None)
    assert router.failure and [replica.starts for replica in router.replicas] == [starts, starts]


def test_gpus_are_divided_over_replicas():
    own = replicas.environments(2, ["0", "2", "3", "5"], 2)
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in own] == ["0,2", "3,5"]
    assert all("CUDA_VISIBLE_DEVICES" not in e for e in replicas.environments(2, [], 1)) or os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    )
