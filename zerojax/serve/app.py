"""Answers HTTP requests. This module holds the routes of a server, its limits, and what happens when a client is gone.

    GET  /                       a page to try it
    GET  /health                 200, or 503 when the server starts (`starting.Starting`) or is to end
    GET  /metrics                counts for Prometheus
    GET  /v1/models              the model
    POST /v1/completions         prompts, as texts or token ids
    POST /v1/chat/completions    a conversation

One thread runs the event loop, and the engine has another. The engine's thread only wakes the loop, once for many requests (`_Wakes`), and
the loop reads how far each is.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette import requests as http
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from zerojax import errors
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import requests
from zerojax.serve import counts as counts_lib
from zerojax.serve import grammars, page, responses
from zerojax.serve import requests as asked_lib
from zerojax.serve import tokenizer as words_lib
from zerojax.serve import tools as tools_lib
from zerojax.serve import worker as worker_lib
from zerojax.serve.requests import NotAnswered

JSON = "application/json"
_SLOW_READER = 30.0  # seconds beyond the time limit in which a client may read what is left


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes."""

    queue: int = 64  # answers that may wait for a slot
    seconds: float = 600.0  # for an answer, with its wait
    body_bytes: int = 4 * 2**20  # of a request
    body_seconds: float = 20.0  # in which a body must have come


class Service:
    """A model that is served. One event loop calls it.

    Args:
      engine: answers; nobody else calls it.
      words: the model's texts, of which the engine has `text_of`.
      name: the model's.
      adapters: the names of the engine's adapters, which requests name in place of the model.
      limits: what is taken.
      key: the API key; "" for none.
      names: this machine's, in lower case. Without a key a `Host` header must have one of them, localhost or an address: that of a page
        whose site's name was made to stand for this machine (DNS rebinding) has the site's.
      tell: is called before each step of the engine; see `worker.Worker`.

    Attributes:
      name: the model's.
      is_draining: whether new requests are refused.
      active: answers that were asked and have not ended.
    """

    def __init__(
        self,
        engine: engine_lib.Engine,
        words: words_lib.Words,
        *,
        name: str,
        adapters: Sequence[str] = (),
        limits: Limits,
        key: str = "",
        names: Collection[str] = (),
        tell: Callable[[Sequence[worker_lib.Action]], None] = lambda actions: None,
    ):
        self._worker, self._words, self.name = worker_lib.Worker(engine, self._wake_all, tell), words, name
        self._limits, self._key, self._most = limits, key.encode(), engine.slots + limits.queue
        self._names = {"localhost", *names}
        self._counts, self._created = counts_lib.Counts(), int(time.time())
        self._adapters = {name: ""} | {adapter: adapter for adapter in adapters}  # by the names of requests
        self._calls, self._wakes = set[_Answering](), _Wakes()
        self.is_draining, self.active = False, 0

    @property
    def failure(self) -> str:
        """Returns why the engine failed, in one line; "" while it runs."""
        return self._worker.failure

    def start(self) -> None:
        """Starts the engine's thread."""
        self._worker.start()

    def stop(self, seconds: float) -> None:
        """Ends the engine's thread after its step, and waits for that, no longer than `seconds`."""
        self._worker.stop(seconds)

    def app(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Returns the application."""
        routes = [
            Route("/", self._guarded(self._page, needs_key=False)),
            Route("/health", self._guarded(self._health, needs_key=False)),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unrouted})
        app.router.redirect_slashes = False  # to an address that the client names
        return app

    def _guarded(
        self, answer: Callable[[http.Request], Awaitable[Response]], *, needs_key: bool = True
    ) -> Callable[[http.Request], Awaitable[Response]]:
        """Returns a route that checks the key, and turns what is refused and what fails into errors of OpenAI's form."""

        async def route(request: http.Request) -> Response:
            path = request.scope["route"].path
            try:
                if not self._key:
                    check_host(request, self._names)
                elif needs_key:
                    self._check_key(request)
                response = await answer(request)
            except NotAnswered as error:
                response = refusal(error)
            except http.ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except Exception as error:  # a fault of ours; the server goes on
                response = refusal(NotAnswered(500, told_fault(path, error)))
            self._counts.add("requests_total", route=path, status=str(response.status_code))
            return response

        return route

    async def _unrouted(self, request: http.Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._counts.add("requests_total", route="none", status=str(error.status_code))
        path = errors.shown(request.url.path, 80)
        line = f"{request.method[:20]} {path}: " + ("is not there" if error.status_code == 404 else error.detail)
        return refusal(NotAnswered(error.status_code, line, code="not_found"), error.headers)

    def _check_key(self, request: http.Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key):
            raise NotAnswered(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _page(self, request: http.Request) -> Response:
        return HTMLResponse(page.HTML, headers={"Content-Security-Policy": page.POLICY, "X-Frame-Options": "DENY"})

    async def _health(self, request: http.Request) -> Response:
        if self._worker.failure:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "draining"}, 503) if self.is_draining else JSONResponse({"status": "ok"})

    async def _metrics(self, request: http.Request) -> Response:
        gauges = {**self._worker.engine.counts, "slots": self._worker.engine.slots, "draining": self.is_draining}
        return PlainTextResponse(self._counts.text(gauges), media_type="text/plain; version=0.0.4")

    async def _models(self, request: http.Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._adapters]})

    async def _model(self, request: http.Request) -> Response:
        self._check_model(name := request.path_params["name"])
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        most = self._worker.engine.max_len
        found = {"id": name, "object": "model", "created": self._created, "owned_by": "zerojax", "max_model_len": most}
        found["chat_template"] = self._words.chat_template
        return found | ({"parent": self.name} if self._adapters[name] else {})

    def _check_model(self, name: str) -> None:
        if name not in self._adapters:
            line = f"model: {errors.shown(name, 80)} is not served; {errors.choose(name, self._adapters)}"
            raise NotAnswered(404, line, "model", "model_not_found")

    async def _completions(self, request: http.Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: http.Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: http.Request, *, is_chat: bool) -> Response:
        began = time.monotonic()
        self._check_takes()
        asked = asked_lib.read(await body_of(request, self._limits), is_chat=is_chat)
        self._check_model(asked.model)
        if (count := max(1, len(asked.prompts)) * asked.n) > self._most:
            name = "n" if asked.n > 1 else "prompt"
            line = f"{name}: asks for {count} answers, and at most {self._most} fit; ask for fewer, or raise --queue"
            raise NotAnswered(400, line, name)
        prompts = await self._ids(asked, is_chat=is_chat)
        refused = functools.partial(NotAnswered.by, is_chat=is_chat, has_calls=asked.bounds is not None)
        call = _Answering(self._worker, self._wakes, began, self._limits.seconds, refused)
        try:
            more: dict[str, Any] = {"adapter": self._adapters[asked.model]}
            if is_chat and not asked.settings.get("ignores_end"):
                more["stop_ids"] = (*asked.settings.get("stop_ids", ()), *self._words.chat_ends)
            form = self._words.call_form
            if asked.bounds and form:
                more["grammar"] = tools_lib.grammar(form, asked.tools, self._words.call_ids, asked.bounds)
            each = [functools.partial(call.request, prompt, own | more) for prompt, own in _each(prompts, asked)]
            is_slow = "grammar" in asked.settings | more  # up to a second, so another thread reads it
            listed = [await asyncio.to_thread(make) if is_slow else make() for make in each]
        except UserError as error:
            raise refused(error) from error
        self._check_takes()  # the server may have begun to end meanwhile
        if self.active + len(listed) > self._most:
            line = f"{self.active} answers run or wait, and at most {self._most} do; ask again later"
            raise NotAnswered(429, line, code="queue_full")
        make_reader = None
        if asked.tools and form:
            schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in asked.tools}
            make_reader = functools.partial(tools_lib.CallReader, form, schemas)
        writer = responses.Writer(
            self._words,
            asked.model,
            is_chat=is_chat,
            prompts=len(prompts),
            choices=listed,
            make_reader=make_reader,
        )
        self._begin(call)
        if asked.is_streamed:
            events = self._events(call, writer, asked.tells_usage)
            return _Stream(events, self._limits.seconds + _SLOW_READER, lambda: self._over(call))
        gone = asyncio.ensure_future(_until_gone(request, call))
        try:
            async for _ in call.changes():
                self._note_first(call)
            return JSONResponse(writer.whole())
        finally:
            gone.cancel()
            self._over(call)

    async def _events(
        self, call: "_Answering", writer: responses.Writer, tells_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream."""
        try:
            for chunk in writer.begin(has_usage=tells_usage):
                yield responses.event(chunk)
            async for _ in call.changes():
                self._note_first(call)
                for chunk in writer.changes(has_usage=tells_usage):
                    yield responses.event(chunk)
            if tells_usage:
                yield responses.event(writer.end())
            yield b"data: [DONE]\n\n"
        except NotAnswered as error:
            yield responses.event(responses.error(error.status, error.message, error.param, error.code))
        except Exception as error:  # a fault of ours
            yield responses.event(responses.error(500, told_fault("a stream", error), None, None))

    def _check_takes(self) -> None:
        """Refuses a request while the server ends."""
        if self._worker.failure:
            raise NotAnswered(503, f"the engine failed ({self._worker.failure})", code="engine_failed")
        if self.is_draining:
            raise NotAnswered(503, "the server is to end and takes no new requests", code="draining")

    async def _ids(self, asked: asked_lib.Wanted, *, is_chat: bool) -> list[Sequence[int]]:
        """Returns the token ids of all prompts. Long texts take a while, so another thread reads them."""

        def encode() -> list[Sequence[int]]:
            if is_chat:
                return [self._words.conversation(asked.messages, asked.tools)]
            return [self._words.ids_of(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]

        try:
            return await asyncio.to_thread(encode)
        except UserError as error:
            raise NotAnswered.by(error, is_chat=is_chat) from error

    def _begin(self, call: "_Answering") -> None:
        """Asks the requests of a call, which hold their share of the queue until `_over`."""
        self._calls.add(call)
        self.active += len(call.requests)
        call.start()

    def _note_first(self, call: "_Answering") -> None:
        if not call.has_begun and any(request.tokens for request in call.requests):
            call.has_begun = True
            self._counts.time("first_token_seconds", time.monotonic() - call.began)

    def _over(self, call: "_Answering") -> None:
        """Frees what a call holds, and counts it."""
        self._calls.discard(call)
        self.active -= len(call.requests)
        self._counts.add("cancelled_total", call.end())
        for request in call.requests:
            self._counts.add("prompt_tokens_total", len(request.prompt))
            self._counts.add("reused_tokens_total", request.reused)
            self._counts.add("generated_tokens_total", len(request.tokens))
            if request.begun is not None:
                self._counts.time("queue_seconds", request.begun - call.began)
        self._counts.time("request_seconds", time.monotonic() - call.began)

    def _wake_all(self) -> None:
        """Lets all calls see that the engine has failed. Called in its thread."""
        for call in list(self._calls):
            call.wake(None)


class _Wakes:
    """Calls that have changed since the event loop last looked. A step changes all answers. If its thread woke the loop for each, it would
    wait for Python's lock each time."""

    def __init__(self) -> None:
        self._changed = collections.deque[_Answering]()
        self._is_told = False

    def add(self, call: "_Answering", loop: asyncio.AbstractEventLoop) -> None:
        """Tells the loop that a call has changed. Any thread may call it."""
        self._changed.append(call)
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_told = False  # first, so that what comes from now on is told again
        while self._changed:
            self._changed.popleft().changed.set()


class _Answering:
    """The requests of one call.

    Args:
      worker, wakes: the server's.
      seconds: in which it must end.
      refused: f(error of a setting) -> the refusal.

    Attributes:
      began: when, by the monotonic clock.
      requests: of the engine.
      is_gone: whether the client is.
      is_late: whether the time is over.
      has_begun: whether a token has come.
      changed: is set when one of these is another, and after each token.
    """

    def __init__(
        self,
        worker: worker_lib.Worker,
        wakes: _Wakes,
        began: float,
        seconds: float,
        refused: Callable[[UserError], NotAnswered],
    ):
        self._worker, self._wakes, self._loop = worker, wakes, asyncio.get_running_loop()
        self._seconds, self.began, self._refused = seconds, began, refused
        self.is_gone, self.is_late, self.has_begun = False, False, False
        self.changed, self.requests = asyncio.Event(), list[requests.Request]()
        self._timer: asyncio.TimerHandle | None = None

    def request(self, prompt: Sequence[int], settings: dict[str, Any]) -> requests.Request:
        """Returns one more request, which `start` asks. Raises UserError as the engine does."""
        made = self._worker.engine.request(prompt, on_change=self.wake, **settings)
        self.requests.append(made)
        return made

    def start(self) -> None:
        """Asks the requests."""
        self._timer = self._loop.call_later(self.began + self._seconds - time.monotonic(), self._end_late)
        for request in self.requests:
            self._worker.add(request)

    def wake(self, _: requests.Request | None) -> None:
        """Tells that something has changed. Any thread may call it."""
        self._wakes.add(self, self._loop)

    def _end_late(self) -> None:
        self.is_late = True
        self.changed.set()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields after each change, until all requests have ended.

        Raises:
          NotAnswered: the time is over, the engine failed, or an answer cannot be bound further to its grammar.
          ClientDisconnect: the client is gone.
        """
        while True:
            is_over = all(request.finish for request in self.requests)
            for request in self.requests:
                if isinstance(request.grammar, grammars.BoundText) and request.grammar.failure:
                    raise self._refused(UserError(request.grammar.failure))
            yield
            if is_over:
                return
            if self.is_gone:
                raise http.ClientDisconnect
            if self._worker.failure:
                raise NotAnswered(500, f"the engine failed ({self._worker.failure})", code="engine_failed")
            if self.is_late:
                line = f"the answer took longer than the server's limit of {self._seconds:g} s (--max_seconds); ask for fewer tokens"
                raise NotAnswered(503, line, code="timeout")
            await self.changed.wait()
            self.changed.clear()

    def end(self) -> int:
        """Cancels the requests that have not ended, and returns how many."""
        if self._timer is not None:
            self._timer.cancel()
        left = [request for request in self.requests if not request.finish]
        for request in left:
            self._worker.cancel(request)
        return len(left)


class _Stream(StreamingResponse):
    """A stream of events to a client that may be gone, or not read. Calls `on_end` whatever happens."""

    def __init__(self, events: AsyncGenerator[bytes, None], seconds: float, on_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._events, self._seconds, self._on_end = events, seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._events.aclose()


async def until_gone(request: http.Request) -> None:
    """Waits until the client of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until_gone(request: http.Request, call: _Answering) -> None:
    """Waits until the client is gone, and says so."""
    await until_gone(request)
    call.is_gone = True
    call.wake(None)


def check_host(request: http.Request, names: Collection[str]) -> None:
    """Refuses a name that is not this machine's. Programs may send no name; browsers always do."""
    host = request.headers.get("host", "localhost").strip().lower()
    name = re.sub(r":[0-9]*$", "", host).removeprefix("[").removesuffix("]").removesuffix(".")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return
    if name not in names and not name.endswith(".localhost"):
        line = (
            f"Host: {errors.shown(host, 80)} is no name of this machine, and the server has no API key; use its address"
        )
        raise NotAnswered(403, f"{line}, or give the server a key", code="unknown_host")


async def body_of(request: http.Request, limits: Limits) -> bytes:
    """Returns a request's body.

    Raises:
      NotAnswered: it is no JSON by its header, too large, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:  # which a page of another site cannot send unasked
        raise NotAnswered(415, f"send Content-Type: {JSON}, and not {errors.shown(kind, 60)}", code="content_type")
    too_large = NotAnswered(413, f"the body has more than {limits.body_bytes} bytes; shorten it", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError as error:
        line = f"the body did not come within {limits.body_seconds:g} s"
        raise NotAnswered(408, line, code="body_too_slow") from error
    return bytes(body)


def told_fault(place: str, error: Exception) -> str:
    """Prints a fault of the server in one line, and returns the line for the client."""
    line = f"{type(error).__name__}: {errors.one_line(error)}"
    with contextlib.suppress(OSError):  # a full disk is no reason not to tell the client
        print(f"zerojax: {place}: {line}", file=sys.stderr, flush=True)
    return f"the server failed ({line})"


def _each(prompts: Sequence[Sequence[int]], asked: asked_lib.Wanted) -> list[tuple[Sequence[int], dict[str, Any]]]:
    """Returns (prompt, settings) of each answer. Answers draw from streams of their own."""
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    return [
        (prompt, {**asked.settings, "seed": seed, "stream": number * asked.n + index})
        for number, prompt in enumerate(prompts)
        for index in range(asked.n)
    ]


def refusal(error: NotAnswered, headers: Any = None) -> Response:
    """Returns the response to a request that is not answered."""
    found = dict(headers or {})
    if error.status in (408, 413, 503):
        found["Connection"] = "close"  # of the body nothing more is read
    if error.status in (429, 503):
        found["Retry-After"] = "1"
    if error.status == 401:
        found["WWW-Authenticate"] = "Bearer"
    return JSONResponse(responses.error(error.status, error.message, error.param, error.code), error.status, found)
