"""Soaks a server with several engines: requests that are cancelled or wrong, and engines that are killed. Measures the router too.

    python scripts/soak_serve.py FOLDER --requests 1000 --kills 10 --out soak.json

Prompts are token ids. A share of the requests is cancelled at a random moment, a share has a
wrong field, and between the others an engine is killed with SIGKILL, each time when all engines answer. A request is lost if it has neither
its whole answer, equal to the first one for its prompt, nor an end that is told: a refusal of a wrong field, or in a stream the error
`replica_ended`, which only a kill explains. Memory is that of the process that listens, and grows by the slope of a line over the second
half of the requests, told with its standard error. Allocators fill up over the first thousands of requests.
`--speed` requests are then sent to the router and to an engine of its own, of a list of models and of one token.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import soak_steps

ROOT = pathlib.Path(__file__).parents[1]
PROMPTS = [[5 + n, 6, 7 + n] for n in range(8)]
LIMIT = 300.0  # seconds; what takes longer is lost
ENDED = "replica_ended"
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": "hot"},
    {"max_tokens": -1},
    {"prompt": [10**8]},
    {"model": "nobody"},
    {"unknown": 1},
)


@contextlib.contextmanager
def served(folder: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str, pathlib.Path]]:
    """Gives the process of a server, its address and the file of what it printed."""
    log = pathlib.Path(os.environ.get("TMPDIR", "/tmp"), f"soak_serve_{os.getpid()}_{len(flags)}.log")
    words = [
        sys.executable,
        "-m",
        "zerojax",
        "serve",
        folder,
        "--port",
        "0",
        "--slots",
        "4",
        "--max_len",
        "128",
        *flags,
    ]
    with log.open("wb") as out, subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + LIMIT
            while not (found := [line for line in log.read_text().splitlines() if " is served at " in line]):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"soak_serve: the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield process, found[0].split()[-1], log
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def rss(pid: int) -> int:
    """Returns the bytes of memory that a process has."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def children(pid: int) -> list[int]:
    """Returns the processes that a process started."""
    return [
        int(word)
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]


def growth(memory: Sequence[int]) -> tuple[float, float]:
    """Returns the slope of a line over the second half of the bytes after each request, and its standard error."""
    late = np.asarray(memory[len(memory) // 2 :], float)
    return soak_steps.line(np.arange(len(late)), late) if len(late) > 2 else (0.0, 0.0)


async def ask(
    client: httpx.AsyncClient, name: str, kind: str, prompt: list[int], chance: random.Random
) -> tuple[str, str]:
    """Sends one request, and returns how it ended and its text.

    Args:
      kind: "whole", "stream", "cancel" or "wrong".
    """
    body: dict[str, Any] = {
        "model": name,
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "stream": kind != "whole",
    }
    if kind == "wrong":
        answer = await client.post("/v1/completions", json={**body, "stream": False, **chance.choice(WRONG)})
        is_told = answer.status_code in (400, 404) and answer.json()["error"]["message"]
        return ("refused" if is_told else f"LOST: status {answer.status_code}"), ""
    if kind == "whole":
        answer = await client.post("/v1/completions", json=body)
        found = answer.json()
        return ("answered", found["choices"][0]["text"]) if answer.status_code == 200 else (f"LOST: {found}", "")
    text, left = "", chance.randrange(1, 30)
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            left -= kind == "cancel"
            if left <= 0:
                return "cancelled", ""
            if line == "data: [DONE]":
                return "answered", text
            if line.startswith("data: "):
                found = json.loads(line[6:])
                if "error" in found:
                    return (ENDED if found["error"]["code"] == ENDED else f"LOST: {found}"), ""
                text += found["choices"][0]["text"]
    return "LOST: a stream without an end", ""


async def soak(url: str, pid: int, name: str, requests: int, kills: int, together: int, seed: int) -> dict[str, Any]:
    """Sends the requests, and returns how many ended how, what is wrong, and the growth of memory."""
    chance, ends, wrong, memory = random.Random(seed), collections.Counter[str](), [], []
    expected: dict[int, str] = {}
    due = {(n + 1) * requests // (kills + 1) for n in range(kills)}
    turns, places, killed = iter(range(requests)), asyncio.Semaphore(1), 0
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as client:

        async def are_ready(all_are: bool = True) -> None:
            while True:
                found = (await client.get("/health")).json()
                if (found["ready"] == found["replicas"]) == all_are:
                    return
                await asyncio.sleep(0.01)

        async def work() -> None:
            nonlocal killed
            for turn in turns:
                if turn in due:
                    async with places:
                        await are_ready()
                        os.kill(chance.choice(children(pid)), signal.SIGKILL)
                        killed += 1
                        await are_ready(all_are=False)  # or the next one would be killed beside it
                kind = chance.choices(("whole", "stream", "cancel", "wrong"), (35, 35, 20, 10))[0]
                which = chance.randrange(len(PROMPTS))
                try:
                    end, text = await ask(client, name, kind, PROMPTS[which], chance)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    end, text = f"LOST: {type(error).__name__}: {error}", ""
                ends[end.partition(":")[0]] += 1
                if end.startswith("LOST"):
                    wrong.append(f"request {turn} ({kind}): {end}")
                elif end == "answered" and expected.setdefault(which, text) != text:
                    wrong.append(f"request {turn} ({kind}): another text than the first")
                memory.append(rss(pid))

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(together)))
        seconds = time.monotonic() - began
        await are_ready()
        active = sum(
            float(line.split()[-1])
            for line in (await client.get("/metrics")).text.splitlines()
            if line.startswith("zerojax_running")
        )
    if active:
        wrong.append(f"{active:g} answers still have a slot")
    if ends[ENDED] and not killed:
        wrong.append("a stream was ended though no engine was killed")
    slope, error = growth(memory)
    found = {
        "seconds": round(seconds, 1),
        "kills": killed,
        "ends": dict(ends),
        "bytes_per_request": round(slope, 1),
        "standard_error": round(error, 1),
    }
    return {**found, "largest_bytes": max(memory), "wrong": len(wrong), "first_wrong": wrong[:20]}


async def speed(url: str, name: str, count: int, together: int) -> dict[str, float]:
    """Returns requests a second of the list of models, and of one token."""
    body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0}
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as client:
        sends = {"list": lambda: client.get("/v1/models"), "token": lambda: client.post("/v1/completions", json=body)}
        for kind, send in sends.items():
            await asyncio.gather(*(send() for _ in range(together)))
            turns = iter(range(count))

            async def work(turns: Iterator[int] = turns, send: Any = send) -> None:
                for _ in turns:
                    (await send()).raise_for_status()

            began = time.monotonic()
            await asyncio.gather(*(work() for _ in range(together)))
            found[kind] = round(count / (time.monotonic() - began), 1)
    return found


def main(arguments: Sequence[str]) -> int:
    """Soaks, measures, and prints a JSON object. Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", help="of a model")
    add("--requests", type=int, default=1000)
    add("--kills", type=int, default=10)
    add("--replicas", type=int, default=2)
    add("--together", type=int, default=6, help="clients at once")
    add("--speed", type=int, default=0, help="requests by which the router is measured (0: none)")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, help="a file for the result")
    given = parser.parse_args(arguments)
    name, found = pathlib.Path(given.folder).resolve().name, {}
    with served(given.folder, "--replicas", str(given.replicas)) as (process, url, log):
        soaked = soak(url, process.pid, name, given.requests, given.kills, given.together, given.seed)
        found["soak"] = asyncio.run(soaked)
        found["restarts"] = log.read_text().count("starting it again")
        if given.speed:
            found["router"] = asyncio.run(speed(url, name, given.speed, given.together))
    if given.speed:
        with served(given.folder) as (_, url, _):
            found["direct"] = asyncio.run(speed(url, name, given.speed, given.together))
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(f"{text}\n")
    return int(bool(found["soak"]["wrong"] or found["restarts"] != given.kills))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
