"""Checks that processes learn of each other's end. This module tests zerojax.launch.peers with several of them in one process."""

import contextlib
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
    with socket.create_connection((peers.LOCAL, port), timeout=SOON) as connection:
        connection.sendall(b"zerojax process 1 of 2\n" + words + b"\n")
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
