"""Answers requests while a server starts. This module says what it waits for, until there is a service."""

from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from zerojax.serve import app as app_lib
from zerojax.serve.requests import NotAnswered

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Starting:
    """An application that answers 503, and from `become` on as another one does.

    Attributes:
      waits_for: what the server does before it is ready, which any thread may set.
    """

    def __init__(self) -> None:
        self.waits_for = "the model"
        self._ready: Application | None = None

    def become(self, ready: Application) -> None:
        """Answers as another application does."""
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ready is not None:
            return await self._ready(scope, receive, send)
        if scope["path"] == "/health":
            found = {"status": "starting", "waits_for": self.waits_for}
            return await JSONResponse(found, 503, {"Retry-After": "1"})(scope, receive, send)
        line = f"the server is not ready ({self.waits_for}); ask again later"
        return await app_lib.refusal(NotAnswered(503, line, code="starting"))(scope, receive, send)
