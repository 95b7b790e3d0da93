"""Tells a stand-in of vLLM's server that weights were published. This module tests zerojax.interop.vllm_server."""

import contextlib
import http.server
import json
import threading

import pytest
import runs
from programs import free_port

from zerojax.errors import UserError
from zerojax.interop import vllm_server


@contextlib.contextmanager
def standing_in(steps=("8", "8"), status=200, refused="", waits=None):
    """Gives the address of a server, and the requests that it got: (path, body). `refused`: the path that gets `status`."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            asked.append((self.path, self.rfile.read(int(self.headers["content-length"])).decode()))
            path = self.path.partition("?")[0]
            told = {
                "/pause": {"status": "paused"},
                "/resume": {"status": "resumed"},
                "/collective_rpc": {"results": steps},
            }
            if waits is not None:
                waits.wait(60)
            self.send_response(status if path == refused else 200 if path in told else 404)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(json.dumps({"error": "no\nway"} if path == refused else told.get(path)).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as own:
        threading.Thread(target=own.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{own.server_port}", asked
        finally:
            own.shutdown()


def test_a_server_is_paused_reads_the_folder_and_goes_on(tmp_path):
    with standing_in() as (url, asked):
        vllm_server.tell(f"{url}/", tmp_path / ".." / tmp_path.name, 8)
    assert [path for path, _ in asked] == ["/pause?mode=keep", "/collective_rpc", "/resume"]
    assert json.loads(asked[1][1]) == {"method": "read_deltas", "args": [str(tmp_path)]}


@pytest.mark.parametrize(
    "how, line, paths",
    [
        ({"refused": "/pause", "status": 404}, r"/pause\?mode=keep: status 404 .*VLLM_SERVER_DEV_MODE=1$", 1),
        ({"refused": "/collective_rpc", "status": 500}, r'/collective_rpc: status 500 \(\{"error": "no.nway"\}\)$', 3),
        ({"steps": ["8", "7"]}, r"/collective_rpc: the workers have .*'7'.* after step 8$", 3),
        ({"steps": None}, r"/collective_rpc: the workers have .* after step 8$", 3),
        ({"refused": "/resume", "status": 503}, r"/resume: status 503", 3),
    ],
)
def test_what_a_server_does_not_take_is_one_line_and_it_goes_on(how, line, paths, tmp_path):
    with standing_in(**how) as (url, asked), pytest.raises(UserError, match=line) as error:
        vllm_server.tell(url, tmp_path, 8)
    assert "\n" not in str(error.value) and len(asked) == paths
    assert paths == 1 or asked[-1][0] == "/resume"


def test_a_server_that_is_not_there_or_does_not_answer_is_one_line(tmp_path):
    with standing_in() as (url, _):
        pass
    with pytest.raises(UserError, match=r"/pause\?mode=keep: .*refused"):
        vllm_server.tell(url, tmp_path, 8)
    waits = threading.Event()
    with standing_in(waits=waits) as (url, _):
        with pytest.raises(UserError, match=r"/pause\?mode=keep: .*timed out"):
            vllm_server.tell(url, tmp_path, 8, seconds=0.2)
        waits.set()


def test_an_address_is_checked_before_the_run():
    for right in ("http://127.0.0.1:8000", "https://it.example/vllm/"):
        vllm_server.check(right)
    for wrong in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a/?b=c"):
        with pytest.raises(
            UserError, match=r"^must be the address of a server of vLLM, such as http://127.0.0.1:8000, and is '"
        ):
            vllm_server.check(wrong)


def test_a_run_tells_of_a_server_that_is_not_there_and_goes_on(cache_dir, tmp_path, capsys):
    nobody = f"http://127.0.0.1:{free_port()}"
    runs.run(tmp_path, devices=1, steps=2, export__deltas_every=1, export__deltas_to=nobody)
    told = [line for line in capsys.readouterr().out.splitlines() if "the server keeps its weights" in line]
    assert [line.partition(":")[0] for line in told] == ["step 1", "step 2"] and all("refused" in line for line in told)
    assert json.loads((tmp_path / "deltas" / "index.json").read_text())["step"] == 2
