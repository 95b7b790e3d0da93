"""Foretells steps on many hosts. Needs no GPU, but the extra `plan-gpu`.

    python scripts/at_scale.py weak --config llama3_8b --hosts 1 64 --adapter_gbps 400
    python scripts/at_scale.py wires --config llama3_70b --hosts 64 --adapter_gbps 100 seq_len=2048 zero.min_size=65536

`weak` prints the tokens a second of a GPU in the settings that arithmetic puts first for each number of hosts (`plan --axes`), where a GPU
has as many tokens in each row; it compiles nothing. `wires` compares a step with plain and with packed wires, and the bytes of its program
with theory. Models of --layers are compiled, and a straight line continues their times and bytes to the config's layers, as `plan --search`
does.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zerojax import configs, roles  # noqa: E402
from zerojax.clock import rates as rates_lib  # noqa: E402
from zerojax.clock import walk  # noqa: E402
from zerojax.plan import scale, search  # noqa: E402
from zerojax.trainer import config as config_lib  # noqa: E402
from zerojax.trainer import model as model_lib  # noqa: E402
from zerojax.trainer import plans  # noqa: E402

PACKED = {"weights": "int8", "gradients": "int4", "second_copy": True}


def main() -> None:
    """Prints the table of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("weak", "wires"))
    parser.add_argument("--config", default="llama3_8b", help="a name of configs/")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--gpus_per_host", type=int, default=8)
    parser.add_argument("--adapter_gbps", type=float, default=400.0, help="of a GPU")
    parser.add_argument(
        "--alone", action="store_true", help="of `weak`: the state is sharded over all GPUs, without other axes"
    )
    parser.add_argument("--plain", action="store_true", help="of `wires`: without packed ones")
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 4], help="of `wires`")
    parser.add_argument("changes", nargs="*", help="key=value, of the config")
    given = parser.parse_intermixed_args()
    jax.config.update("jax_platforms", "cpu")
    (weak if given.part == "weak" else wires)(given, config_of(given))


def config_of(given: argparse.Namespace) -> Any:
    """Returns the config with the changes; its global batch follows from those of a device."""
    raw = configs.get(given.config)
    for word in (*given.changes, "global_batch_size=0"):
        key, _, value = word.partition("=")
        group, _, leaf = key.rpartition(".")
        node = raw[group] if group else raw
        node[leaf] = type(node[leaf])(value)
    return config_lib.from_dict(raw)


def weak(given: argparse.Namespace, config: Any) -> None:
    """Prints a row for each number of hosts."""
    cluster = scale.Network(gpus_per_host=given.gpus_per_host, adapter_gbps=given.adapter_gbps)
    print("| GPUs | settings | step ms | tokens/s/GPU | efficiency |\n|---|---|---|---|---|", flush=True)
    first = None
    for hosts in given.hosts:
        ways = plans.axes_config(config, given.target, f"{hosts}x{given.gpus_per_host}", cluster)
        alone = [way for way in ways if all(way.settings[f"mesh.{axis}"] == 1 for axis in search.AXES)]
        best = max(alone if given.alone else ways, key=lambda way: way.tokens / way.guess.seconds)
        rate = best.tokens / best.guess.seconds
        first = first or rate
        cells = best.text, f"{best.guess.seconds * 1e3:,.0f}", f"{rate:,.0f}", f"{rate / first:.1%}"
        print(f"| {hosts * given.gpus_per_host} | {' | '.join(cells)} |", flush=True)


def wires(given: argparse.Namespace, config: Any) -> None:
    """Prints a row for each form of the wires, and their ratio."""
    table, topology = rates_lib.of(given.target), f"{given.hosts[-1]}x{given.gpus_per_host}"
    assert table is not None
    cluster = scale.Network(gpus_per_host=given.gpus_per_host, adapter_gbps=given.adapter_gbps)
    gpus, layers = given.hosts[-1] * given.gpus_per_host, model_lib.shape(config, None)[1].num_layers
    rates = scale.OnCluster(table.name, table.figures, table.sources, cluster, gpus, gpus)
    print(
        "| wires | step ms | waits for collectives | GB received by a device | of theory | peak GB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    steps = []
    for name, form in {"plain": {}, **({} if given.plain else {"packed": PACKED})}.items():
        rows = []
        for count in given.layers:
            few = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, num_layers=count),
                wire=dataclasses.replace(config.wire, **form),
            )
            plan = plans.plan_config(few, given.target, topology, rates=rates)
            assert plan.foretold is not None
            sent = sum(row.nbytes for row in plan.ledger.rows if row.role in roles.SENT_OF_WEIGHTS)
            own = [one for one in plan.departures if one.role in roles.SENT_OF_WEIGHTS]
            off = max((abs(one.found / one.expected - 1) for one in own), default=0.0)
            rows.append((plan.foretold.seconds, plan.foretold.parts[walk.EXPOSED], float(sent), float(plan.peak), off))
        share = (layers - given.layers[0]) / (given.layers[1] - given.layers[0])
        seconds, waits, nbytes, peak, _ = (low + (high - low) * share for low, high in zip(*rows))
        steps.append(seconds)
        off = max(row[-1] for row in rows)
        exact = f"{off:.2%} off" if off else "equal"
        print(
            f"| {name} | {seconds * 1e3:,.0f} | {waits * 1e3:,.0f} | {nbytes / 1e9:,.1f} | {exact} | {peak / 1e9:,.1f} |",
            flush=True,
        )
    if not given.plain:
        print(
            f"\n{steps[0] / steps[1]:.2f} times as fast, on {gpus} {given.target.upper()}s at {given.adapter_gbps:g} Gb/s a GPU"
        )


if __name__ == "__main__":
    main()
