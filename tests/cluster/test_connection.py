"""Checks the connection to a host's agent. This module tests zerojax.cluster.connection."""

import queue
import sys

import launches

from zerojax.cluster import agent, connection


def open_to(host: str, **options) -> tuple[connection.Connection, queue.SimpleQueue]:
    inbox: queue.SimpleQueue[connection.Message] = queue.SimpleQueue()
    return connection.Connection(host, inbox, **{"python": sys.executable, **options}), inbox


def test_an_agent_says_hello_answers_pings_and_ends_with_its_input():
    one, inbox = open_to("localhost")
    hello = inbox.get(timeout=launches.LIMIT)
    assert hello.host == "localhost" and hello.frame["hello"]["python"] == sys.version.split()[0]
    one.ping()
    assert abs(launches.wait_until(lambda: one.clock is not None and one.clock + 1) - 1) < 1
    one.close()
    frames = [inbox.get(timeout=launches.LIMIT).frame for _ in range(2)]
    assert frames[0] == {"bye": True} and "lost" in frames[1] and one.is_lost
    one.wait(5)


def test_what_a_login_shell_prints_is_no_frame(tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    one, inbox = open_to("node-a")
    assert "hello" in inbox.get(timeout=launches.LIMIT).frame  # the ssh of these tests prints a welcome first
    one.close()
    one.wait(5)


def test_what_goes_wrong_on_the_other_side_is_quoted(tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    one, inbox = open_to("node-a", python="/no/python")
    lost = inbox.get(timeout=launches.LIMIT).frame["lost"]
    assert "/no/python" in lost and "Welcome to node-a" in lost
    one.wait(5)


def test_a_users_ssh_options_come_first_and_the_python_is_quoted():
    words = connection.command("node-a", "/opt/my python/bin/python", ["-p", "2222", "-o", "BatchMode=no"])
    assert words[:6] == ["ssh", "-T", "-p", "2222", "-o", "BatchMode=no"] and words[-2] == "node-a"
    assert words[-1].startswith("'/opt/my python/bin/python' -I -S -c ") and "ServerAliveInterval=5" in words
    assert connection.command("localhost", "/x", [])[0] == sys.executable


def test_the_boot_program_survives_a_remote_shell():
    assert not set(agent.BOOT) & set('$`\\!"')
