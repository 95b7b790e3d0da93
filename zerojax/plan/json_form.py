"""Writes a plan as JSON. This module names its fields. docs/plan.md describes them.

`SCHEMA` is their version. It increases by one when a field changes its meaning or is removed.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from zerojax.plan import matmuls, pipelines, step_plan, targets

SCHEMA = 2


def as_json(plan: step_plan.Plan) -> dict[str, Any]:
    """Returns the plan as JSON values."""
    bound = plan.bound
    return {
        "schema": SCHEMA,
        "target": plan.target.name,
        "devices": plan.devices,
        "mesh": dict(plan.mesh_shape),
        "stage": plan.stage,
        "tokens_per_step": plan.tokens,
        "peak_bytes": plan.most,
        "device_bytes": int(plan.target.memory.value) if plan.target.memory else None,
        "usable_bytes": plan.usable,
        "fits": plan.fits,
        "memory": _rows(plan.memory, "role theory_bytes=theory sharding_bytes=arithmetic assigned_bytes=assigned"),
        "largest_leaves": _rows(plan.largest_leaves, "path role bytes=nbytes space donated=is_donated"),
        "largest_temporaries": _rows(plan.largest_temporaries, "value=name type role bytes=nbytes op_name source"),
        "collectives": _rows(
            plan.ledger.rows,
            "role kind dtype axes runs=times bytes=nbytes elements weights asynchronous=is_async overlaps source",
        ),
        "collective_totals": plan.ledger.totals(),
        "collective_theory_params": dict(plan.theory),
        "matmuls": matmuls.counts(plan.ledger.matmuls),
        "departures": _rows(plan.departures, "role expected found why"),
        "findings": _rows(plan.findings, "rule where amount remedy bytes=nbytes seconds"),
        "bound": None
        if bound is None
        else {
            "seconds": dict(bound.seconds),
            "binds": bound.binds,
            "step_seconds": bound.step_seconds,
            "tokens_per_second": bound.most_tokens_per_second(plan.tokens),
        },
        "foretold": None
        if plan.foretold is None
        else {
            "seconds": plan.foretold.seconds,
            "tokens_per_second": plan.tokens / plan.foretold.seconds if plan.tokens else None,
            "mfu": plan.mfu(plan.seconds),
            "parts": dict(plan.foretold.parts),
            "beside": dict(plan.foretold.busy),
            "errors": plan.rates.errors if plan.rates else None,
        },
        "beside_bytes": plan.beside,
        "rollouts": None if plan.rollouts is None else plan.rollouts._asdict(),
        "pipeline": None if plan.pipeline is None else _pipeline(plan.pipeline),
        "experts": None if plan.exchange is None else dataclasses.asdict(plan.exchange),
        "stream": None if plan.stream is None else _stream(plan),
        "compile_seconds": plan.compile_seconds,
        "start": None if plan.start is None else plan.start._asdict(),
    }


def _pipeline(found: pipelines.Pipelined) -> dict[str, Any]:
    order = found.order
    return {
        "schedule": order.name,
        "stages": order.stages,
        "micro_batches": order.micros,
        "groups": [
            {"blocks": calls, "at_once": order.alive(group), **dataclasses.asdict(held)}
            for group, (calls, held) in enumerate(zip(found.calls, found.memory))
        ],
        "largest_group": found.largest,
        "bubble_theory": found.theory,
        "bubble": found.line.bubble,
        "is_foretold": found.is_foretold,
    }


def _stream(plan: step_plan.Plan) -> dict[str, Any]:
    stream, target, found = plan.stream, plan.target, plan.expected
    assert stream is not None
    link = target.host_duplex or target.host_link
    return {
        "host_bytes": stream.nbytes,
        "is_on_disk": stream.is_on_disk,
        "disk_bytes": stream.disk,
        "disk_bytes_read": stream.read,
        "groups": stream.groups,
        "fetched_param_bytes": stream.by_block.fetched if stream.by_block else 0,
        "device_bytes_at_once": stream.at_once,
        "peak_bytes": stream.peak,
        "bytes_per_second": None if link is None else link.value,
        "disk_bytes_per_second": target.disk.value if stream.disk else None,
        "disk_rate_is_assumed": target.disk.source == targets.ASSUMED if stream.disk else None,
        "expected_seconds": None if found is None else found.seconds,
        "link_seconds": None if found is None else found.link,
        "disk_seconds": None if found is None else found.disk,
        "exposed_seconds": None if found is None else found.exposed,
        "phases": [] if found is None else [dataclasses.asdict(p) | {"exposed": p.exposed} for p in found.phases],
    }


def _rows(values: Iterable[Any], names: str) -> list[dict[str, Any]]:
    """Returns the fields of some values, each under its own name, or as NAME=FIELD."""
    fields = [(name, field or name) for name, _, field in (word.partition("=") for word in names.split())]
    return [{name: getattr(value, field) for name, field in fields} for value in values]
