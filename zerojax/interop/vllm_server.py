"""Tells a server of vLLM that weights were published. This module sends three requests over HTTP; the server reads the files itself.

    POST /pause?mode=keep     texts wait, and what was computed for them is dropped
    POST /collective_rpc      {"method": "read_deltas", "args": [FOLDER]}: each worker reads what is new (scripts/read_deltas.py)
    POST /resume              texts go on with the new weights

The server is started with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls read_deltas.Reader, and sees the folder at the same path. Its
own /update_weights takes no files: it receives tensors over NCCL or from the same GPU.
"""

import contextlib
import http.client
import json
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from zerojax import bounded, errors
from zerojax.errors import UserError

SECONDS = 300.0  # for each answer; the second comes when all workers have read the files
_LEAST, _MOST = 200, 1 << 20  # letters of an answer that are told, bytes that are read


def check(url: str) -> None:
    """Raises a UserError for what is no address of a server."""
    try:
        found = urllib.parse.urlsplit(url)
        is_right = (
            found.scheme in ("http", "https")
            and bool(found.hostname)
            and found.port != 0
            and not found.query + found.fragment
        )
    except ValueError:  # such as a port of letters
        is_right = False
    if not is_right:
        raise UserError(
            f"must be the address of a server of vLLM, such as http://127.0.0.1:8000, and is {errors.shown(url, 80)}"
        )


def tell(url: str, folder: pathlib.Path, step: int, seconds: float = SECONDS) -> None:
    """Lets a server read what a folder has at a step, and waits for it.

    Args:
      url: of the server.
      folder: of `deltas.publish`.
      step: that was published.
      seconds: for each answer.

    Raises:
      UserError: the server is not reached, refuses, or has another step then. It goes on with the weights that it has.
    """
    place = url.rstrip("/")
    _ask(f"{place}/pause?mode=keep", None, seconds)
    try:
        found = _ask(f"{place}/collective_rpc", {"method": "read_deltas", "args": [str(folder.resolve())]}, seconds)
        steps = found.get("results") if isinstance(found, dict) else None
        if not isinstance(steps, list) or {str(own) for own in steps} != {str(step)}:
            raise UserError(f"{place}/collective_rpc: the workers have {errors.shown(found, 80)} after step {step}")
    except UserError:
        with contextlib.suppress(UserError):  # the first error is the one to tell
            _ask(f"{place}/resume", None, seconds)
        raise
    _ask(f"{place}/resume", None, seconds)


def _ask(url: str, body: Any, seconds: float) -> Any:
    """Returns the answer to a POST."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return bounded.parse_json(answer.read(_MOST) or b"null")
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(_MOST).decode("utf-8", "replace")
        way_out = "; start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
        raise UserError(f"{url}: status {error.code} ({errors.one_line(ValueError(told), _LEAST)}){way_out}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        line = errors.one_line(reason if isinstance(reason, Exception) else error, _LEAST)
        raise UserError(f"{url}: {line}") from error
