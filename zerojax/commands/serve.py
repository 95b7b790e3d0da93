"""Answers requests over HTTP in the form of OpenAI's API. This module is the command line `zerojax serve`.

zerojax serve FOLDER                                http://127.0.0.1:8000/v1, and a page to try it at http://127.0.0.1:8000
ZEROJAX_API_KEY=... zerojax serve FOLDER --host 0.0.0.0 --port 80    for other machines, which must send the key
zerojax launch --hostfile hosts -- zerojax serve FOLDER     one process for each GPU of several hosts, of which the first listens
zerojax serve --route host1:8000 host2:8000         no engine of its own: requests go on to servers that run
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zerojax import display, files
from zerojax import mesh as mesh_lib
from zerojax.cluster import agent
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import weights
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, pretrained
from zerojax.launch import devices, early, ending, processes, program_cache, schedulers
from zerojax.models import family as family_lib
from zerojax.serve import followers
from zerojax.serve import tokenizer as words_lib
from zerojax.zero.host import settings

if TYPE_CHECKING:
    from zerojax.serve import app, replicas

KEY = "ZEROJAX_API_KEY"
AUTO = "auto"  # as many replicas as there are GPUs for
DEVICE, HOST = "device", "host"  # where weights are
NEEDED = ("starlette", "uvicorn", "h11")
MOST_REPLICAS = 64
# What a server without an engine of its own reads.
ROUTED = {"folder", "route", "host", "port", "name", "key_file", "max_seconds", "max_body"}
_LAST = 5.0  # seconds in which the engine's thread ends


@arguments.command
def main() -> int:
    """Serves until a signal. A UserError prints one line and ends with status 2. A process that fails waits for no other."""
    try:
        return _serve()
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        processes.leave_after(error)


def _serve() -> int:
    given = _parse(sys.argv[1:])
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve: {', '.join(missing)} is not installed; pip install 'zerojax[serve]'")
    from zerojax.serve import app, replicas, server  # which import them

    key, cluster = _key(given.key_file), _cluster(given)
    if given.route:
        own = replicas.addresses(given.route, _say)
        return _route(given, key, own, given.name or ", ".join(given.route))
    if given.replicas != "1":
        name = given.name or pathlib.Path(given.folder).resolve().name
        return _route(given, key, _processes(given, cluster), name)
    joined_by = given.coordinator, given.num_processes, given.process_id
    kept = program_cache.begin(is_one_host=processes.are_here(*joined_by))
    devices.emulate_cpu_devices(given.emulate_devices)
    processes.initialize(*joined_by)
    if cluster is not None and cluster.process_id > 0:
        return _follow(given)
    devices.start()
    bound = server.bind(given.host, given.port)  # before the model is read, which takes a while
    with contextlib.closing(bound):
        _warn_of_reach(given, is_far=not server.is_loopback(bound), key=key)
        began, leader = time.monotonic(), followers.Leader(processes.order)

        def make(wait_for: Callable[[str], None]) -> app.Service:
            def tell(line: str) -> None:
                wait_for(line)
                _say(line)

            engine, words, name, adapters = _model(given, cluster, tell, kept)
            service = app.Service(
                engine,
                words,
                name=name,
                adapters=adapters,
                limits=_limits(given),
                key=key,
                names=server.names(given.host, bound),
                tell=(lambda actions: None) if cluster is None else leader.tell,
            )
            service.start()
            return service

        def on_start(service: app.Service) -> None:
            _say(f"ready after {time.monotonic() - began:.1f} s")
            _say(f"zerojax: {service.name} is served at {server.url(bound)}")

        service = server.serve(make, bound, on_start)
    service.stop(_LAST)
    if service.failure:
        processes.leave_if_told()
        ending.leave(1, f"zerojax: the engine failed: {service.failure}")
    if cluster is not None:
        leader.end()
        processes.leave(0)
    return 0


def _processes(given: argparse.Namespace, cluster: processes.Cluster | None) -> "list[replicas.ServerProcess]":
    """Returns several processes of this command, each with GPUs of its own, not started yet."""
    from zerojax.serve import replicas

    if cluster is not None:
        raise UserError(
            "--replicas: are processes of this machine alone, and several processes serve together here; omit one of both, or start a "
            "server on each host and pass requests on to all (zerojax serve --route HOST:PORT ...)"
        )
    each, names = given.tensor_parallel or 1, agent.gpus(os.environ)
    count = len(names) // each if given.replicas == AUTO else int(given.replicas)
    if given.replicas == AUTO and not count:
        raise UserError(f"--replicas {AUTO}: takes a GPU or more for each, and there are {len(names)}; give a number")
    if names and count * each > len(names):
        raise UserError(f"--replicas: {count} of {each} GPUs each need {count * each}, and there are {len(names)}")
    # Of an argument that is given twice the last one counts
    words = [*sys.argv[1:], "--replicas", "1", "--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "zerojax", "serve", *words]
    return [
        replicas.ServerProcess(n, command, e, _say) for n, e in enumerate(replicas.environments(count, names, each))
    ]


def _route(given: argparse.Namespace, key: str, own: "Sequence[replicas.Replica]", name: str) -> int:
    """Serves by replicas."""
    from zerojax.serve import replicas, server

    bound, began = server.bind(given.host, given.port), time.monotonic()
    with contextlib.closing(bound):
        if mine := [one.address for one in own if isinstance(one, replicas.Address) and one.is_at(bound)]:
            raise UserError(f"--route {mine[0]}: is this server itself; name the servers behind it")
        _warn_of_reach(given, is_far=not server.is_loopback(bound), key=key)
        router = replicas.Router(
            own, name=name, limits=_limits(given), names=server.names(given.host, bound), has_key=bool(key)
        )

        def make(wait_for: Callable[[str], None]) -> replicas.Router:
            router.start(wait_for)
            return router

        def on_start(router: replicas.Router) -> None:
            _say(f"the first replica is ready after {time.monotonic() - began:.1f} s")
            _say(f"zerojax: {router.name} is served at {server.url(bound)}")

        try:
            server.serve(make, bound, on_start)
        finally:
            router.stop(_LAST)
    if router.failure:
        ending.leave(1, f"zerojax: {router.failure}")
    return 0


def _limits(given: argparse.Namespace) -> "app.Limits":
    from zerojax.serve import app

    seconds = min(given.max_seconds, app.Limits.body_seconds)
    return app.Limits(given.queue, given.max_seconds, given.max_body, seconds)


def _warn_of_reach(given: argparse.Namespace, *, is_far: bool, key: str) -> None:
    if is_far and not key:
        print(
            f"zerojax: warning: {given.host} is reached by other machines, and there is no API key; set {KEY}, or name a --key_file",
            file=sys.stderr,
            flush=True,
        )


def _cluster(given: argparse.Namespace) -> processes.Cluster | None:
    """Returns the processes that serve together; None for one alone."""
    cluster = processes.find_cluster(given.coordinator, given.num_processes, given.process_id)
    if cluster is None and (found := schedulers.find()).method:
        raise UserError(f"serve: {found.name} starts several pods, which do not know each other; {schedulers.WAY_OUT}")
    return cluster


def _follow(given: argparse.Namespace) -> int:
    """Runs the engine as process 0 does, which ends this process when it has drained."""
    engine = _model(given, _cluster(given), lambda line: None)[0]
    for number in early.STOPS:  # whoever stops the service signals all processes, or process 0
        signal.signal(number, signal.SIG_IGN)
    followers.follow(engine, processes.next_order)
    processes.leave(0)


def _model(
    given: argparse.Namespace, cluster: processes.Cluster | None, tell: Callable[[str], None], kept: str = ""
) -> tuple[engine_lib.Engine, words_lib.Words, str, list[str]]:
    """Returns the engine of a folder, its texts, its name and those of its adapters.

    Args:
      given: the command's arguments.
      cluster: the processes that serve together; None for one alone.
      tell: is called before each step that takes long, with a line.
      kept: the line on compiled programs, which the first step follows.
    """
    folder = folder_lib.open_folder(given.folder)
    if not family_lib.writes_text(folder.family, folder.model):
        raise UserError(
            f"{folder.path}: is a classifier, which writes no text; zerojax generate prints the classes of texts"
        )
    if given.max_inputs is not None and not folder.family.is_encoder_decoder:
        raise UserError(f"--max_inputs: is of encoder-decoders, and {folder.path} is none; omit it, and see --max_len")
    words = words_lib.of_folder(folder, given.chat_template)
    name = given.name or pathlib.Path(given.folder).resolve().name
    named, ways = _adapters(name, given.adapter), _ways(given, cluster)
    for setting in pretrained.unread_settings(folder):
        print(f"zerojax: note: {setting} of the folder is not applied", file=sys.stderr, flush=True)
    mesh = mesh_lib.make_mesh(model=ways, devices=jax.devices()[:ways])
    how: dict[str, Any] = {"mesh": mesh, "stage": 0, "dtype": huggingface.DTYPES.get(given.dtype)}
    if given.weights == HOST:
        if ways > 1:
            raise UserError(
                f"--weights {HOST}: streams them to one device, and they are to be sharded over {ways}; omit it, or --tensor_parallel"
            )
        offload = {"params": settings.HOST, "params_fraction": given.host_fraction}
        how |= {"stage": 3, "offload": offload, "min_size": 1}
    if kept:
        _say(kept)
    tell(f"reading the weights of {folder.path}, {display.human(files.folder_bytes(folder.path))}")
    began = time.monotonic()
    loaded = pretrained.load_huggingface(folder.path, **how)
    sizes = {name: getattr(given, name) for name in ("slots", "max_len", "max_inputs", "chunk", "prefill_tokens")}
    sizes = {name: size for name, size in sizes.items() if size is not None}  # the engine's own
    adapters = {own: loaded.read_adapter(path) for own, path in named.items()}
    tell(f"the weights are read after {time.monotonic() - began:.1f} s; making the engine")
    engine = engine_lib.Engine(
        loaded, format=given.format, adapters=adapters, text_of=words.text_of, grammar_of=words.grammar_of, **sizes
    )
    if given.warm_up:
        tell("tracing the programs")
        engine.warm_up(lambda number, count: tell(f"compiling the programs, {number} of {count}"))
    return engine, words, name, list(adapters)


def _say(line: str) -> None:
    """Prints a line of the start."""
    print(line, flush=True)


def _ways(given: argparse.Namespace, cluster: processes.Cluster | None) -> int:
    """Returns the devices over which the weights are sharded; those of several processes all hold a part."""
    count = len(jax.devices())
    ways = given.tensor_parallel or (1 if cluster is None else count)
    if ways > count:
        raise UserError(f"--tensor_parallel: is {ways}, and there are {count} devices; lower it")
    if cluster is not None and ways != count:
        raise UserError(
            f"--tensor_parallel: is {ways}, and {cluster.num_processes} processes have {count} devices, which must all hold a part of the "
            "weights; omit it, or start fewer processes"
        )
    return ways


def _adapters(name: str, words: list[str]) -> dict[str, str]:
    """Returns the folders of adapters by their names, which are apart from the model's."""
    found: dict[str, str] = {}
    for word in words:
        own, _, path = word.partition("=")
        if not own or not path or own in found or own == name:
            raise UserError(
                f"--adapter {word}: must be NAME=FOLDER, with a name that nothing else has; the model is {name!r}"
            )
        found[own] = path
    return found


def _key(path: str | None) -> str:
    """Returns the API key of the environment or of a file; "" for none."""
    if path is None:
        place, found = KEY, os.environ.get(KEY, "")
        if not found:
            return ""
    else:
        place, found = f"--key_file {path}", files.read_key(path, "--key_file")
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise UserError(f"{place}: must hold one word of ASCII letters; correct it")
    return found


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax serve", doc=__doc__)
    add = parser.add_argument
    add("folder", nargs="?", help="a folder with config.json and safetensors, or a name on the Hugging Face hub")
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, help="the port; 0 takes a free one (8000)")
    add("--name", default="", help="the model's name in requests (that of the folder)")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a folder of PEFT that requests name as their model; may be given several times",
    )
    add(
        "--key_file",
        help=f"a file with the API key that requests must send; by default the key is that of {KEY}, if it is set",
    )
    add("--format", default="none", choices=weights.FORMATS, help="of the kernels of linear modules (none)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *huggingface.DTYPES),
        help="of the weights; auto: as they are stored",
    )
    add(
        "--weights",
        default=DEVICE,
        choices=(DEVICE, HOST),
        help="where they are: host streams them block by block for each step, for models that no device holds (device)",
    )
    add("--host_fraction", type=float, help="of the weights' bytes that are in host memory, for --weights host (1)")
    add("--slots", type=int, default=8, help="answers at once (8)")
    add(
        "--max_len",
        type=int,
        default=2048,
        help="the most tokens of a prompt and its answer; the cache has them for each slot (2048)",
    )
    add("--max_inputs", type=int, help="the most tokens of an encoder-decoder's prompt (512)")
    add("--chunk", type=int, default=1024, help="the most tokens of a prompt that one program reads (1024)")
    add(
        "--prefill_tokens",
        type=int,
        default=256,
        help="the most tokens of prompts that are read between two tokens of running answers (256)",
    )
    add(
        "--tensor_parallel",
        type=int,
        help="devices over which the weights are sharded (1; with several processes all of theirs)",
    )
    add(
        "--replicas",
        default="1",
        help="engines behind this port, each with GPUs of its own; auto: as many as there are GPUs for (1)",
    )
    add(
        "--route",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="servers that run already, on any host, to which requests are passed on, in place of a folder",
    )
    add("--queue", type=int, default=64, help="answers that may wait for a slot; more are refused with 429 (64)")
    add("--max_seconds", type=float, default=600.0, help="for an answer, with its wait (600)")
    add("--max_body", type=int, default=4 * 2**20, help="bytes of a request (4 MiB)")
    add(
        "--chat_template",
        default="auto",
        choices=("auto", "own", "plain"),
        help="auto: the tokenizer's own, where it has one (auto)",
    )
    add("--warm_up", action="store_true", help="compile all programs before the first request, which takes minutes")
    add("--emulate_devices", type=int, default=1, help="CPU devices to emulate if there is no accelerator (1)")
    add(
        "--coordinator",
        help="host:port of process 0, to join processes that neither zerojax launch nor a scheduler started",
    )
    add("--num_processes", type=int, help="processes that serve together")
    add("--process_id", type=int, help="this process's number, from 0, which listens")
    given = parser.parse_args(words)
    if bool(given.route) == (given.folder is not None):
        both = "a folder, and --route servers that have one; give one of both"
        raise UserError(
            f"serve: is given {both}" if given.route else "folder: is missing; name one, or servers (--route)"
        )
    for name in vars(given).keys() - ROUTED if given.route else ():
        if getattr(given, name) != parser.get_default(name):
            raise UserError(f"--{name}: is of an engine, and --route has none; give it to the servers")
    if not 0 <= given.port < 2**16:
        raise UserError(f"--port: must be from 0 (a free one) to 65535, and is {given.port}")
    sizes = (
        "slots",
        "max_len",
        "max_inputs",
        "chunk",
        "prefill_tokens",
        "tensor_parallel",
        "max_body",
        "emulate_devices",
    )
    for name in sizes:
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise UserError(f"--{name}: must be 1 or more, and is {getattr(given, name)}")
    if given.replicas != AUTO and not (given.replicas.isdecimal() and 1 <= int(given.replicas) <= MOST_REPLICAS):
        raise UserError(f"--replicas: must be {AUTO} or from 1 to {MOST_REPLICAS}, and is {given.replicas!r}")
    if given.host_fraction is not None and given.weights != HOST:
        raise UserError("--host_fraction: is of --weights host; give both, or omit it")
    given.host_fraction = 1.0 if given.host_fraction is None else given.host_fraction
    if not 0 < given.host_fraction <= 1:
        raise UserError(f"--host_fraction: must be above 0 and at most 1, and is {given.host_fraction:g}")
    if given.queue < 0:
        raise UserError(f"--queue: must be 0 or more, and is {given.queue}")
    if not 0 < given.max_seconds < 1e7:
        raise UserError(f"--max_seconds: must be above 0, and is {given.max_seconds:g}")
    if not given.host:
        raise UserError("--host: is empty; give an address, such as 127.0.0.1")
    return given


if __name__ == "__main__":
    main()
