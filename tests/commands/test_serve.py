"""Serves models in processes, and asks them with OpenAI's client. This module tests zerojax.commands.serve."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import browser
import golden_models
import hostile_clients
import httpx
import pytest
import runs
from programs import free_port

from zerojax.commands import serve
from zerojax.errors import UserError
from zerojax.serve import server

LLAMA = golden_models.FOLDER / "llama"
KEY = hostile_clients.KEY
LIMIT = 120  # seconds; what takes longer hangs
GROWTH = (
    16 * 2**20
)  # bytes of 800 MiB that a process may grow by with 1,000 clients, after as many and more: it keeps what it freed


def code_of(*flags):
    """Returns the code of a process that serves."""
    words = ["zerojax", "serve", LLAMA, "--port", 0, "--slots", 2, "--chunk", 32, "--max_len", 1024, *flags]
    return "\n".join(
        (
            "import os, sys, jax",
            'jax.config.update("jax_platforms", "cpu")',
            f"sys.argv = {list(map(str, words))!r}",
            "from zerojax import __main__",
            "__main__.main()",
        )
    )


@contextlib.contextmanager
def started(commands, *flags, before="", processes=1, **environ):
    """Gives a served process, or a list of those that serve together, and the URL of the first. Each first runs the code `before`."""
    address = () if processes == 1 else ("--num_processes", processes, "--coordinator", f"127.0.0.1:{free_port()}")
    every = []
    for index in range(processes):
        own = (*address, "--process_id", index) if address else ()
        every.append(commands.start(before=f"{before}\n{code_of(*flags, *own)}", **environ))
    try:
        until = time.monotonic() + LIMIT
        while not (told := re.search(r" is served at (\S+)\n", every[0].out)):
            assert time.monotonic() < until and (address or not every[0].err), (every[0].out, every[0].err)
            time.sleep(0.02)
        yield every if address else every[0], told[1]
    finally:
        for process in every:
            with contextlib.suppress(ProcessLookupError):
                process.kill(signal.SIGKILL)
            process.wait()


def gauge(url, name):
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"zerojax_{name} ")))


def the_start_is_told(out):
    """Each step before its wait, and the address last."""
    lines = [re.sub(r"[\d.]+ s\b", "N s", line) for line in out.splitlines()]
    assert lines[0].startswith("compiled programs: ") and lines[1].startswith(f"reading the weights of {LLAMA}, ")
    compiled = ["tracing the programs", *(f"compiling the programs, {number} of 6" for number in range(1, 7))]
    told = ["the weights are read after N s; making the engine", *compiled, "ready after N s"]
    assert lines[2:-1] == told and lines[-1].startswith("zerojax: llama is served at http://127.0.0.1:")


def until_free(url):
    """Waits until no slot is taken."""
    until = time.monotonic() + LIMIT
    while gauge(url, "running") or gauge(url, "waiting"):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_answers_openais_client_and_clients_that_leave_and_drains(commands):
    """One process, since each takes seconds to start."""
    flags = ("--adapter", f"tuned={LLAMA / 'lora'}", "--warm_up")
    with started(commands, *flags, ZEROJAX_API_KEY=KEY) as (process, url):
        the_start_is_told(process.out)
        openais_client_gets_the_tokens_of_transformers_whole_and_as_a_stream(url)
        for is_streamed in (True, False):
            a_client_that_is_gone_frees_its_slot(url, is_streamed)
        hostile_clients_get_4xx_or_503_and_leave_nothing_behind(process, url, 50, seed=0)
        the_first_sigterm_refuses_new_requests_and_answers_those_that_run(process, url)


READS_FOR_LONG = """
import time
from zerojax.interop import pretrained
pretrained.load_huggingface = lambda *given, **how: time.sleep(1000)
"""


def test_a_server_that_reads_weights_says_so_and_a_signal_ends_it_at_once(commands):
    port = free_port()
    process = commands.start(before=f"{READS_FOR_LONG}\n{code_of('--port', port)}")
    try:
        until = time.monotonic() + LIMIT
        while "reading the weights" not in process.out:
            assert time.monotonic() < until and not process.err, (process.out, process.err)
            time.sleep(0.02)
        found = httpx.get(f"http://127.0.0.1:{port}/health", timeout=LIMIT)
        assert found.status_code == 503 and found.json()["waits_for"].startswith(f"reading the weights of {LLAMA}, ")
        process.kill(signal.SIGTERM)
        process.wait()
        assert process.status == 143 and re.fullmatch(r"zerojax: stopped by SIGTERM.*\n", process.err)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill(signal.SIGKILL)
        process.wait()


def openais_client_gets_the_tokens_of_transformers_whole_and_as_a_stream(url):
    """They are also those of `zerojax generate`; see tests/commands/test_generate.py."""
    import openai  # takes seconds, of each process that collects tests

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


def hostile_clients_get_4xx_or_503_and_leave_nothing_behind(process, url, count, seed):
    """Requests are torn, malformed, too large, slow or half closed, and many at once."""
    statuses = hostile_clients.attack(httpx.URL(url).host, httpx.URL(url).port, count, seed)
    until_free(url)
    assert 400 in statuses and sum(statuses.values()) > count / 4, statuses
    how = {"headers": {"authorization": f"Bearer {KEY}"}, "files": {"prompt": b"5"}, "timeout": LIMIT}
    assert [httpx.post(f"{url}/v1/{name}", **how).status_code for name in ("completions", "nowhere")] == [415, 404]
    assert process.err == "" and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.long
def test_a_thousand_hostile_clients_leave_nothing_behind(commands):
    with started(commands, ZEROJAX_API_KEY=KEY) as (process, url):
        for seed in range(5):
            before = hostile_clients.resident(process.pid)
            hostile_clients_get_4xx_or_503_and_leave_nothing_behind(process, url, 1000, seed)
        assert hostile_clients.resident(process.pid) < before + GROWTH


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


# Prints the bytes of the weights that a process reads.
COUNTS = """
from zerojax.interop import folder, pretrained
read, load, counts = folder._read_slice, pretrained.load_huggingface, []
def counted(*given):
    found = read(*given)
    counts.append(found.nbytes)
    return found
def loading(*given, **how):
    loaded = load(*given, **how)
    print("read", sum(counts), flush=True)
    return loaded
folder._read_slice, pretrained.load_huggingface = counted, loading
"""
SOON = 45.0  # seconds; heartbeats alone take 100


@runs.LONG
def test_two_processes_serve_as_one_each_reads_half_of_the_weights_and_the_end_of_one_is_named(commands):
    expected = golden_models.expected("llama")
    prompts, length = expected["input_ids"].tolist(), expected["input_ids"].shape[1]
    with started(commands, "--adapter", f"tuned={LLAMA / 'lora'}", before=COUNTS, processes=2) as (both, url):
        ask = {"model": "llama", "prompt": prompts, "max_tokens": 12, "temperature": 0}
        choices = httpx.post(f"{url}/v1/completions", json=ask, timeout=LIMIT).json()["choices"]
        for choice, row in zip(choices, expected["generated"]):
            assert list(map(int, choice["text"].split())) == row[length : length + 12].tolist()
        stop = " ".join(choices[0]["text"].split()[4:6])  # a text, of which all processes must know
        asked = {**ask, "prompt": prompts[0], "stop": [stop]}
        (choice,) = httpx.post(f"{url}/v1/completions", json=asked, timeout=LIMIT).json()["choices"]
        assert choice["text"] == choices[0]["text"].split(stop)[0] and choice["finish_reason"] == "stop"
        body = {"model": "tuned", "prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
        until_free(url)
        again = httpx.post(f"{url}/v1/completions", json=ask, timeout=LIMIT).json()["choices"]
        assert [choice["text"] for choice in again] == [choice["text"] for choice in choices]
        total = (LLAMA / "model.safetensors").stat().st_size
        read = [int(re.search(r"^read (\d+)$", process.out, re.MULTILINE)[1]) for process in both]
        assert max(read) < 0.55 * total, (read, total)
        asking = threading.Thread(target=_quietly, args=(url, {**body, "model": "llama", "n": 8}))
        asking.start()
        while not gauge(url, "running"):
            time.sleep(0.02)
        both[1].kill(signal.SIGKILL)
        began = time.monotonic()
        both[0].wait()
        asking.join()
        lines = [line for line in both[0].err.splitlines() if not line.startswith("[Gloo]")]
        assert time.monotonic() - began < SOON and both[0].status == 1
        assert len(lines) == 1 and lines[0].startswith("zerojax: process 1 is gone"), lines


@pytest.mark.long
def test_a_browser_asks_by_the_page(commands, tmp_path):
    """With a key that the user gives, a token at a time, whole and stopped."""
    if (path := browser.find()) is None:
        pytest.skip("no browser is installed")
    expected = golden_models.expected("llama")
    prompt, row = expected["input_ids"][0], expected["generated"][0]
    with started(commands, ZEROJAX_API_KEY=KEY) as (_, url), browser.opened(path, tmp_path) as page:
        page.open(url)
        assert (
            page.until('at("state").textContent') == "the API key is missing or wrong; send Authorization: Bearer KEY"
        )
        page.run(f'at("key").value = "{KEY}"; at("key").dispatchEvent(new Event("change"))')
        assert page.until('at("model").value') == "llama"
        page.run(f'at("prompt").value = "{" ".join(map(str, prompt))}"; at("tokens").value = 12; at("ask").click()')
        assert page.until('!at("ask").disabled && at("state").textContent') == "length, 12 tokens"
        assert list(map(int, page.run('at("answer").textContent').split())) == row[len(prompt) :][:12].tolist()
        page.run('at("kind").value = "chat"; at("ask").click()')
        assert "has no tokenizer.json" in page.until('!at("ask").disabled && at("state").textContent')
        page.run('at("kind").value = "completion"; at("prompt").value = "5 6"; at("temperature").value = 1')
        page.run('at("tokens").value = 1000; at("ask").click()')
        page.until('at("answer").textContent')
        page.run('at("stop").click()')
        page.until('!at("ask").disabled')
        assert page.run('at("state").textContent').startswith(("stopped", "stop,"))
        until_free(url)
        page_keeps_a_conversation(page)


def page_keeps_a_conversation(page):
    """Asks three questions of a server that is put in: the second goes with the first and its answer, the third begins anew."""
    page.run(FETCH)
    page.run('at("kind").value = "chat"; at("new").click()')
    for question in ("one", "two", "", "three"):
        if not question:
            assert page.run(LABELS) == ["Question", "Answer"] * 2 and page.run('at("answer").textContent') == "a2"
            page.run('at("new").click()')
            assert page.run(LABELS) == []
            continue
        page.run(f'at("prompt").value = "{question}"; at("ask").click()')
        page.until('!at("ask").disabled')
        assert page.run('at("prompt").value') == ""
    first, answer, second, third = (
        {"role": role, "content": text} for role, text in zip(ROLES, ("one", "a1", "two", "three"))
    )
    assert page.run("asked") == [[first], [first, answer, second], [third]]


ROLES = ("user", "assistant", "user", "user")
LABELS = '[...document.querySelectorAll("#turns h2")].map(head => head.textContent)'
FETCH = """
window.asked = [];
window.fetch = async (url, how) => {
  asked.push(JSON.parse(how.body).messages);
  return new Response(`data: {"choices": [{"delta": {"content": "a${asked.length}"}, "finish_reason": "stop"}]}\n\n`);
};
0
"""


@pytest.mark.long
def test_weights_in_host_memory_are_served(commands):
    expected = golden_models.expected("llama")
    prompts, length = expected["input_ids"].tolist(), expected["input_ids"].shape[1]
    with started(commands, "--weights", "host", "--host_fraction", 0.6) as (_, url):
        ask = {"model": "llama", "prompt": prompts, "max_tokens": 12, "temperature": 0}
        choices = httpx.post(f"{url}/v1/completions", json=ask, timeout=LIMIT).json()["choices"]
        for choice, row in zip(choices, expected["generated"]):
            assert list(map(int, choice["text"].split())) == row[length : length + 12].tolist()


def test_replicas_answer_alike_and_the_end_of_one_is_no_end(commands):
    body = {"model": "llama", "prompt": [5, 6], "max_tokens": 5, "temperature": 0}
    with started(commands, "--replicas", 2, JAX_PLATFORMS="cpu") as (process, url):
        ask = lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).json()["choices"][0]["text"]  # noqa: E731
        ready = lambda: httpx.get(f"{url}/health").json()["ready"]  # noqa: E731
        until(lambda: ready() == 2)
        texts = {ask() for _ in range(2)}
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        texts |= {ask() for _ in range(2)}
        until(lambda: "starting it again" in process.out and ready() == 2)
        process.kill(signal.SIGTERM)
        assert process.wait().status == 0 and len(texts) == process.out.count("is served at") == 1


def until(is_so):
    ends = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.long
def test_a_launcher_starts_both_again_when_one_is_killed_and_both_drain(commands):
    words = [sys.executable, "-m", "zerojax.commands.launch", "--num_gpus=2", "--max_restarts=1", "--", sys.executable]
    words += ["-c", code_of("--max_len", 64)]
    with subprocess.Popen(words, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            body = {"model": "llama", "prompt": [5, 6], "max_tokens": 5, "temperature": 0}
            texts = []
            for _ in range(2):
                line = next(line for line in launcher.stdout if "is served at" in line)
                answer = httpx.post(f"{line.split()[-1]}/v1/completions", json=body, timeout=LIMIT).json()
                texts.append(answer["choices"][0]["text"])
                os.kill(children(launcher.pid)[1], signal.SIGKILL if len(texts) == 1 else signal.SIGTERM)
            assert launcher.poll() is None and texts[0] == texts[1]  # one process alone does not drain
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(LIMIT)
        finally:
            launcher.kill()
    assert launcher.returncode in (0, 143)


def children(pid):
    """Returns the processes that serve, of a launcher, oldest first."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/task/*/children"):
        if int(path.parts[2]) in (pid, *found):
            found += map(int, path.read_text().split())
    return sorted(found)


@pytest.mark.long
def test_a_second_signal_ends_the_process_at_once(commands):
    with started(commands) as (process, url):
        body = {"model": "llama", "prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True, "n": 8}
        asking = threading.Thread(target=_quietly, args=(url, body))
        asking.start()
        while not gauge(url, "running"):
            pass
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
def command(run_main):
    """Returns f(words) -> (status, stdout, stderr)."""
    return functools.partial(run_main, serve)


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
    "--replicas: must be auto or from 1 to 64, and is 'x'": (LLAMA, "--replicas", "x"),
    "--replicas auto: takes a GPU or more for each": (LLAMA, "--replicas", "auto"),
    "folder: is missing; name one, or servers (--route)": (),
    "serve: is given a folder, and --route servers": (LLAMA, "--route", "a:1"),
    "--slots: is of an engine, and --route has none": ("--slots", 3, "--route", "a:1"),
    "--route 'https://a:1': must be HOST:PORT": ("--route", "b:1", "https://a:1"),
    "--key_file nowhere: cannot be read": (LLAMA, "--key_file", "nowhere"),
    "--tensor_parallel: is 64, and there are 8 devices": (LLAMA, "--tensor_parallel", 64),
    "--weights host: streams them to one device": (LLAMA, "--weights", "host", "--tensor_parallel", 2),
    "--host_fraction: is of --weights host": (LLAMA, "--host_fraction", 0.5),
    "--max_inputs: is of encoder-decoders": (LLAMA, "--max_inputs", 8),
    "--host_fraction: must be above 0": (LLAMA, "--weights", "host", "--host_fraction", 0),
    "format: is for weights on the devices": (LLAMA, "--weights", "host", "--format", "int8"),
    "chat_template: is 'own', and": (LLAMA, "--chat_template", "own"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_one_line(monkeypatch, tmp_path, command, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*WRONG[message], *(() if "--port" in WRONG[message] else ("--port", 0)))
    assert (status, err.count("\n")) == (2, 1) and message in err and "is served at" not in out


def test_what_is_missing_or_taken_is_one_line(monkeypatch, command):
    with server.bind("127.0.0.1", 0) as bound:
        bound.listen()
        line = f"zerojax: --port {bound.getsockname()[1]}: is taken on 127.0.0.1; give another, or 0 for one that is free\n"
        assert command(LLAMA, "--port", bound.getsockname()[1]) == (2, "", line)
    port = free_port()
    line = f"zerojax: --route localhost:{port}: is this server itself; name the servers behind it\n"
    assert command("--port", port, "--route", "b:1", f"localhost:{port}") == (2, "", line)
    with monkeypatch.context() as patched:
        patched.setattr(serve.schedulers, "find", lambda: serve.schedulers.Origin("Kubernetes", method="k8s"))
        assert "serve: Kubernetes starts several pods, which do not know each other; set --coord" in command(LLAMA)[2]
    two = types.SimpleNamespace(num_processes=2)
    with pytest.raises(
        UserError, match="--tensor_parallel: is 4, and 2 processes have 8 devices, which must all hold a part"
    ):
        serve._ways(types.SimpleNamespace(tensor_parallel=4), two)
    assert serve._ways(types.SimpleNamespace(tensor_parallel=None), two) == 8
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
    (tmp_path / "key").chmod(0o600)
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
