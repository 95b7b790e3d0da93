"""Asks an application without a socket: answers, streams, limits, and a thousand hostile requests. This module tests zerojax.serve.app."""

import asyncio
import contextlib
import json
import random

import httpx
import pytest
import small_engine

from zerojax.serve import app, tokenizer

MODEL = "small"
LIMITS = app.Limits(queue=2, seconds=60, body_bytes=4096, body_seconds=0.2)
ASK = {"model": MODEL, "prompt": [9, 11, 40], "temperature": 0, "max_tokens": 8}
JSON = {"content-type": "application/json"}
SHARED = small_engine.engine  # its slots are 3, its texts have up to 64 tokens, its ids end at 60


@contextlib.asynccontextmanager
async def serving(limits=LIMITS, key="", names=()):
    """Gives a client of a service, and the service. All slots are free at the end."""
    service = app.Service(SHARED(), tokenizer.Words(), name=MODEL, limits=limits, key=key, names=names)
    service.start()
    transport = httpx.ASGITransport(service.app(), raise_app_exceptions=True)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client, service
            assert service.active == 0 and not service._calls
    finally:
        service.stop(60)
    while SHARED().step():
        pass
    assert SHARED().is_idle


def run(test, **how):
    async def inside():
        async with serving(**how) as (client, service):
            await test(client, service)

    asyncio.run(inside())


async def stream(client, path, body):
    """Returns the chunks of a stream, which ends as it should."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


def test_answers_are_the_engines_and_a_stream_has_the_same_text():
    wanted = SHARED().generate([ASK["prompt"], [33]], max_tokens=8)

    async def test(client, _):
        found = (await client.post("/v1/completions", json={**ASK, "prompt": [ASK["prompt"], [33]]})).json()
        assert [choice["text"] for choice in found["choices"]] == [request.text for request in wanted]
        assert [choice["finish_reason"] for choice in found["choices"]] == [request.finish for request in wanted]
        new = sum(len(request.tokens) for request in wanted)
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (4, new)
        body = {**ASK, "prompt": "9 11 40", "n": 2, "temperature": 0.9, "seed": 5, "logprobs": 2, "stop": [" 1", "3 2"]}
        whole = (await client.post("/v1/completions", json=body)).json()
        chunks = await stream(client, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert (
            chunks[-1]["choices"] == []
            and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        )
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
            for key in ("tokens", "text_offset", "top_logprobs"):
                found = [value for c in own if c["logprobs"] for value in c["logprobs"][key]]
                assert found == choice["logprobs"][key]
            assert all(len(likeliest) == 2 for likeliest in choice["logprobs"]["top_logprobs"])
        assert whole["choices"][0]["text"] != whole["choices"][1]["text"]

    run(test)


def test_a_chat_has_its_own_form(monkeypatch):
    monkeypatch.setattr(tokenizer.Words, "conversation", lambda self, messages, tools: [9, 11, 40])
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    body |= {"logprobs": True, "top_logprobs": 3}

    async def test(client, _):
        plain = (await client.post("/v1/completions", json=ASK)).json()
        (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"], "refusal": None}
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 3
        chunks = await stream(client, "/v1/chat/completions", body)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(deltas) == plain["choices"][0]["text"] and chunks[-1]["choices"][0]["finish_reason"]

    run(test)


def test_more_than_the_queue_takes_is_429_and_a_key_is_needed_where_there_is_one():
    async def test(client, service):
        many = [client.post("/v1/completions", json={**ASK, "max_tokens": 40, "ignore_eos": True}) for _ in range(12)]
        found = await asyncio.gather(*many)
        codes = [answer.status_code for answer in found]
        assert set(codes) == {200, 429} and codes.count(200) >= 5  # 3 slots and 2 that wait
        refused = next(answer for answer in found if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"] == "1"
        assert (await client.post("/v1/completions", json={**ASK, "n": 6})).json()["error"]["param"] == "n"

    run(test)

    async def keyed(client, _):
        for path in ("/v1/models", "/metrics"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer right"})).status_code == 200
        assert (await client.post("/v1/completions", json=ASK)).status_code == 401
        assert (await client.get("/")).status_code == (await client.get("/health")).status_code == 200

    run(keyed, key="right")


OWN_HOSTS = "localhost localhost:8000 LocalHost. a.localhost:1 127.0.0.1:8000 [::1]:8000 192.168.1.5 node7 Node7:80 node7.lan".split()
OTHER_HOSTS = "evil.example evil.example:8000 127.0.0.1.nip.io localhost.evil.example node7.evil.example 0x7f000001 [::1 é".split()


def test_without_a_key_a_host_that_is_no_name_of_this_machine_is_refused_on_every_route():
    async def asked(client, host):
        found = [
            await client.get(path, headers={"host": host.encode()})
            for path in ("/", "/health", "/v1/models", "/metrics")
        ]
        post = await client.post("/v1/completions", json=ASK, headers={"host": host.encode()})
        return [answer.status_code for answer in (*found, post)], post

    async def test(client, _):
        for host in OWN_HOSTS:
            assert (await asked(client, host))[0] == [200] * 5, host
        for host in (*OTHER_HOSTS, ""):
            statuses, post = await asked(client, host)
            error = post.json()["error"]
            assert statuses == [403] * 5 and error["code"] == "unknown_host" and error["message"].count("\n") == 0, host
            assert error["message"].endswith(
                "is no name of this machine, and the server has no API key; use its address, or give the server a key"
            )

    async def with_key(client, _):
        how = {"headers": {"authorization": "Bearer word", "host": "evil.example"}}
        models = await client.get("/v1/models", **how)
        assert models.status_code == 200 and models.json()["data"][0]["chat_template"] == ""

    run(test, names={"node7", "node7.lan"})
    run(with_key, key="word")


def test_bodies_and_answers_have_limits_and_what_ends_takes_nothing_new(monkeypatch):
    async def slow():
        yield b'{"model"'
        await asyncio.sleep(5)

    async def endless():
        while True:
            yield b" " * 1000

    async def test(client, service):
        for content, status in ((slow(), 408), (endless(), 413), (b" " * 5000, 413)):
            answer = await client.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == status and answer.json()["error"]["message"]
        plain = {"content-type": "text/plain"}  # which a page of another site may send
        assert (await client.post("/v1/completions", content=b"{}", headers=plain)).status_code == 415
        with monkeypatch.context() as patched:
            patched.setattr(SHARED(), "step", lambda: None)  # an engine that does not answer
            service._limits = app.Limits(queue=2, seconds=0.1)
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
            answer = await client.post("/v1/completions", json={**ASK, "stream": True})
            assert json.loads(answer.text.strip().removeprefix("data: "))["error"]["code"] == "timeout"
        service._limits = LIMITS
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        counts = (await client.get("/metrics")).text
        assert "zerojax_cancelled_total 2\n" in counts
        # Its answer has several tokens, and those that were cancelled have none.
        assert "zerojax_first_token_seconds_count 1\n" in counts and "zerojax_queue_seconds_count 1\n" in counts
        service.is_draining = True
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=ASK)).json()["error"]["code"] == "draining"

    run(test)


def test_an_engine_that_fails_is_told_to_those_who_wait(monkeypatch):
    def fail():
        raise RuntimeError("no memory")

    async def test(client, service):
        with monkeypatch.context() as patched:
            patched.setattr(SHARED(), "step", fail)
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
            assert (await client.post("/v1/completions", json=ASK)).status_code == 503
            assert (await client.get("/health")).status_code == 503
        for slot in SHARED()._slots:  # what a failed engine leaves
            if slot.request is not None:
                SHARED().cancel(slot.request)
        for request in list(SHARED()._waiting):
            SHARED().cancel(request)

    run(test)


NAMES = ["model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
         "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "top_logprobs", "stream",
         "stream_options", "tools", "logit_bias", "echo", "suffix", "frequency_penalty", "response_format",
         "x" * 300, "\ud800", ""]  # fmt: skip
LEAVES = [None, True, False, 0, -1, 1, 2, 61, 2**31, 2**63, 10**400, -0.5, 0.5, 1e308, "", "a", "9 11", "9 99", "\ud800", "\x00",
          "x" * 900, "data: [DONE]\n\n", [], {}, [[]], [9], [-1], [61], [9] * 64, [2**70], ["a", 3], [True], {"a": 1},
          [{"role": "user", "content": "x"}], [{"role": "user"}], [{"role": 3}], {"include_usage": True},
          {"type": "json_object"}]  # fmt: skip
TEXTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"model": NaN}',
    b'{"model": 1e999}',
    b"[" * 4000,
    b'{"a":' * 600,
    b"9" * 4000,
]
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models/x",
    "/v1/models/..%2f..",
    "/v2",
    "/v1/completions/",
    "/\ud7ff",
]


def hostile(rng):
    """Returns a request: method, path, body and headers."""
    path, method = rng.choice([*PATHS[:2]] * 6 + PATHS), rng.choice(["POST"] * 15 + ["GET", "PUT", "DELETE"])
    if rng.random() < 0.1:
        return method, path, rng.choice(TEXTS), JSON
    body = {} if rng.random() < 0.1 else {**ASK, "max_tokens": 2}
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(LEAVES)
        for _ in range(rng.choice([0, 0, 0, 0, 1, 200])):
            value = [value]
        body[rng.choice(NAMES)] = value
    headers = (
        JSON
        if rng.random() < 0.9
        else {"content-type": rng.choice(["", "text/plain", "multipart/form-data", "x" * 500])}
    )
    return method, path, json.dumps(body).encode(), headers


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.long)])
def test_hostile_requests_are_refused_in_one_line_and_leave_nothing_behind(count, capfd):
    """Random fields, values and bodies: 4xx, or an answer where they happen to be right."""
    rng, statuses = random.Random(count), []

    async def test(client, _):
        for _ in range(count):
            method, path, body, headers = hostile(rng)
            answer = await client.request(method, path, content=body, headers=headers)
            statuses.append(answer.status_code)
            shown = (method, path, body[:300], answer.text[:300])
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, shown
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, shown
                assert "\n" not in error["message"] and "Traceback" not in answer.text and len(answer.text) < 3000, (
                    shown
                )

    run(test)
    assert statuses.count(200) < count / 2 and {200, 400, 404, 405, 415} <= set(statuses)
    assert capfd.readouterr() == ("", "")
