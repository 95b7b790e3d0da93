"""Shows a plan as text. This module formats its tables and the lines below them."""

from typing import Any

from rich.table import Table

from zerojax import display
from zerojax.clock import rates as rates_lib
from zerojax.errors import UserError
from zerojax.hlo import buffers
from zerojax.plan import matmuls, pipelines, step_plan, targets


def text(plan: step_plan.Plan) -> str:
    """Returns the complete plan as plain text."""
    tables = [
        memory_table(plan),
        *([groups_table(plan)] if plan.pipeline else []),
        leaves_table(plan),
        temporaries_table(plan),
        ledger_table(plan),
        times_table(plan),
    ]
    tables += [clock_table(plan)] if plan.foretold else []
    shown = [display.as_text(table) for table in tables if table.row_count]
    return "\n\n".join([*shown, "\n".join(_lines(plan))])


def verdict(plan: step_plan.Plan) -> str:
    """Returns one line with the peak and whether it fits."""
    peak = f"peak {display.human(plan.most)} on each device"
    if plan.most > plan.in_step:
        peak += f" while answers are drawn, {display.human(plan.in_step)} in a step"
    if plan.usable is None or plan.target.memory is None:
        return f"{peak}; the memory of {plan.target.name} is unknown"
    word = "fits" if plan.fits else "does NOT fit"
    room = f"the {display.human(plan.usable)} that XLA may use"
    if not plan.target.is_pool:
        room += f" of {plan.target.name}'s {display.human(plan.target.memory.value)}"
    return f"{peak}: {word} in {room}"


def memory_table(plan: step_plan.Plan) -> Table:
    """Returns a table of bytes by role: by ZeRO's theory, by the shardings, and by XLA's buffer assignment."""
    stage = "custom step" if plan.stage is None else f"stage {plan.stage}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh_shape.items())
    title = f"Memory on each device: {stage}, {plan.devices} x {plan.target.name}, {mesh}"
    table = display.table(title, ("role", "ZeRO theory", "shardings", "XLA assigned"))
    for row in plan.memory:
        table.add_row(row.role, *(_bytes(count) for count in (row.theory, row.arithmetic, row.assigned)))
    table.add_section()
    table.add_row("peak", "", "", display.human(plan.peak))
    if plan.buffers.source == buffers.ANALYSIS:
        table.caption = "this backend reports totals only: temporaries have no roles"
    if plan.buffers.source == buffers.PROGRAMS:
        what = "stage of a pipeline" if plan.pipeline else "block"
        table.caption = f"the step is a program for each {what}: temporaries have no roles"
    return table


def groups_table(plan: step_plan.Plan) -> Table:
    """Returns a table of the groups of a pipeline: their layers, and the memory and the bytes sent of each of their devices."""
    found = plan.pipeline
    assert found is not None
    order = found.order
    title = f"Groups of the pipeline: {order.name}, {order.stages} stages, {order.micros} micro-batches"
    elsewhere = ["elsewhere"] if any(held.host for held in found.memory) else []  # state in host memory or on a disk
    kept = ["kept on host"] if any(held.kept_on_host for held in found.memory) else []  # activations
    columns = ("group", "blocks", "state", "gradients", "between passes", *kept, "at once", "sends", "peak", *elsewhere)
    table = display.table(title, columns)
    for group, (calls, held) in enumerate(zip(found.calls, found.memory)):
        sizes = (held.state, held.sums, held.values)
        shown = (
            *map(display.human, sizes),
            *(display.human(held.kept_on_host) for _ in kept),
            str(order.alive(group)),
            display.human(held.sent),
            display.human(held.peak),
            *(display.human(held.host) for _ in elsewhere),
        )
        table.add_row(str(group), str(calls), *shown)
    table.caption = (
        f"the other tables are of group {found.largest}; 'at once': micro-batches that wait for their backward pass"
        + ("; what is 'elsewhere' arrives and leaves after the last of them" if elsewhere else "")
    )
    return table


def leaves_table(plan: step_plan.Plan) -> Table:
    """Returns a table of the largest leaves of the state."""
    words = ("leaf", "role", "donated")
    table = display.table(f"The {step_plan.LARGEST} largest leaves", ("leaf", "role", "bytes", "donated"), words)
    for leaf in plan.largest_leaves:
        table.add_row(leaf.path, leaf.role, display.human(leaf.nbytes), "yes" if leaf.is_donated else "no")
    return table


def temporaries_table(plan: step_plan.Plan) -> Table:
    """Returns a table of the largest temporaries at the peak, with their source lines."""
    title, words = f"The {step_plan.LARGEST} largest temporaries at the peak", ("value", "role", "from")
    table = display.table(title, ("value", "role", "bytes", "from"), words, overflow="fold")
    for value in plan.largest_temporaries:
        table.add_row(
            f"{value.name} {value.type}", value.role, display.human(value.nbytes), value.source or value.op_name
        )
    return table


def ledger_table(plan: step_plan.Plan) -> Table:
    """Returns a table of the bytes that a device receives in a step, by role, kind and dtype."""
    words = ("role", "kind", "dtype", "axes")
    columns = (*words, "runs", "bytes", "params", "overlapped")
    table = display.table("Collectives in a step: bytes received by each device", columns, words)
    groups: dict[tuple[str, str, str, str], list[Any]] = {}
    for row in plan.ledger.rows:
        groups.setdefault((row.role, row.kind, row.dtype, ",".join(row.axes)), []).append(row)
    for key, rows in groups.items():
        nbytes = sum(row.nbytes for row in rows)
        overlapped = sum(row.nbytes for row in rows if row.is_async and row.overlaps)
        params = sum(row.elements for row in rows) / max(1, plan.ledger.params)
        share = f"{overlapped / nbytes:.0%}" if nbytes else "-"
        table.add_row(*key, str(sum(r.times for r in rows)), display.human(nbytes), f"{params:.3f}", share)
    table.add_section()
    nbytes, params = (sum(total[name] for total in plan.ledger.totals().values()) for name in ("bytes", "params"))
    table.add_row("total", "", "", "", "", display.human(nbytes), f"{params:.3f}", "")
    table.caption = f"theory: {sum(plan.theory.values()):.3f} parameters"
    return table


def _lines(plan: step_plan.Plan) -> list[str]:
    lines = [verdict(plan)]
    if plan.pipeline is not None:
        lines.append(_bubble(plan.pipeline))
    if plan.foretold is not None:
        lines.append(_foretold(plan))
    if plan.start is not None:
        lines.append(
            f"with an empty compilation cache a run should compile in some {plan.start.compile:.0f} s, and end its first step some "
            f"{plan.start.first_step:.0f} s after its start; machines differ by half of that"
        )
    if plan.bound is not None:
        terms = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in plan.bound.seconds.items())
        line = f"a step takes at least {plan.bound.step_seconds * 1e3:.1f} ms, bound by {plan.bound.binds} ({terms})"
        if plan.tokens:
            line += (
                f": no more than {plan.bound.most_tokens_per_second(plan.tokens) / plan.devices:,.0f} tokens/s/device"
            )
        lines.append(line)
    counted = matmuls.counts(plan.ledger.matmuls)
    if any(matmul.wants_fp8 for matmul in plan.ledger.matmuls):
        lines.append("matmuls: " + ", ".join(f"{count} in {kind}" for kind, count in counted.items()))
    if plan.exchange is not None:
        lines.append(_exchange(plan.exchange))
    if plan.beside:
        lines.append(
            f"models that are read and not trained take {display.human(plan.beside)} on each device, beside the table's peak"
        )
    if plan.rollouts is not None:
        lines.append(_rollouts(plan.rollouts))
    if plan.stream is not None and (plan.stream.nbytes or (plan.stream.by_block and plan.stream.by_block.fetched)):
        lines += _stream_lines(plan)
    lines += [
        f"departure from theory: {d.role}: {d.found:.3f} parameters instead of {d.expected:.3f}: {d.why} "
        f"({', '.join(d.weights[:2])}{f' and {len(d.weights) - 2} more' if len(d.weights) > 2 else ''})"
        for d in plan.departures
    ]
    lines += [f"FINDING {f.rule}: {f.where}: {f.amount}{_saved(f.seconds)}. {f.remedy}" for f in plan.findings]
    if not plan.findings:
        lines.append("no findings")
    lines.append(f"compiled in {plan.compile_seconds:.0f} s")
    return lines


def _saved(seconds: float) -> str:
    """Returns by how much shorter a step would be without a finding."""
    return f"; without it a step would be up to {seconds * 1e3:,.1f} ms shorter" if seconds >= 5e-5 else ""


def _exchange(found: step_plan.Exchange) -> str:
    """Returns what tokens that travel to their experts bring, beside theory."""
    share = f", {found.beside / found.received:.0%} of it beside matmuls or attention" if found.received else ""
    more = (
        ""
        if found.further is None
        else f"; a further exchange of all mixtures takes {found.further * 1e3:,.1f} ms more"
    )
    return (
        f"experts: each device receives {display.human(found.received)} of tokens in a step{share}; theory "
        f"{display.human(found.theory)}, with room for {found.load:g} times a balanced router's rows{more}"
    )


def _rollouts(found: step_plan.RolloutDevices) -> str:
    """Returns what the devices hold that draw answers, or why they hold nothing."""
    if found.refused:
        return f"rollouts: {found.refused}"
    which = {0: "each device", 1: "the device that draws answers"}.get(
        found.devices, f"each of the {found.devices} devices that draw answers"
    )
    held = {"the state": found.state, "copies of the weights": found.weights}
    held[f"keys and values of {found.answers} answers"] = found.caches
    stays = "" if found.devices else ", which stay during the step and come on top of the table's peak"
    return (
        f"rollouts: {which} holds {display.human(found.nbytes)} {'' if found.devices else 'while answers are drawn, '}beside what "
        f"its programs compute: {', '.join(f'{name} {display.human(nbytes)}' for name, nbytes in held.items() if nbytes)}{stays}"
    )


def _bubble(found: pipelines.Pipelined) -> str:
    """Returns the share of a step in which devices of a pipeline wait."""
    by = "the foretold times of its stages" if found.is_foretold else "the operations of its stages"
    return f"bubble of {found.order.name}: {found.theory:.1%} if all stages take equally long, {found.line.bubble:.1%} by {by}"


def _stream_lines(plan: step_plan.Plan) -> list[str]:
    """Returns what a step with offloaded state moves, and how much of it hides beside its programs."""
    stream, target, found = plan.stream, plan.target, plan.expected
    assert stream is not None
    where = "are read from a disk and written back" if stream.is_on_disk else "arrive and leave"
    at_once = f"at most {display.human(stream.at_once)} on the device at once"
    line = f"offload: {display.human(stream.nbytes)} of optimizer state {where} in {stream.groups} groups, {at_once}"
    if stream.by_block is not None and stream.by_block.fetched:
        line += f", and {display.human(stream.by_block.fetched)} of params arrive block by block"
        line += " from a disk" if stream.params_on_disk else ""
    if found is None or target.host_link is None:
        return [f"{line}; the rate to host memory is unknown"]
    both = target.host_duplex or target.host_link
    lines = [f"{line}; {both.value / 1e9:.3g} GB/s each way at once ({both.source})"]
    if stream.disk:
        line = f"disk: a step reads {display.human(stream.read)} and writes {display.human(stream.disk)}"
        line += f" at {target.disk.value / 1e9:.3g} GB/s"
        if target.disk.source == targets.ASSUMED:
            line += ", which is ASSUMED: zerojax disk measures yours (both GB/s), for --disk_gbps"
        lines.append(line)
    rate = f", {plan.tokens / found.seconds / plan.devices:,.0f} tokens/s/device" if plan.tokens else ""
    copies = found.link + found.disk
    hidden = f"of {_ms(copies)} of copies {_ms(copies - found.exposed)} hide and {_ms(found.exposed)} are exposed"
    return [*lines, f"a step should take about {_ms(found.seconds)}{rate} (an estimate, see docs/plan.md): {hidden}"]


def clock_table(plan: step_plan.Plan) -> Table:
    """Returns a table of where the foretold time of a step goes."""
    found = plan.foretold
    assert found is not None
    table = display.table("Foretold time of a step: where it goes", ("part", "ms", "share"))
    for part, seconds in found.parts.items():
        if seconds:
            table.add_row(part, f"{seconds * 1e3:,.1f}", f"{seconds / found.seconds:.1%}")
    table.add_section()
    table.add_row("total", f"{found.seconds * 1e3:,.1f}", "")
    beside = (f"{kind} {seconds * 1e3:,.1f} ms" for kind, seconds in found.busy.items())
    table.caption = f"run beside kernels, but for what is exposed: {', '.join(beside)}" if found.busy else None
    return table


def _foretold(plan: step_plan.Plan) -> str:
    """Returns the foretold time of a step, with the errors that the clock had where steps were measured."""
    assert plan.foretold is not None and plan.rates is not None
    seconds, errors = plan.foretold.seconds, plan.rates.errors
    line = f"a step should take {seconds * 1e3:,.1f} ms"
    if plan.tokens:
        line += f", {plan.tokens / seconds / plan.devices:,.0f} tokens/s/device"
    if (mfu := plan.mfu(plan.seconds)) is not None:
        line += f", {mfu:.1%} MFU"
    if any(source.startswith(rates_lib.MEASURED) for source in plan.rates.sources.values()):
        return f"{line}, at the rates of --rates; no step was compared with them"
    if plan.pipeline is not None:
        return f"{line}; eleven runs of pipelines were measured, and were foretold from 2.3% too short to 1.9% too long"
    if errors is None:
        return f"{line}; no step was measured on {plan.target.name}: its rates are an H200's, scaled by data sheets"
    held = f"{errors['settings']:.0f} measured settings that no rate is fitted to"
    return f"{line} (within {errors['worst']:.1%} of the measured step, half of them within {errors['median']:.1%}, in {held})"


def times_table(plan: step_plan.Plan) -> Table:
    """Returns a table of the estimated time of a step with offloaded state, by phase."""
    found = plan.expected.phases if plan.expected else ()
    has_disk = any(phase.disk for phase in found)
    columns = ("phase", "runs", "device", "host link", *(["disk"] if has_disk else []), "takes", "exposed")
    title = "Estimated time of a step: copies run beside the device's programs of their phase"
    table = display.table(title, columns)
    for phase in found:
        disk = [_ms(phase.disk)] if has_disk else []
        table.add_row(
            phase.name,
            str(phase.runs),
            _ms(phase.device),
            _ms(phase.link),
            *disk,
            _ms(phase.seconds),
            _ms(phase.exposed),
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _bytes(count: int | None) -> str:
    return "" if count is None else display.human(count)


def cost(plan: step_plan.Plan, price: float) -> dict[str, float]:
    """Returns what a step ("step") and 1e9 tokens ("billion_tokens") cost at a price of a GPU and hour, in its unit.

    Raises:
      UserError: the time of a step, or the number of its tokens, is unknown.
    """
    if plan.seconds is None or not plan.tokens:
        raise UserError(
            f"--price_per_gpu_hour: the time of a step is unknown on {plan.target.name}; choose a target with rates, or omit it"
        )
    step = price * plan.devices * plan.seconds / 3600
    return {"step": step, "billion_tokens": step * 1e9 / plan.tokens}


def cost_line(plan: step_plan.Plan, price: float) -> str:
    """Returns `cost` as a line."""
    found = cost(plan, price)
    return f"At {price:g} a GPU and hour: {found['step']:,.4f} a step, {found['billion_tokens']:,.2f} for 1e9 tokens"
