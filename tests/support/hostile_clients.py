"""Asks a server over sockets as no client should. This module makes such connections, and checks that each gets 4xx, 503 or nothing.

Requests are torn, malformed, too large, slow, half closed or left; some are right and their answers are not read.
"""

import asyncio
import dataclasses
import json
import pathlib
import random
from collections.abc import Callable

KEY = "a-key"  # of the server, if it has one
ASK = {"model": "llama", "prompt": [5, 6], "max_tokens": 2}
AT_ONCE = 24  # connections
PATIENCE = 0.3  # seconds that a client waits for an answer that may never come
ANSWERED = 60.0  # seconds in which a whole request is answered
POST = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a client does.

    Attributes:
      parts: bytes that it sends, one after the other.
      pause: seconds between them.
      is_whole: whether a server must answer.
      half_closes: whether it closes its side after the last part.
      leaves: whether it goes without reading.
    """

    parts: tuple[bytes, ...]
    pause: float = 0.0
    is_whole: bool = True
    half_closes: bool = False
    leaves: bool = False


def post(body: bytes, *headers: str, length: int | str | None = None) -> bytes:
    """Returns a request with these headers beside the usual ones."""
    lines = [f"Content-Length: {len(body) if length is None else length}", *headers]
    return (POST + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode("utf-8", "surrogatepass") + body


def head(rng: random.Random) -> Attempt:
    """Returns a request whose head is wrong."""
    junk = rng.randbytes(rng.choice([1, 40, 3000]))
    return Attempt(
        (
            rng.choice(
                [
                    junk + b"\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"GET /\r\n\r\n",
                    b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
                    b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"GET http://elsewhere/v1/models/x HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"GET /v1/completions HTTP/1.1\r\n\r\n",
                    b"GET /v1/x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                    b"GET /v1/x HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * rng.choice([10, 20_000]) + b"\r\n",
                    b"GET /" + b"a" * rng.choice([1000, 200_000]) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
                    b"GET /v1/x HTTP/1.1\r\nHost: a\r\nA: " + b"\xff" * rng.choice([10, 200_000]) + b"\r\n\r\n",
                    b"GET /v1/x HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
                    b"GET /v1/x HTTP/1.1\r\nHost: a\r\n folded: x\r\nno colon\r\n\r\n",
                    post(b"{}", "Content-Length: 7"),
                    post(b"{}", length=rng.choice([-1, "x", "1e3", "٣", 10**30, ""])),
                    post(b"", "Content-Encoding: gzip"),
                    post(b"{}", "Content-Type: text/plain"),
                    post(json.dumps(ASK).encode()).replace(b"application/json", b"multipart/form-data; boundary=x"),
                    b"POST /v1/nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
                ]
            ),
        ),
        is_whole=False,
    )


def chunked(rng: random.Random) -> Attempt:
    """Returns a request whose body comes in chunks that are wrong."""
    begin = (POST + "Transfer-Encoding: chunked\r\n\r\n").encode()
    body = rng.choice(
        [
            b"zz\r\nab\r\n",
            b"-1\r\n",
            b"ffffffffffffffff\r\nab",
            b"2\r\nabcd\r\n0\r\n\r\n",
            b"0\r\n\r\n",
            b"2;" + b"x" * 99_999,
        ]
    )
    return Attempt((begin, body), is_whole=False)


def body(rng: random.Random) -> Attempt:
    """Returns a request whose body is wrong."""
    depth = rng.choice([100, 100_000])
    text = rng.choice(
        [
            b"",
            b"\x00" * 100,
            rng.randbytes(200),
            b"\xef\xbb\xbf{}",
            json.dumps(ASK).encode("utf-16"),
            b"[" * depth,
            b'{"prompt":' * depth,
            b'{"model": "llama", "prompt": "' + b"9 " * 200_000 + b'"}',
            b'{"model": "llama", "prompt": [' + b"9," * 200_000 + b"9]}",
            b'{"model": "llama", "prompt": ' + b"9" * 200_000 + b"}",
            b'{"model": "llama", "model": "' + "é\U0001f600".encode() * 5000 + b'"}',
            b'{"model": "\\ud800", "prompt": "\\udfff\\u0000"}',
            b" " * 5_000_000,
            json.dumps({**ASK, "stop": ["x" * 900] * 17}).encode(),
            json.dumps({**ASK, "n": 129}).encode(),
            json.dumps({**ASK, "prompt": [[5]] * 5000}).encode(),
            json.dumps({**ASK, "max_tokens": rng.choice([0, -1, 10**9, 1.5, "2"])}).encode(),
            json.dumps({**ASK, rng.choice("abc") * rng.choice([1, 100_000]): rng.random()}).encode(),
        ]
    )
    return Attempt((post(text),))


def torn(rng: random.Random) -> Attempt:
    """Returns a request of which a part comes, slowly or not, before the client waits, closes its side or leaves."""
    whole = post(json.dumps(ASK).encode())
    cut = rng.randrange(len(whole))
    parts = (whole[: cut // 2], whole[cut // 2 : cut])
    how = rng.choice([{"half_closes": True}, {"leaves": True}, {"pause": 0.05}, {}])
    return Attempt(parts, is_whole=False, **how)


def unread(rng: random.Random) -> Attempt:
    """Returns a right request whose client leaves, closes its side, or sends more before it reads."""
    asked = {**ASK, "stream": rng.random() < 0.5, "max_tokens": rng.choice([2, 900]), "ignore_eos": True}
    whole = post(json.dumps(asked).encode())
    how = rng.choice([{"leaves": True}, {"half_closes": True}])
    return Attempt((whole, whole) if rng.random() < 0.3 else (whole,), is_whole=False, **how)


KINDS: tuple[Callable[[random.Random], Attempt], ...] = (head, head, chunked, body, body, torn, unread)


async def _try(address: tuple[str, int], attempt: Attempt) -> bytes:
    """Returns what the server sends."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for part in attempt.parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(attempt.pause)
        if attempt.half_closes:
            writer.write_eof()
        if attempt.leaves:
            return b""
        found, seconds = b"", ANSWERED if attempt.is_whole else PATIENCE
        while b"\r\n\r\n" not in found:  # a server may keep the connection
            async with asyncio.timeout(seconds):
                part = await reader.read(1 << 16)
            if not part:
                break
            found += part
        return found
    except TimeoutError:
        assert not attempt.is_whole, attempt.parts[0][:300]
        return b""
    except ConnectionError:  # what was sent is refused before all of it was read
        return b""
    finally:
        writer.transport.abort()


def attack(host: str, port: int, count: int, seed: int) -> dict[int, int]:
    """Makes `count` connections, some at once, and returns how many answers have each status."""
    rng, statuses = random.Random(seed), dict[int, int]()

    async def run() -> None:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(attempt: Attempt) -> None:
            async with limit:
                found = await _try((host, port), attempt)
            if found:
                status = int(found.split(b" ", 2)[1])
                shown = (attempt.parts[0][:300], found[:600])
                assert status in (200, 429, 503) or 400 <= status < 500, shown
                assert b"Traceback" not in found, shown
                statuses[status] = statuses.get(status, 0) + 1

        await asyncio.gather(*(one(rng.choice(KINDS)(rng)) for _ in range(count)))

    asyncio.run(run())
    return statuses


def resident(pid: int) -> int:
    """Returns the bytes of memory that a process has."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
