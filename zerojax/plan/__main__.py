"""Plans a run: its memory, collectives and least step time. This module is the command line `python -m zerojax.plan`.

python -m zerojax.plan --config configs/llama3_8b.py --target h200 --topology 1x8
python -m zerojax.plan --config configs/llama3_8b.py --target v5p --topology 4x4x8 --json
python -m zerojax.plan --config configs/llama3_8b.py --target h200 --serve --format int8 --config.seq_len=2048
"""

import dataclasses
import errno
import json
import math
import sys

import jax
from absl import flags

from zerojax import display, errors, xla_flags
from zerojax.clock import rates as rates_lib
from zerojax.errors import UserError
from zerojax.inference.engine import weights
from zerojax.launch import devices, ending, processes
from zerojax.plan import arithmetic, json_form, picture, scale, search, step_plan, targets
from zerojax.plan import report as plan_report
from zerojax.plan import serving as serving_plan
from zerojax.trainer import command, plans, serving, setting_names
from zerojax.trainer import config as config_lib
from zerojax.trainer import settings as settings_lib
from zerojax.zero import state_bytes

GPUS_OF_A_HOST = scale.Network.gpus_per_host  # unless --topology says otherwise
_LEANER = "--search looks for settings that fit; a smaller micro_batch_size or seq_len, remat='full' or more devices need less"
flags.declare_key_flag("config")  # for --help, which lists the flags of this module
_TARGET = flags.DEFINE_string("target", "here", "Device kind: h200, h100, a100, b200, v5e, v5p, v6e, cpu, here.")
_TOPOLOGY = flags.DEFINE_string("topology", "", "GPUs, CPUs: hosts x devices (1x8). TPUs: chips (4x4x8).")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON instead of tables (docs/plan.md).")
_PICTURE = flags.DEFINE_string("picture", "", "Write a PNG of memory, by role and over the program, to this path.")
_CLUSTER = flags.DEFINE_string(
    "cluster", "", "A JSON file of a cluster: also foretell the step on 64 to 4,096 GPUs (docs/plan.md)."
)
_SEARCH = flags.DEFINE_boolean("search", False, "Search for the fastest plan that fits.")
_AXES = flags.DEFINE_boolean("axes", False, "Show what each axis of a mesh costs, by arithmetic. Compiles nothing.")
_PRICE = flags.DEFINE_float("price_per_gpu_hour", None, "Of one GPU: adds the cost of a step and of 1e9 tokens.", 0.0)
_MOST = flags.DEFINE_integer("most_compiles", 12, "Maximum number of plans that --search compiles.")

_RATES = flags.DEFINE_string("rates", "", "Rates of these GPUs in place of the target's: a file of zerojax calibrate.")
_SERVE = flags.DEFINE_boolean(
    "serve", False, "Plan serving: texts of seq_len that fit, their tokens/s and first token."
)
_SLOTS = flags.DEFINE_multi_integer(
    "slots", [], "Texts that are answered at once; for --serve. Default: 1, and 8 or what fits.", 1
)
_PROMPT = flags.DEFINE_integer(
    "prompt", None, "Tokens of a prompt; for --serve. Default: 1024, or all but one of seq_len.", 1
)
_FORMAT = flags.DEFINE_enum("format", "none", weights.FORMATS, "Of the kernels; for --serve.")
_HOST_GBPS = flags.DEFINE_float(
    "host_gbps", None, "GB/s to host memory, and as many from it at once; default: the target's.", 0.001
)
_DISK_GBPS = flags.DEFINE_float(
    "disk_gbps", None, 'GB/s of each host\'s disk, "both" of zerojax disk; default: 2, assumed.', 0.001
)


def main() -> None:
    """Parses the command line and prints the plan. A UserError prints one line and exits with status 2."""
    lost: list[OSError] = []
    ending.guard_streams(lost.append)
    errors.warn_in_one_line()
    try:
        config = config_lib.from_dict(command.parse(sys.argv))
        if config.deterministic:
            xla_flags.make_deterministic()
        if config.keeps_roundings:
            xla_flags.keep_roundings()
        _prepare(config)
        with setting_names.of_config():
            if _SERVE.value:
                _serve(config)
            elif _AXES.value:
                _axes(config)
            elif _SEARCH.value:
                _search(config)
            else:
                _plan(config)
    except UserError as error:
        processes.leave(2, f"zerojax: {error}")
    except jax.errors.JaxRuntimeError as error:
        why = errors.one_line(error)
        processes.leave(
            2,
            f"zerojax: --target {_TARGET.value}: XLA cannot compile this step; plan another target or config.precision ({why})",
        )
    sys.stdout.flush()
    if lost and lost[0].errno != errno.EPIPE:  # a reader that ends, as `head`, has what it wants
        processes.leave(2, f"zerojax: stdout cannot be written ({lost[0].strerror}); make room, or write elsewhere")
    processes.leave(0)


def _prepare(config: settings_lib.Config) -> None:
    """Hides real accelerators from JAX when it plans for absent devices."""
    for flag in (_RATES, _CLUSTER, _PICTURE):
        if flag.present and not flag.value:
            raise UserError(f"--{flag.name}: is empty; name a file, or omit it")
    if flags.FLAGS["most_compiles"].present and not _SEARCH.value:
        raise UserError("--most_compiles: only --search uses it; add --search, or omit --most_compiles")
    if _SERVE.value:  # over emulated devices, on which nothing runs
        config = dataclasses.replace(config, emulate_devices=max(config.emulate_devices, config.mesh.model))
    elif wrong := next((name for name in ("format", "slots", "prompt") if flags.FLAGS[name].present), ""):
        raise UserError(f"--{wrong}: only --serve uses it; add --serve, or omit --{wrong}")
    if _TARGET.value == "here":
        devices.emulate_cpu_devices(config.emulate_devices)
    else:
        jax.config.update("jax_platforms", "cpu")
        if _SERVE.value:
            devices.emulate_cpu_devices(config.emulate_devices)


def _serve(config: settings_lib.Config) -> None:
    _refuse("serve", "picture", "search", "axes", "cluster", "rates", "price_per_gpu_hour", "host_gbps", "disk_gbps")
    _check_hosts(config.mesh.model)
    found = serving_plan.plan(serving.served(config, _FORMAT.value), targets.get(_TARGET.value))
    foretold, why = _foretold(config, found)
    found = dataclasses.replace(found, foretold=foretold, why=why)
    _show(serving_plan.as_json(found), serving_plan.text(found))


def _check_hosts(ways: int) -> None:
    """Raises a UserError if --topology, or without it one host, has other GPUs than those that share a served model's weights."""
    topology, is_gpu = _TOPOLOGY.value, targets.get(_TARGET.value).kind == "gpu"
    if not topology and ways > GPUS_OF_A_HOST and is_gpu:
        of_a_host = max(count for count in range(1, GPUS_OF_A_HOST + 1) if ways % count == 0)
        raise UserError(
            f"mesh.model: is {ways}, and a host has {GPUS_OF_A_HOST} GPUs unless you say otherwise; "
            f"say hosts x GPUs, such as --topology={ways // of_a_host}x{of_a_host}"
        )
    if topology and not is_gpu:
        raise UserError("--topology: --serve uses it for GPUs alone; omit it")
    if topology and math.prod(targets.hosts_of(_TARGET.value, topology)) != ways:
        raise UserError(
            f"--topology: is {topology}, and --serve plans for mesh.model={ways} GPUs; give hosts x GPUs of that product"
        )


def _foretold(config: settings_lib.Config, bound: serving_plan.ServingPlan) -> tuple[serving_plan.Foretold | None, str]:
    """Returns what the clock says of an engine, or why it says nothing.

    Raises:
      UserError: --slots or --prompt is given, and cannot take effect.
    """
    target, asked = bound.target, [name for name in ("slots", "prompt") if flags.FLAGS[name].present]
    try:
        if target.kind != "gpu" or rates_lib.of(target.name) is None:
            raise UserError(f"the clock has no rates of {target.name}, as it has with --target h200")
        if config.seq_len < 2:
            raise UserError(f"a text of seq_len={config.seq_len} tokens has no room for a prompt and a new token")
        devices = targets.devices(_TARGET.value, _TOPOLOGY.value or f"1x{config.mesh.model}")
    except UserError as error:
        if asked:
            raise UserError(f"--{asked[0]}: no time is foretold: {error}; omit --{' and --'.join(asked)}") from error
        return None, str(error)
    most = bound.largest or serving_plan.MOST
    slots = sorted(set(_SLOTS.value or (1, min(8, most))))
    if slots[-1] > most:
        raise UserError(
            f"--slots: is {slots[-1]}, and {most:,} texts of seq_len={config.seq_len} fit on {target.name} at most; lower it"
        )
    prompt = _PROMPT.value or min(1024, config.seq_len - 1)
    _say(f"compiling the programs of an engine for {target.name}, which may take minutes")
    return serving.foretold(config, _FORMAT.value, target, devices, slots, prompt), ""


def _refuse(flag: str, *others: str) -> None:
    """Refuses flags that another does not use."""
    for name in others:
        if flags.FLAGS[name].present:
            raise UserError(f"--{name}: --{flag} does not use it; omit one of them")


def _say(line: str) -> None:
    """Prints a line before a wait, unless stdout is to hold JSON."""
    if not _JSON.value:
        print(line, flush=True)


def _show(answer: object, text: str) -> None:
    """Prints an answer: with --json as JSON, else as text."""
    print(json.dumps(answer, indent=2) if _JSON.value else text, flush=True)


def _cluster() -> scale.Network | None:
    """Returns the cluster of --cluster; None without it."""
    return scale.read(_CLUSTER.value) if _CLUSTER.value else None


def _rates() -> rates_lib.GpuRates | None:
    """Returns the rates of --rates; None without it."""
    return rates_lib.measured(_RATES.value, targets.get(_TARGET.value).name) if _RATES.value else None


def _axes(config: settings_lib.Config) -> None:
    _refuse("axes", "picture", "search", "price_per_gpu_hour", "host_gbps", "disk_gbps")
    ways = plans.axes_config(config, _TARGET.value, _TOPOLOGY.value, _cluster(), _rates())
    answer = [way._asdict() | {"guess": dataclasses.asdict(way.guess)} for way in ways]
    _show(answer, display.as_text(arithmetic.table(ways)))


def _plan(config: settings_lib.Config) -> None:
    if _DISK_GBPS.value is not None and "nvme" not in (config.offload.optimizer, config.offload.params):
        raise UserError(
            "--disk_gbps: nothing is offloaded to a disk; set offload.optimizer to 'nvme', or omit --disk_gbps"
        )
    if _HOST_GBPS.value is not None and (config.offload.optimizer, config.offload.params) == ("none", "none"):
        raise UserError("--host_gbps: nothing is offloaded; set offload.optimizer to 'host', or omit --host_gbps")
    if _PICTURE.value:
        picture.check(_PICTURE.value)
    cluster = _cluster()
    host_rate, disk_rate = (None if flag.value is None else flag.value * 1e9 for flag in (_HOST_GBPS, _DISK_GBPS))
    _say(f"compiling the step for {_TARGET.value}, which may take minutes")
    try:
        plan = plans.plan_config(
            config, _TARGET.value, _TOPOLOGY.value, host_rate=host_rate, disk_rate=disk_rate, rates=_rates()
        )
    except jax.errors.JaxRuntimeError as error:
        lack = step_plan.shortage(error)
        if lack is None:
            raise
        return _print_unfit(config, lack)
    if _PICTURE.value:
        try:
            picture.draw(plan, _PICTURE.value)
        except (OSError, ValueError) as error:
            raise UserError(f"--picture {_PICTURE.value}: cannot be written ({error}); name a PNG file") from error
    points = scale.curve(plan, cluster, scale.counts_of(plan)) if cluster else []
    answer, shown = json_form.as_json(plan), [plan_report.text(plan)]
    if points:
        answer["cluster"] = [dataclasses.asdict(point) for point in points]
        shown.append(display.as_text(scale.table(plan, points)))
    if _PRICE.value is not None:
        answer["cost"] = plan_report.cost(plan, _PRICE.value)
        shown.append(plan_report.cost_line(plan, _PRICE.value))
    _show(answer, "\n\n".join(shown))


def _print_unfit(config: settings_lib.Config, lack: str) -> None:
    """Prints the answer for a step that the compiler does not plan because it does not fit."""
    if _PICTURE.value:
        raise UserError(f"--picture: there is no plan to draw, because the step does not fit: {lack}")
    partition, baseline = plans.partitions(config, _TARGET.value, _TOPOLOGY.value)
    held = state_bytes.bytes_per_device(partition, accumulates=False, by_hand=True)
    answer = {"schema": json_form.SCHEMA, "target": _TARGET.value, "fits": False, "why": lack, "state_bytes": held}
    table = display.as_text(state_bytes.memory_table(partition, baseline, by_hand=True))
    _show(answer, f"{table}\n\nthe step does not fit on {_TARGET.value}: {lack}; {_LEANER}")


def _search(config: settings_lib.Config) -> None:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    _refuse("search", "price_per_gpu_hour", "host_gbps", "disk_gbps")
    if _PICTURE.value:
        raise UserError("--picture: draws one plan, and --search makes many; omit one of them")
    outcomes = plans.search_config(
        config, _TARGET.value, _TOPOLOGY.value, most_compiles=_MOST.value, say=say, cluster=_cluster(), rates=_rates()
    )
    best = [f"The first, as flags of zerojax train: {own.flags}" for own in outcomes if own.flags]
    _show(search.as_json(outcomes), "\n\n".join([display.as_text(search.table(outcomes)), *best]))


if __name__ == "__main__":
    main()
