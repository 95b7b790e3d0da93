"""Checks that a process ends in time with its line, whatever it does. This module tests zerojax.launch.ending in child processes."""

import json
import subprocess
import sys

import programs

CASES = {  # name -> (code, exit status, stdout, stderr)
    "a line and a last action": ("ending.before_end(lambda *how: print(*how)); ending.leave(3, 'bye')", 3, "3 bye\n", "bye\n"),
    "an action taken back": ("ending.before_end(lambda *_: print('x'))(); ending.leave(0)", 0, "", ""),
    "a failing action": ("ending.before_end(lambda *_: 1 / 0); print('kept', end=''); ending.leave(0)", 0, "kept", ""),
    "a stuck action": ("ending.FAREWELL_SECONDS = 0.2; ending.before_end(lambda *_: time.sleep(60)); ending.leave(4, 'b')", 4, "", "b\n"),
    "a stuck thread": ("threading.Thread(target=time.sleep, args=(60,)).start(); ending.leave(5)", 5, "", ""),
    "two threads": ("[threading.Thread(target=ending.leave, args=(6, 'bye')).start() for _ in range(9)]; time.sleep(60)", 6, "", "bye\n"),
    "a closed stdout": ("lose(1); guard(); print('x'); print('y'); ending.leave(0)", 0, "", "lost 32\n"),
    "both closed": ("lose(1); lose(2); guard(); print('x'); ending.leave(7, 'bye')", 7, "", ""),
    "a full disk": ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1); guard(); print('x'); ending.leave(0)", 0, "", "lost 28\n"),
    "no stdout": ("os.close(1); guard(); print('x'); assert os.open('/dev/null', 0) > 2; ending.leave(0)", 0, "", ""),
    "open streams": ("guard(); print('out'); print('err', file=sys.stderr); ending.leave(0)", 0, "out\n", "err\n"),
}  # fmt: skip
FORKS = """
import json, os, sys, threading, time
from zerojax.launch import ending
def lose(number):
    reader, writer = os.pipe()
    os.dup2(writer, number)
    os.close(reader)
def guard():
    ending.guard_streams(lambda error: print("lost", error.errno, file=sys.stderr))
for code in json.loads(sys.argv[1]):
    pipes = [os.pipe(), os.pipe()]
    if (pid := os.fork()) == 0:
        for number, (_, writer) in enumerate(pipes, 1):
            os.dup2(writer, number)
        exec(code)
    for _, writer in pipes:
        os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([status, *(os.read(reader, 1000).decode() for reader, _ in pipes)]))
"""


def test_a_process_ends_in_time_with_its_status_and_its_line():
    command = [sys.executable, "-c", FORKS, json.dumps([code for code, *_ in CASES.values()])]
    done = subprocess.run(command, env=programs.environment(), capture_output=True, text=True, timeout=50)
    found = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    assert found == {name: list(expected) for name, (_, *expected) in CASES.items()}, done.stderr
