"""Sends a load to a running server, and measures tokens a second and the wait for the first token.

    zerojax serve FOLDER --slots 128 --queue 256 --max_len 1280 --prefill_tokens 4096 --warm_up
    python scripts/bench_serve.py http://127.0.0.1:8000 --together 1 64 128 --prompt 1024 --new_tokens 256

Each row sends so many requests at one moment, of random token ids (below `--vocab_size`), and reads their streams; each has exactly
`--new_tokens` new tokens, the likeliest ones. `--whole` asks for answers that come at once, without a first token. "tokens/s" are all
new tokens over the time from the first request to the last end, with the reading of prompts; "ms a token" is the median over requests of
the time between their first and last token, for each further token. A row of few requests is sent `--repeats` times, and the fastest is
told. With `--late`, prompts of so many tokens are sent one after the other when all of a row's answers have begun: "late" is the median
wait for their first token, and "worst" the longest.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence

COLUMNS = ("together", "tokens/s", "first token ms: p50", "p99", "ms a token: p50", "seconds", "late ms", "worst")
FEW = 8  # requests, whose row is repeated
LATE = 9  # requests


async def ask(url: urllib.parse.SplitResult, body: dict, on_first: Callable[[], None] = lambda: None) -> list[float]:
    """Sends one request, and returns when each event of its stream came; of an answer that is whole, when it did.

    Raises:
      RuntimeError: the answer is not 200, or a stream has an error or no end.
    """
    words = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(words)}", "", ""))
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=2**22)
    try:
        writer.write(head.encode() + words)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')[-500:]}")
        times, is_over = [], not body["stream"]
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode())
                times.append(time.perf_counter())
                if len(times) == 1:
                    on_first()
            is_over |= line.startswith(b"data: [DONE]")
        if not is_over:
            raise RuntimeError("a stream without an end")
        return times or [time.perf_counter()]
    finally:
        writer.close()


async def measure(address: str, name: str, together: int, given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Returns a row's figures."""
    draw, url = random.Random(seed), urllib.parse.urlsplit(address)

    def body(length: int, most: int) -> dict:
        ids = [draw.randrange(3, given.vocab_size) for _ in range(length)]
        fixed = {"temperature": 0, "ignore_eos": True, "stream": not given.whole}
        return {"model": name, "prompt": ids, "max_tokens": most, **fixed}

    bodies, have_begun, left = (
        [body(given.prompt, given.new_tokens) for _ in range(together)],
        asyncio.Event(),
        together,
    )

    def on_first() -> None:
        nonlocal left
        left -= 1
        if not left:
            have_begun.set()

    async def come_late() -> list[float]:
        waits = []
        for _ in range(LATE if given.late and not given.whole else 0):
            await have_begun.wait()
            await asyncio.sleep(0.05 * draw.random())  # at any moment of a step
            sent = time.perf_counter()
            waits.append(1e3 * ((await ask(url, body(given.late, 2)))[0] - sent))
        return waits

    began = time.perf_counter()
    late_ones = asyncio.ensure_future(come_late())
    found = await asyncio.gather(*(ask(url, one, on_first) for one in bodies))
    seconds = max(times[-1] for times in found) - began
    firsts = sorted(1e3 * (times[0] - began) for times in found)
    each = statistics.median(1e3 * (times[-1] - times[0]) / max(1, given.new_tokens - 1) for times in found)
    last = firsts[min(together - 1, int(0.99 * together))]
    waits = await late_ones or [math.nan]
    values = (together, together * given.new_tokens / seconds, statistics.median(firsts), last, each, seconds)
    values += (statistics.median(waits), max(waits))
    return dict(zip(COLUMNS, values))


def main(arguments: Sequence[str]) -> int:
    """Measures each row and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("url", help="of the server")
    add(
        "--together", type=int, nargs="+", default=[1, 64, 128], help="requests that are sent at one moment, a row each"
    )
    add("--prompt", type=int, default=1024, help="tokens of a prompt")
    add("--new_tokens", type=int, default=256, help="tokens of an answer")
    add("--vocab_size", type=int, default=32000, help="ids of prompts are below it")
    add("--whole", action="store_true", help="no streams")
    add("--late", type=int, default=0, help="tokens of prompts that come while a row's answers run; 0: none come")
    add("--repeats", type=int, default=3, help=f"of rows of at most {FEW} requests")
    given = parser.parse_args(arguments)
    with urllib.request.urlopen(f"{given.url}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for number, together in enumerate(given.together):
        times = given.repeats if together <= FEW else 1
        rows = [asyncio.run(measure(given.url, name, together, given, 100 * number + again)) for again in range(times)]
        best = min(rows, key=lambda row: row["seconds"])
        print("| " + " | ".join(f"{best[column]:.4g}" for column in COLUMNS) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
