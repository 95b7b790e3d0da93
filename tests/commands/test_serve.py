"""Serves models in processes, and asks them with OpenAI's client. This module tests zerojax.commands.serve."""

import contextlib
import json
import signal
import sys
import threading
import time
import types

import golden_models
import httpx
import openai
import pytest

from zerojax.commands import serve
from zerojax.serve import server

LLAMA = golden_models.FOLDER / "llama"
KEY = "a-key"
LIMIT = 120  # seconds; what takes longer hangs


@contextlib.contextmanager
def started(commands, *flags, **environ):
    """Gives a served process and its URL."""
    words = ["zerojax", "serve", LLAMA, "--port", 0, "--slots", 2, "--chunk", 32, "--max_len", 1024, *flags]
    code = "\n".join(
        (
            "import os, sys, jax",
            'jax.config.update("jax_platforms", "cpu")',
            f"sys.argv = {list(map(str, words))!r}",
            "from zerojax import __main__",
            "__main__.main()",
        )
    )
    process = commands.start(before=code, **environ)
    try:
        until = time.monotonic() + LIMIT
        while "is served at" not in process.out:
            assert time.monotonic() < until and not process.err, (process.out, process.err)
            time.sleep(0.02)
        yield process, process.out.split()[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill(signal.SIGKILL)
        process.wait()


def gauge(url, name):
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"zerojax_{name} ")))


def until_free(url):
    """Waits until no slot is taken."""
    until = time.monotonic() + LIMIT
    while gauge(url, "running") or gauge(url, "waiting"):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_answers_openais_client_and_clients_that_leave_and_drains(commands):
    """One process, since each takes seconds to start."""
    with started(commands, "--adapter", f"tuned={LLAMA / 'lora'}", ZEROJAX_API_KEY=KEY) as (process, url):
        openais_client_gets_the_tokens_of_transformers_whole_and_as_a_stream(url)
        for is_streamed in (True, False):
            a_client_that_is_gone_frees_its_slot(url, is_streamed)
        the_first_sigterm_refuses_new_requests_and_answers_those_that_run(process, url)


def openais_client_gets_the_tokens_of_transformers_whole_and_as_a_stream(url):
    """They are also those of `zerojax generate`; see tests/commands/test_generate.py."""
    expected = golden_models.expected("llama")
    prompts = [row.tolist() for row in expected["input_ids"]]
    wanted = [row[len(prompts[0]) :].tolist() for row in expected["generated"]]
    ask = {"model": "llama", "prompt": prompts, "max_tokens": len(wanted[0]), "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["llama", "tuned"]
        texts = [choice.text for choice in client.completions.create(**ask).choices]
        for text, row in zip(texts, wanted):
            found = list(map(int, text.split()))
            assert found and found == row[: len(found)]
        adapted = golden_models.expected("llama/lora")
        asked = {**ask, "model": "tuned", "prompt": adapted["input_ids"].tolist()}
        for choice, row in zip(client.completions.create(**asked).choices, adapted["generated"][:, len(prompts[0]) :]):
            found = list(map(int, choice.text.split()))
            assert found and found == row[: len(found)].tolist()
        streamed = [""] * len(prompts)
        for chunk in client.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts
        with pytest.raises(openai.BadRequestError, match=r"no tokenizer\.json"):
            client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.NotFoundError, match="'other' is not served"):
            client.completions.create(**{**ask, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="prompt: has 1100 tokens, and at most 1023 fit"):
            client.completions.create(**{**ask, "prompt": [5] * 1100})
    wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(**ask)


def a_client_that_is_gone_frees_its_slot(url, is_streamed):
    before = gauge(url, "cancelled_total")
    body = {"model": "llama", "prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True, "stream": is_streamed}
    headers = {"authorization": f"Bearer {KEY}"}
    how = {"json": body, "headers": headers, "timeout": LIMIT if is_streamed else 0.2}
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", f"{url}/v1/completions", **how) as answer:
        next(answer.iter_lines())
    until_free(url)
    assert gauge(url, "cancelled_total") == before + 1


def the_first_sigterm_refuses_new_requests_and_answers_those_that_run(process, url):
    body = {"model": "llama", "prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "stream": True}
    ask = {"json": body, "headers": {"authorization": f"Bearer {KEY}"}, "timeout": LIMIT}
    with httpx.stream("POST", f"{url}/v1/completions", **ask) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.kill(signal.SIGTERM)
        while (found := httpx.get(f"{url}/health")).status_code == 200:
            pass
        assert (found.status_code, found.json()) == (503, {"status": "draining"})
        assert httpx.post(f"{url}/v1/completions", **ask).json()["error"]["code"] == "draining"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    process.wait()
    assert (process.status, process.err) == (0, "")


@pytest.mark.long
def test_a_second_signal_ends_the_process_at_once(commands):
    with started(commands) as (process, url):
        body = {"model": "llama", "prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True, "n": 8}
        asking = threading.Thread(target=_quietly, args=(url, body))
        asking.start()
        process.kill(signal.SIGINT)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        process.kill(signal.SIGTERM)
        process.wait()
        asking.join()
        assert (process.status, process.err) == (143, "zerojax: stopped by SIGTERM while it drained\n")


def _quietly(url, body):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)


@pytest.fixture
def command(monkeypatch, capsys):
    """Returns f(words) -> (status, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["zerojax serve", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            serve.main()
        return (end.value.code, *capsys.readouterr())

    return run


WRONG = {
    "nowhere: is not a folder": ("nowhere",),
    "bert: is a classifier, which writes no text": (golden_models.FOLDER / "bert",),
    "config.json: cannot be read": (golden_models.FOLDER,),
    "--port: must be from 0": (LLAMA, "--port", 65536),
    "--host: is empty": (LLAMA, "--host", ""),
    "--host 192.0.2.1, --port 0: cannot be served": (LLAMA, "--host", "192.0.2.1"),
    "--adapter x: must be NAME=FOLDER": (LLAMA, "--adapter", "x"),
    "--adapter llama=x: must be NAME=FOLDER, with a name that nothing else has": (LLAMA, "--adapter", "llama=x"),
    "qwen2: holds no adapter_config.json": (LLAMA, "--adapter", f"x={golden_models.FOLDER / 'qwen2'}"),
    "--slots: must be 1 or more, and is 0": (LLAMA, "--slots", 0),
    "--max_seconds: must be above 0, and is nan": (LLAMA, "--max_seconds", "nan"),
    "--key_file nowhere: cannot be read": (LLAMA, "--key_file", "nowhere"),
    "--tensor_parallel: is 64, and there are 8 devices": (LLAMA, "--tensor_parallel", 64),
    "chat_template: is 'own', and": (LLAMA, "--chat_template", "own"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_one_line(monkeypatch, tmp_path, command, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*WRONG[message], *(() if "--port" in WRONG[message] else ("--port", 0)))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_what_is_missing_or_taken_is_one_line(monkeypatch, command):
    with server.bind("127.0.0.1", 0) as bound:
        bound.listen()
        line = f"zerojax: --port {bound.getsockname()[1]}: is taken on 127.0.0.1; give another, or 0 for one that is free\n"
        assert command(LLAMA, "--port", bound.getsockname()[1]) == (2, "", line)
    cluster = types.SimpleNamespace(cluster=types.SimpleNamespace(num_processes=2))
    with monkeypatch.context() as patched:
        patched.setattr(serve.processes, "launched", lambda: cluster)
        assert "serve: is one process, and 2 are started" in command(LLAMA)[2]
    monkeypatch.setattr(serve, "NEEDED", ("starlette", "not_there"))
    line = "zerojax: serve: not_there is not installed; pip install 'zerojax[serve]'\n"
    assert command(LLAMA) == (2, "", line)


def test_without_a_key_other_machines_are_warned_of_and_a_key_comes_from_a_file(monkeypatch, tmp_path, command):
    monkeypatch.delenv(serve.KEY, raising=False)
    status, _, err = command(golden_models.FOLDER / "bert", "--host", "0.0.0.0", "--port", 0)
    warning, error = err.splitlines()
    assert status == 2 and "is a classifier" in error
    assert warning.startswith("zerojax: warning: 0.0.0.0 is reached by other machines, and there is no API key")
    (tmp_path / "key").write_text("secret\n")
    assert serve._key(str(tmp_path / "key")) == "secret"
    assert (
        command(golden_models.FOLDER / "bert", "--host", "0.0.0.0", "--port", 0, "--key_file", tmp_path / "key")[
            2
        ].count("\n")
        == 1
    )
    for text in ("", "two words", "\x00"):
        (tmp_path / "key").write_text(text)
        assert "must hold one word" in command(LLAMA, "--key_file", tmp_path / "key")[2]
