"""Checks what a token costs on a GPU that is not there. This module tests zerojax.inference.engine.programs."""

import collections
import dataclasses
import functools
import re

import compile_only
import golden_models
import jax
import jax.numpy as jnp
import pytest
import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.inference.engine import engine, programs, weights
from zerojax.models import families, family
from zerojax.models.llama.config import Heads
from zerojax.ops import quantized
from zerojax.zero import stages
from zerojax.zero.blocks import tensor_parallel

FAMILY = families.PRESETS["llama3_8b"]
CONFIG = dataclasses.replace(FAMILY.presets["llama3_8b"], num_layers=1, vocab_size=8192, attention="cudnn")
BYTES = {"bf16": 2, "f32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1, "s32": 4, "u32": 4, "pred": 1}
OVERHEAD = 1.1


def programs_of(kind, slots, ways, is_transposed=False, steps=1, config=CONFIG):
    """Returns the programs of an engine of absent GPUs, and its weights."""
    mesh = zerojax.make_mesh(model=ways, devices=compile_only.devices()[:ways])
    shapes = family.abstract_params(FAMILY.parts, config)
    rows, _ = tensor_parallel.overrides(
        FAMILY.parallel.weights, {path: leaf.shape for path, leaf in tree.flatten(shapes)}, mesh
    )

    def abstract(leaf, spec=P()):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def weight(path, leaf):
        spec = next((P(*entries) for pattern, entries in rows if re.search(pattern, path)), P())
        if kind != "none" and path.endswith("kernel"):
            inputs = 2 if path.endswith("/o/kernel") else 1  # heads and their width
            form = jax.eval_shape(functools.partial(quantized.quantize, kind=kind, inputs=inputs), leaf)
            return jax.tree.map(functools.partial(abstract, spec=spec), form)
        return abstract(leaf.update(dtype=jnp.bfloat16), spec)

    params = tree.map_with_path(weight, shapes)
    if is_transposed:
        params = weights.for_one_row(FAMILY, config, params, mesh, "pallas")
    shape, special = programs.Shape(slots, 256, 0), family.SpecialTokens()
    found = programs.Programs(
        FAMILY,
        config,
        mesh,
        shape,
        special,
        "pallas",
        (),
        has_transposed=is_transposed,
        steps=steps,
    )
    return found, params


def lowered(found, params):
    """Returns what adds the likeliest tokens, lowered."""
    # The abstract mesh tells JAX 0.11 and later the GPU of the kernels.
    with jax.sharding.use_abstract_mesh(found._mesh.abstract_mesh):
        return found.decode.lower(*found._given(params, tokens=0), is_plain=True)


@pytest.mark.parametrize(("slots", "named"), [(1, "tpu_custom_call|triton|mosaic"), (4, "stablehlo.dot_general")])
def test_a_program_of_more_layers_has_no_more_text_of_them(slots, named):
    counts = []
    for layers in (3, 5):
        text = lowered(*programs_of("none", slots, 1, config=dataclasses.replace(CONFIG, num_layers=layers))).as_text()
        counts.append(len(re.findall(named, text)))
    assert counts[0] == counts[1] > 0


@functools.cache
def compiled(kind, slots, ways, is_transposed=False, steps=1):
    """Returns the text of the program of `steps` tokens, and the bytes of the weights that a token reads on a device."""
    found, params = programs_of(kind, slots, ways, is_transposed, steps)
    read = {path: leaf for path, leaf in tree.flatten(params) if not path.startswith("embed")}
    if is_transposed:  # which are read in place of the others
        read = {
            path: leaf
            for path, leaf in read.items()
            if f"{path.rpartition('/')[0]}/transposed" not in read or not path.endswith("scales")
        }
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
    return compile_only.compile_gpu(lowered(found, params)), nbytes / ways


def bytes_read(text):
    """Returns the bytes of what the program's operations read, without the tables and caches of which they read a few rows."""
    sizes, total = {}, 0
    entry = text[text.index("\nENTRY") :]
    for name, shape, operation, rest in re.findall(r"%(\S+) = (.*?) ([\w-]+)\((.*)", entry):
        found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
        sizes[name] = 0
        for dtype, dims in found:
            count = 1
            for dim in filter(None, dims.split(",")):
                count *= int(dim)
            sizes[name] += count * BYTES.get(dtype, 4)
        if name.startswith(("params__embed", "caches")):
            sizes[name] = 0
        if operation in ("parameter", "bitcast", "tuple", "get-tuple-element", "constant"):
            if operation == "bitcast":
                sizes[name] = sizes.get(re.findall(r"%([\w.-]+)", rest)[0], 0)
            continue
        total += sum(sizes.get(operand, 0) for operand in re.findall(r"%([\w.-]+)", rest.split("), ")[0]))
    return total


@pytest.mark.parametrize(
    "kind, slots",
    [
        ("int8", 1),
        *[
            pytest.param(kind, slots, marks=pytest.mark.long)
            for kind, slots in (("none", 1), ("fp8", 1), ("nf4", 1), ("fp8_block", 1))
        ],
    ],
)
def test_a_token_reads_little_more_than_the_weights_as_they_are_stored(kind, slots):
    text, nbytes = compiled(kind, slots, 1)
    assert nbytes <= bytes_read(text) <= OVERHEAD * nbytes


@pytest.mark.parametrize("ways", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_layer_of_one_row_is_five_kernels_and_little_lies_between_them(ways):
    text, nbytes = compiled("int8" if ways == 1 else "none", 1, ways)
    entry = text[text.index("\nENTRY") :]
    calls = collections.Counter(re.findall(r'gpu\.triton".*op_name="[^"]*/(\w+)/pallas_call', entry))
    assert calls == {"one_token_product": 4 + 1, "cached_attention": 1}  # with the head
    assert entry.count(" fusion(") <= 10
    if ways > 1:  # the token's embedding, and what o and down add
        assert len(re.findall(r" all-reduce(?:-start)?\(", entry)) == 3
        gathered = re.findall(r"= \(?\w+\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", entry)
        assert all(eval(dims.replace(",", "*")) <= 2 * ways for dims in gathered), gathered  # of the likeliest tokens
        assert nbytes <= bytes_read(text) <= 2 * nbytes  # with the table, of which a token reads a row


def test_a_layer_of_one_row_in_int8_is_two_kernels_on_a_hopper_gpu():
    text, nbytes = compiled("int8", 1, 1, is_transposed=True)
    entry = text[text.index("\nENTRY") :]
    launches = re.findall(r'custom_call_target="mosaic_gpu\w*".*op_name="[^"]*/(\w+)/', entry)
    others = re.findall(r'gpu\.triton".*op_name="[^"]*/(\w+)/pallas_call', entry)
    # The projection of the first layer, and what follows attention. The head is a kernel of its own.
    assert launches == ["one_token_products"] * 2 and sorted(others) == ["cached_attention", "one_token_product"]
    assert not re.findall(r"= (?:bf16|s8)\S* copy\(", entry)  # the caches are changed in place
    assert nbytes <= bytes_read(text) <= OVERHEAD * nbytes


@pytest.mark.parametrize(
    "kind, ways, is_transposed",
    [("int8", 2, False), *[pytest.param("int8", 1, is_, marks=pytest.mark.long) for is_ in (True, False)]],
)
def test_the_tokens_of_a_group_are_steps_of_a_loop_that_copies_no_cache(kind, ways, is_transposed):
    one, _ = compiled(kind, 1, ways, is_transposed)
    several, _ = compiled(kind, 1, ways, is_transposed, steps=4)
    kernels, sums = r'custom_call_target="(?:__gpu\$xla.gpu.triton|mosaic_gpu\w*)"', r" all-reduce(?:-start)?\("
    for found in (kernels, sums):  # the loop's body is the program of one token
        assert len(re.findall(found, several)) == len(re.findall(found, one))
    assert re.findall(r'known_trip_count[^}]*"n":"(\d+)"', several) == ["4"]
    copied = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", several)
    assert all(eval(dims.replace(",", "*") or "1") <= 1 for _, dims in copied), copied


def test_the_bytes_of_a_group_are_those_of_its_loop(monkeypatch):
    """The compiler's own matmuls read weights that are in another layout for the time of the loop."""
    small = {"embed_dim": 256, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 256, "vocab_size": 256, "num_layers": 3}
    compile, options = jax.stages.Lowered.compile, dict(compile_only.FAST)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: compile(lowered, options))
    peaks = []
    for steps in (1, 4):
        found, params = programs_of(
            "none", 1, 2, steps=steps, config=dataclasses.replace(CONFIG, heads=Heads(qkv_bias=True), **small)
        )
        with compile_only.optimized(), jax.sharding.use_abstract_mesh(found._mesh.abstract_mesh):
            own, held = found.compiled(params), lowered(found, params).compile().memory_analysis()
        assert own.steps == steps and len(own.runs) == 1
        peaks.append(own.peak)
        needed = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes
        assert own.peak >= needed - held.alias_size_in_bytes
    assert peaks[1] > peaks[0]


def test_prompts_are_read_where_devices_divide_query_heads_and_not_key_heads():
    small = dataclasses.replace(CONFIG, embed_dim=256, num_heads=4, head_dim=64, mlp_dim=256, vocab_size=256)
    chosen = []
    for kv_heads, ways in ((4, 2), (1, 1), (1, 2)):
        mesh = zerojax.make_mesh(model=ways, devices=compile_only.devices()[:ways])
        config = dataclasses.replace(small, num_kv_heads=kv_heads)
        shapes = family.abstract_params(FAMILY.parts, config)
        config = engine.with_kernel(config, FAMILY, mesh, shapes, jnp.bfloat16)
        chosen.append(config.attention)
    assert chosen == ["cudnn", "cudnn", "xla"]
    params = weights.abstract(FAMILY, config, shapes, mesh, jnp.bfloat16, "none")
    shape, special = programs.Shape(1, 256, 0), family.SpecialTokens()
    made = programs.Programs(FAMILY, config, mesh, shape, special, None)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert made.compiled(params, tokens=128).peak > 0


MOVED = r"= \(?(.*?) (?:all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
SHARDED = {
    "experts": ("qwen3_30b_a3b", "none", 1),
    "parts": (
        "phi3_mini",
        "int8",
        1,
    ),  # queries, keys and values are one kernel, and its vocabulary is no multiple of 2 x 64
    "a table of one token": ("gemma3_4b", "none", 1),
    "several rows": ("llama3_8b", "none", 2),
    "parts of plain kernels": ("phi3_mini", "none", 1),
    "latents": ("moonlight_16b_a3b", "int8", 1),
    "sinks": ("gpt_oss_20b", "none", 1),
    "an encoder-decoder": ("t5_v1_1_xl", "int8", 1),
    "positions": ("bart_large", "none", 1),
}


@pytest.mark.parametrize("case", runs.cases(SHARDED, long={*SHARDED} - {"experts", "parts", "a table of one token"}))
def test_no_weight_travels_for_a_token_under_tensor_parallelism(case):
    (name, kind, slots), ways = SHARDED[case], 2
    found = families.PRESETS[name]
    full = found.presets[name]
    few = {"num_layers": 2 if name.startswith("moonlight") else 1, "decoder_layers": 1}
    few = {field: size for field, size in few.items() if getattr(full, field, 0)}
    config = dataclasses.replace(full, **few, attention="xla")
    config = config if family.mixture(config) is None else config.changed(mixture={"experts": 8})
    mesh = zerojax.make_mesh(model=ways, devices=compile_only.devices()[:ways])
    shapes = family.abstract_params(found.parts, config)
    params = weights.abstract(found, config, shapes, mesh, jnp.bfloat16, kind)
    shape, special = programs.Shape(slots, 256, 64 if found.is_encoder_decoder else 0), family.SpecialTokens()
    made = programs.Programs(found, config, mesh, shape, special, None)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.numpy_rank_promotion("allow"):
        text = made.step.lower(*made._given(params, tokens=0), is_plain=True).compile().as_text()
    moved = [sizes for results in re.findall(MOVED, text) for sizes in re.findall(r"\w+\[([\d,]*)\]", results)]
    assert "all-reduce" in text
    assert all(eval(sizes.replace(",", "*") or "1") < 2**19 for sizes in moved), moved  # kernels and tables have more


@pytest.mark.parametrize("axes", [{"model": 2}, {"data": 2}], ids=["tensor parallel", "gathered weights"])
def test_devices_that_share_caches_read_them_by_kernels(axes):
    """No part of a cache travels, and each device attends by one kernel a layer."""
    mesh = zerojax.make_mesh(devices=compile_only.devices()[:2], **{"data": 1} | axes)
    config = dataclasses.replace(CONFIG, attention="xla")
    shapes = family.abstract_params(FAMILY.parts, config)
    if "model" in axes:
        params, how = weights.abstract(FAMILY, config, shapes, mesh, jnp.bfloat16, "none"), {}
    else:
        partition = stages.partition_state({"params": shapes}, mesh=mesh, stage=3)
        params = jax.tree.map(
            lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
            shapes,
            partition.shardings["params"],
        )
        how = {"rows_axes": mesh_lib.SUMMED, "placements": partition.placements, "dtype": jnp.bfloat16}
    shape, special = programs.Shape(64, 1024, 0), family.SpecialTokens()
    made = programs.Programs(FAMILY, config, mesh, shape, special, None, **how)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.numpy_rank_promotion("allow"):
        text = made.step.lower(*made._given(params, tokens=0), is_plain=True).compile().as_text()
    assert len(re.findall(r"custom-call.*(?:triton|cached_attention)", text)) == CONFIG.num_layers
    moved = [sizes for results in re.findall(MOVED, text) for sizes in re.findall(r"\w+\[([\d,]*)\]", results)]
    assert not [sizes for sizes in moved if "1024" in sizes.split(",")], moved


def test_experts_in_mxfp4_are_multiplied_as_they_are_stored():
    lora = zerojax.Lora(r=2, target_modules=("q_proj",), quantize="mxfp4")
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "gptoss", stage=0, min_size=64, dtype="bf16", lora=lora)
    mesh = zerojax.make_mesh(devices=compile_only.devices()[:1])

    def abstract(leaf):
        dtype = jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, P()))

    shape, special = programs.Shape(4, 64, 0), family.SpecialTokens()
    found = programs.Programs(loaded.family, loaded.config, mesh, shape, special, "pallas", ())
    text = compile_only.compile_gpu(lowered(found, jax.tree.map(abstract, loaded.params)))
    kernels = re.findall(r"custom-call\([^\n]*grouped_rows_mxfp4", text)
    assert len(kernels) == 2 * loaded.config.num_layers
    assert re.search(r"u8\[4,320,32\]", text) and not re.search(r"bf16\[4,(64,320|320,64|64,160)", text)
