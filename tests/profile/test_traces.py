import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from zerojax.profile import traces

STATS = ("hlo_op", "hlo_module", "device_ordinal")


def trace(planes):
    """Returns a trace of {plane: {line: [(name, start ns, end ns, {stat: value}), ...]}}."""
    return ProfileData.from_text_proto("".join(_plane(name, lines) for name, lines in planes.items()))


def _plane(plane, lines):
    names = sorted({event[0] for events in lines.values() for event in events})
    text = f'planes {{ name: "{plane}"\n'
    for number, name in enumerate(names, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
    for number, name in enumerate(STATS, 1):
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}" timestamp_ns: 1000\n'
        for name, start, end, stats in events:
            text += f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {1000 * (start - 1000)} "
            text += f"duration_ps: {1000 * (end - start)} "
            for stat, value in stats.items():
                form = f"int64_value: {value}" if isinstance(value, int) else f'str_value: "{value}"'
                text += f"stats {{ metadata_id: {STATS.index(stat) + 1} {form} }} "
            text += "}\n"
        text += "}\n"
    return text + "}\n"


def test_a_gpus_kernels_are_those_of_its_streams():
    named = {"hlo_op": "fusion.1", "hlo_module": "jit_step"}
    found = traces.kernels(
        trace(
            {
                "/host:CPU": {"python": [("call", 1000, 9000, {"hlo_op": "fusion.1"})]},
                "/device:GPU:0": {
                    "Stream #13(Compute)": [("loop_fusion", 2000, 2500, named), ("nccl", 2100, 2900, {})],
                    "XLA Ops": [("fusion.1", 2000, 2500, named)],
                    "Steps": [("1", 2000, 9000, {})],
                },
                "/device:GPU:1": {"Stream #14(MemcpyD2D)": [("MemcpyD2D", 3000, 3001, {})]},
            }
        )
    )
    assert list(found) == [
        traces.Kernel("/device:GPU:0", "loop_fusion", "fusion.1", "jit_step", 2000, 2500),
        traces.Kernel("/device:GPU:0", "nccl", "", "", 2100, 2900),
        traces.Kernel("/device:GPU:1", "MemcpyD2D", "", "", 3000, 3001),
    ]


def test_without_a_devices_plane_kernels_are_the_events_that_name_an_instruction():
    events = [("dot.1", 2000, 2500, {"hlo_op": "dot.1", "device_ordinal": 3}), ("Rendezvous", 2000, 2100, {})]
    assert list(traces.kernels(trace({"/host:CPU": {"thread": events}}))) == [
        traces.Kernel("cpu:3", "dot.1", "dot.1", "", 2000, 2500)
    ]


def test_a_real_trace_has_the_instructions_of_the_program_on_the_device_that_ran_it(tmp_path):
    assert traces.newest(tmp_path) is None
    x = jax.device_put(jnp.ones((64, 64)), jax.devices()[3])
    step = jax.jit(lambda x: jnp.sin(x @ x).sum()).lower(x).compile()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(step(x))
    found = [kernel for kernel in traces.read(traces.newest(tmp_path)) if kernel.module.startswith("jit_")]
    assert found and {kernel.device for kernel in found} == {"cpu:3"}
    assert all(f"%{kernel.instruction} = " in step.as_text() and kernel.start <= kernel.end for kernel in found)
