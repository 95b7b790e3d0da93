"""Asks an application before and after it is ready. This module tests zerojax.serve.starting."""

import asyncio

import httpx

from zerojax.serve import starting


def test_what_is_waited_for_is_told_until_another_application_answers():
    async def ready(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def statuses(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            answers = [await client.get(path) for path in ("/health", "/v1/models")]
        return [answer.status_code for answer in answers], [answer.text for answer in answers]

    app = starting.Starting()
    app.waits_for = "compiling the programs, 2 of 9"
    codes, texts = asyncio.run(statuses(app))
    assert codes == [503, 503] and all("compiling the programs, 2 of 9" in text for text in texts)
    app.become(ready)
    assert asyncio.run(statuses(app)) == ([204, 204], ["", ""])
