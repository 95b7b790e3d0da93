"""Checks that processes learn of each other's end. This module tests zerojax.launch.peers with several of them in one process."""

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time

import programs
import pytest

from zerojax.errors import UserError
from zerojax.launch import ending, peers

SOON = 10.0  # seconds


@pytest.fixture
def left(monkeypatch):
    """Returns the (status, line) of each process that ended."""
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(ending, "leave", lambda status, line="": ends.append((status, line)))
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.01)
    made: list[peers.Peers] = []
    begin = peers.Peers.__init__
    monkeypatch.setattr(peers.Peers, "__init__", lambda peer, *how: made.append(peer) or begin(peer, *how))
    yield ends
    for peer in made:
        peer.close()


def joined(count: int) -> list[peers.Peers]:
    port = programs.free_port()
    every = [peers.Peers(index, count) for index in range(count)]
    every[0].listen(peers.LOCAL, port)
    for peer in every[1:]:
        peer.join(peers.LOCAL, port)
    assert [peer.wait(SOON) for peer in every] == [[]] * count
    return every


def call(port: int, kind: str, index: int, count: int, secret: bytes = b"") -> tuple[socket.socket, dict]:
    """Returns a connection to process 0 that has said who it is, and the answer."""
    connection = socket.create_connection((peers.LOCAL, port), timeout=SOON)
    lines = connection.makefile("rb")
    greeting = lines.readline().decode().split()
    assert greeting[0] == "zerojax"
    connection.sendall(call_line(kind, index, count, greeting[1], secret))
    return connection, json.loads(lines.readline())


def call_line(kind: str, index: int, count: int, word: str, secret: bytes) -> bytes:
    own = "0" * 32
    proof = hmac.new(secret, f"{kind} {index} {count} {word} {own}".encode(), hashlib.sha256).hexdigest()
    return f"zerojax {kind} {index} of {count} {own} {proof}\n".encode()


def disconnect(peer: peers.Peers) -> None:
    """Does what the kernel does when the process ends: all its connections end before it can say a word of one."""

    def abort() -> None:
        for writer in peer._writers.values():
            writer.transport.abort()

    peer._loop.call_soon_threadsafe(abort)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_all_learn_of_a_process_that_is_gone(left, dead):
    every = joined(3)
    disconnect(every[dead])
    for index, peer in enumerate(every):
        if index != dead:
            news = peer.news(SOON)
            assert news == (dead, 1, "") and str(news).startswith(
                f"zerojax: process {dead} is gone; this process ends too"
            )
    time.sleep(0.3)
    assert [status for status, _ in left if status] == [1] * len(left) and len(left) >= 2


@pytest.mark.parametrize("teller", [0, 2])
def test_all_learn_the_status_and_the_line_of_a_process_that_ends(left, teller):
    every = joined(3)
    every[teller].tell(2, "zerojax: config.x: is bad")
    for index, peer in enumerate(every):
        if index != teller:
            assert str(peer.news(SOON)) == f"zerojax: process {teller} ended with status 2: config.x: is bad"
    time.sleep(0.3)
    assert (2, f"zerojax: process {teller} ended with status 2: config.x: is bad") in left


def test_all_get_the_orders_of_process_0_in_their_order_however_long(left):
    every = joined(3)
    orders = [["add", 1, list(range(100_000))], [], "é\ud83d", "end"]
    for what in orders:
        every[0].order(what)
    assert [[peer.next_order() for _ in orders] for peer in every[1:]] == [orders, orders] and not left


def test_processes_that_are_done_wait_for_the_last_and_then_end_in_any_order(left):
    every = joined(3)
    waiting = [threading.Thread(target=peer.finish) for peer in every]
    for thread in waiting[:2]:
        thread.start()
    waiting[0].join(0.2)
    assert waiting[0].is_alive() and waiting[1].is_alive()
    waiting[2].start()
    for thread in waiting:
        thread.join(SOON)
    disconnect(every[0])
    assert not any(thread.is_alive() for thread in waiting) and every[1].news(0.2) is None and left == []


def test_a_missing_process_is_counted_and_a_second_one_of_a_number_or_another_count_refused(left):
    port = programs.free_port()
    first = peers.Peers(0, 3)
    first.listen(peers.LOCAL, port)
    assert first.wait(0) == [1, 2]
    peers.Peers(1, 3).join(peers.LOCAL, port)
    assert first.wait(0.1) == [2]
    for index, count, words in (
        (1, 3, "--process_id: there is a process 1 already"),
        (2, 4, "--num_processes: process 2 has 4"),
    ):
        with pytest.raises(UserError, match=words):
            peers.Peers(index, count).join(peers.LOCAL, port)


def test_the_coordinator_listens_on_its_address_alone_and_ignores_strangers(left):
    port = programs.free_port()
    first = peers.Peers(0, 2)
    first.listen(peers.LOCAL, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    for stranger in (b"", b"GET / HTTP/1.1\r\n", b"zerojax process x of y\n", b"\xff" * 100_000):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((peers.LOCAL, port), timeout=5) as connection,
        ):
            connection.sendall(stranger)
    second = peers.Peers(1, 2)
    second.join(peers.LOCAL, port)
    assert first.wait(SOON) == second.wait(SOON) == [] and left == []


@pytest.mark.parametrize("words", [b"SSH-2.0\n", b"[1]\n", b"[" * 60_000 + b"\n", b"x" * 100_000])
def test_a_stranger_at_the_port_of_process_0_is_no_process_0(words, left):
    with socket.create_server((peers.LOCAL, 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(words)
                connection.recv(100)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="another program listens there"):
            peers.Peers(1, 2).join(peers.LOCAL, server.getsockname()[1])
        thread.join()


@pytest.mark.parametrize("words", [b"[1]", b"{", b'{"status": "x", "line": "y"}', b'{"status": 3}', b"[" * 50_000])
def test_odd_words_of_another_process_count_as_its_end(words, left):
    port = programs.free_port()
    first = peers.Peers(0, 2)
    first.listen(peers.LOCAL, port)
    with call(port, "process", 1, 2)[0] as connection:
        connection.sendall(words + b"\n")
        assert first.news(SOON) == peers.News(1, 1, "")


def test_a_relayed_client_sees_bytes_both_ways_and_not_the_end_of_process_0(left):
    port = programs.free_port()
    first, second = peers.Peers(0, 2), peers.Peers(1, 2)
    service = int(first.listen(peers.LOCAL, port).rpartition(":")[2])
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((peers.LOCAL, service))
        server.listen()
        relay = int(second.join(peers.LOCAL, port).rpartition(":")[2])
        with socket.create_connection((peers.LOCAL, relay), timeout=SOON) as client:
            client.sendall(b"PRI * HTTP/2.0\r\nhello")
            far, _ = server.accept()
            with far:
                assert far.recv(100).startswith(b"PRI * HTTP/2.0\r\n")
                far.sendall(b"world")
                assert client.recv(5, socket.MSG_WAITALL) == b"world"
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):  # not b"", the end
                client.recv(1)


# --- strangers

SECRET = b"of this run alone"
REFUSED = {
    "refused": "--coordinator: this is no process of this run, as it does not prove the secret of the run; give all of them the same "
    "ZEROJAX_SECRET"
}


@pytest.fixture
def proven(left):
    """Returns the port and the two processes of a run with a secret, and a socket in place of XLA's service."""
    port = programs.free_port()
    first, second = (peers.Peers(index, 2, SECRET) for index in range(2))
    service = int(first.listen(peers.LOCAL, port).rpartition(":")[2])
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((peers.LOCAL, service))
        server.listen()
        server.settimeout(0.2)
        second.join(peers.LOCAL, port)
        assert first.wait(SOON) == second.wait(SOON) == []
        yield port, first, second, server


def overheard(port: int) -> bytes:
    """Returns what a true process said on another connection."""
    with socket.create_connection((peers.LOCAL, port), timeout=SOON) as connection:
        return call_line("process", 1, 2, connection.makefile("rb").readline().decode().split()[1], SECRET)


STRANGERS = {
    "nothing": lambda port: b"\n",
    "a browser": lambda port: b"GET / HTTP/1.1\r\n",
    "XLA's client": lambda port: b"PRI * HTTP/2.0\r\n",
    "without a proof": lambda port: b"zerojax process 1 of 2\n",
    "without a secret": lambda port: call_line("process", 1, 2, "0" * 32, b""),
    "again": overheard,
    "a relay": lambda port: call_line("relay", 1, 2, "0" * 32, b"another secret"),
    "much": lambda port: b"x" * 1000,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_port_is_told_off_and_changes_nothing(stranger, proven, left):
    port, first, second, service = proven
    with socket.create_connection((peers.LOCAL, port), timeout=SOON) as connection:
        lines = connection.makefile("rb")
        assert lines.readline().startswith(b"zerojax ")
        connection.sendall(STRANGERS[stranger](port))
        assert json.loads(lines.readline()) == REFUSED
        assert lines.read() == b""  # and closed
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((peers.LOCAL, port), timeout=SOON) as connection,
    ):
        connection.sendall(STRANGERS[stranger](port))
        connection.sendall(b'{"status": 3, "line": "zerojax: ended by a stranger"}\n{"order": ["a stranger\'s"]}\n')
        assert connection.recv(10_000, socket.MSG_WAITALL).count(b"\n") <= 2
    with pytest.raises(TimeoutError):
        service.accept()
    first.order("of process 0")
    assert second.next_order() == "of process 0" and first.news(0.1) is second.news(0) is None and left == []
    waiting = [threading.Thread(target=peer.finish) for peer in (first, second)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in waiting)


def test_who_proves_the_secret_is_answered_with_a_proof_and_only_then_told_what_is_wrong(proven):
    port, *_, service = proven
    connection, answer = call(port, "process", 1, 2, SECRET)
    with connection:
        assert answer.keys() == {"proof", "refused"} and "there is a process 1 already" in answer["refused"]
    connection, answer = call(port, "relay", 1, 2, SECRET)
    with connection:
        assert answer.keys() == {"proof"}
        connection.sendall(b"hello")
        far, _ = service.accept()
        with far:
            assert far.recv(5, socket.MSG_WAITALL) == b"hello"


@pytest.mark.parametrize("of_first, of_second", [(SECRET, b"another"), (SECRET, b""), (b"", SECRET)])
def test_processes_of_two_secrets_do_not_join(of_first, of_second, left):
    port = programs.free_port()
    first = peers.Peers(0, 2, of_first)
    first.listen(peers.LOCAL, port)
    with pytest.raises(
        UserError, match="does not prove the secret of the run; give all of them the same ZEROJAX_SECRET"
    ):
        peers.Peers(1, 2, of_second).join(peers.LOCAL, port)
    assert first.wait(0.1) == [1] and first.news(0) is None


def test_what_does_not_know_the_secret_is_no_process_0(left):
    with socket.create_server((peers.LOCAL, 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"zerojax " + b"0" * 32 + b"\n")
                connection.recv(1000)
                connection.sendall(json.dumps({"proof": "0" * 64}).encode() + b"\n")
                connection.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="what listens there is no process of this run"):
            peers.Peers(1, 2, SECRET).join(peers.LOCAL, server.getsockname()[1])
        thread.join(SOON)


def test_strangers_that_say_nothing_leave_room_for_the_processes(left, monkeypatch):
    monkeypatch.setattr(peers, "STRANGERS", 3)
    port = programs.free_port()
    first = peers.Peers(0, 2, SECRET)
    first.listen(peers.LOCAL, port)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((peers.LOCAL, port), timeout=SOON)) for _ in range(20)]
        with contextlib.suppress(ConnectionError):
            assert len(silent[0].recv(1000, socket.MSG_WAITALL)) <= 41  # and closed
        assert silent[-1].recv(41, socket.MSG_WAITALL).startswith(b"zerojax ")
        second = peers.Peers(1, 2, SECRET)
        second.join(peers.LOCAL, port)
        assert first.wait(SOON) == second.wait(SOON) == [] and left == []


@pytest.mark.parametrize(
    "host, secret, is_open",
    [("127.0.0.1", b"", False), (["127.0.0.1", "127.0.0.2"], b"", False), (None, b"", True), (None, SECRET, False)],
)
def test_a_run_without_a_secret_is_open_where_others_reach_it(host, secret, is_open, left):
    first = peers.Peers(0, 2, secret)
    first.listen(host, programs.free_port())
    assert first.is_open == is_open


def test_closing_says_nothing(left, caplog):
    for peer in joined(2):
        peer.close()
        peer.close = lambda: None
    assert not caplog.records
