"""A token of one text, by few kernels a layer. This module runs a plain Llama's layers by `pallas_kernels.one_token`.

Such a token takes the time in which its weights are read, and the gaps between kernels. The model's own modules take 24 kernels a layer for
one row. Each of several devices has some of the heads, of the columns of gate and up, and of the rows of o and down. What o and down add
to the residual is therefore summed over the devices, in float32 (Megatron-LM, arXiv:1909.08053).

Here a layer takes five kernels. In int8 on one Hopper GPU it takes two (`pallas_kernels.one_token_mosaic`): attention, and the four
products up to the next layer's attention. These read transposed scales, which the engine adds to the weights (`with_transposed`).
Over several devices the five kernels run: sums over devices come between the products.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cached_attention, grouped, one_token
from zerojax.models import decoding, rope
from zerojax.models.llama import config as config_lib
from zerojax.models.llama.config import LlamaConfig
from zerojax.ops import quantized, softcap
from zerojax.tree import PyTree

KERNEL = "kernel"


def takes(config: LlamaConfig, params: PyTree, ways: int) -> bool:
    """Returns whether `extend` computes the next token of one text, for weights sharded over `ways` devices. The model has to be a plain
    Llama in bf16, and the kernels have to read its weights, as they are stored, and their shards."""
    if not isinstance(config, LlamaConfig):
        return False
    c = config
    is_plain = (
        dataclasses.replace(c.heads, scale=0.0, windows=()) == config_lib.Heads()
        and dataclasses.replace(c.norms, eps=1.0) == config_lib.Norms(eps=1.0)
        and dataclasses.replace(c.mlp, activation="silu") == config_lib.MLPForm()
        and c.mlp.activation in ("silu", "swish")
        and c.scales.residual == 1
        and c.rotation.dims in (0, c.head_dim)
        and not c.rotation.is_interleaved
        and not c.has_logits_bias
        and c.mixture is None
        and c.recurrent is None
        and not (c.sizes or c.branches or c.sharing_layers or c.inputs or c.altup or c.has_layer_scale)
        and not any(c.heads.windows)
    )
    if not is_plain:
        return False
    turns = [c.rope_of(layer) for layer in range(c.num_layers)]
    if any(turn is None or (turn.scaling is not None and turn.scaling.reads_length) for turn in turns):
        return False
    has_shapes = (
        c.head_dim in (64, 128)
        and c.num_heads % c.num_kv_heads == 0
        and c.embed_dim % one_token.BLOCK == 0
        and c.mlp_dim <= one_token.MOST_GATES * ways
        and not c.num_kv_heads % ways
        and not any(size % (one_token.BLOCK * ways) for size in (c.mlp_dim, c.vocab_size) if ways > 1)
    )
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=quantized.is_quantized)[0]
    kernels = [node for path, node in nodes if jax.tree_util.keystr(path[-1:], simple=True) == KERNEL]
    others = [node for _, node in nodes if not quantized.is_quantized(node)]
    kinds = {_kind(node) for node in kernels}
    return (
        has_shapes
        and all(leaf.dtype == jnp.bfloat16 for leaf in others)
        and len(kinds) == 1
        and all(_can_be_read(node) for node in kernels)
    )


def reads_transposed(config: LlamaConfig, params: PyTree, device: Any) -> bool:
    """Returns whether `extend` runs several products in one launch if the weights are those of `with_transposed`, on one device.

    Args:
      config, params: the model and its weights, which may be abstract.
      device: what has the device's `device_kind` and `num_cores`, such as an abstract device; None: not known, and False is returned.
    """
    is_hopper = device is not None and grouped.HOPPER.search(device.device_kind) and device.num_cores
    if not is_hopper or not takes(config, params, 1) or _kind(_kernel_of(params)) != quantized.INT8:
        return False
    from pallas_kernels import one_token_mosaic  # takes long to import, and only these GPUs need it

    c = config
    return one_token_mosaic.takes(c.embed_dim, c.mlp_dim, c.num_heads, c.num_kv_heads, c.head_dim)


def with_transposed(params: PyTree) -> PyTree:
    """Returns the weights and, beside the scales [K, N / 64] of the layers' quantized matrices, the same transposed: [N / 64, K]."""

    def add(path: tuple[Any, ...], node: Any) -> Any:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if not names[0].startswith("layer_") or not quantized.is_quantized(node):
            return node
        shape = quantized.shape_of(node)
        rows = math.prod(shape[:-1]) if names[-2] == "o" else shape[0]
        return {**node, quantized.TRANSPOSED: node[quantized.SCALES].reshape(rows, -1).T}

    return jax.tree_util.tree_map_with_path(add, params, is_leaf=quantized.is_quantized)


def extend(
    config: Any,
    params: PyTree,
    caches: Any,
    step: decoding.Step,
    tokens_1: jax.Array,
    *,
    implementation: str,
    summed: Callable[[jax.Array], jax.Array] | None = None,
    number: Any = 0,
    processors: int = 0,
) -> tuple[jax.Array, Any]:
    """Returns the logits after one more token, float32[1, V], and every layer's keys and values; see `Family.extend`.

    Args:
      config, params, caches, step, tokens_1: see `Family.extend`; one row. Each of several devices gives its shards of weights and caches,
        and gets those of the logits and caches.
      implementation: of the kernels: "pallas", "interpret" or "jnp".
      summed: f(array) -> its sum over the devices that share the weights; None: one device.
      number: of this device among them.
      processors: the number of the device's processors (SMs); only the weights of `with_transposed` need it.
    """
    c = config
    run: dict[str, Any] = {"implementation": implementation}
    x_D = _embedded(params["embed"]["embedding"], tokens_1[0], summed, number)
    if c.scales.embed != 1:
        x_D = x_D * jnp.asarray(c.scales.embed, x_D.dtype)
    turn = _turn(c.rope_of(0), c.head_dim, step.positions_BT[0, 0])
    counts = one_token.counters()
    assert step.ends_B is not None, "a step of rows"
    scale = c.heads.scale or c.head_dim**-0.5
    if quantized.is_quantized(_kernel_of(params)) and quantized.TRANSPOSED in _kernel_of(params):
        assert summed is None, "over several devices layers are not launched so"
        attend = functools.partial(cached_attention.attend_counted, ends_B=step.ends_B, scale=scale, **run)
        at = turn, step.slot.reshape(1)
        x_D, squares, counts, after = _launched(c, params, caches, x_D, counts, at, attend, implementation, processors)
        return _scores(c, params, x_D, {"squares": squares}, counts, run), after
    beside: dict[str, Any] = {} if summed else {"squares": one_token.squares_of(x_D, 1)}
    # One function for all layers, which is traced and lowered once: to lower the kernels of each takes longer than to compile the model.
    run_layer = jax.jit(functools.partial(_layer, c, scale, summed, run))
    after = []
    for number, keys in enumerate(caches):
        place = turn, step.slot.reshape(1), step.ends_B
        x_D, beside, counts, keys = run_layer(params[f"layer_{number}"], keys, x_D, beside, counts, place)
        after.append(keys)
    return _scores(c, params, x_D, beside, counts, run), after


def _layer(
    config: LlamaConfig,
    scale: float,
    summed: Callable[[jax.Array], jax.Array] | None,
    run: Mapping[str, Any],
    layer: Mapping[str, Any],
    cache: tuple[jax.Array, jax.Array],
    x_D: jax.Array,
    beside: dict[str, Any],
    counts: jax.Array,
    at: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, dict[str, Any], jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the residual after a layer, what the next norm needs beside it (`_added`), the counters, and the layer's keys and values.

    Args:
      config, scale, summed, run: the model, the scale of scores, see `extend`, and how kernels run.
      layer, cache: its weights, and its keys and values.
      x_D, beside, counts: the residual before it, and the same as returned.
      at: the cosines and sines, the slot, and the ends of texts.
    """
    attention, mlp, (k_1SJC, v_1SJC), (turn, slot, ends_B) = layer["attention"], layer["mlp"], cache, at
    norm = functools.partial(one_token.Norm, eps=config.norms.eps)
    x_D, q, (k_SJC, v_SJC), counts = one_token.project(
        x_D,
        [weight(attention[name]) for name in ("q", "k", "v")],
        (k_1SJC[0], v_1SJC[0]),
        turn,
        slot,
        norm=norm(layer["attention_norm"]["scale"]),
        counts=counts,
        **beside,
        **run,
    )
    keys = k_SJC[None], v_SJC[None]
    y_1HC, counts = cached_attention.attend_counted(
        q.reshape(1, -1, config.head_dim), *keys, ends_B, counts, scale=scale, **run
    )
    o = weight(attention["o"], rows=q.shape[0])
    x_D, beside, counts = _added(x_D, y_1HC.reshape(-1), o, counts, summed, run)
    x_D, h_F, counts = one_token.gate(
        x_D,
        [weight(mlp["gate"]), weight(mlp["up"])],
        norm=norm(layer["mlp_norm"]["scale"]),
        counts=counts,
        **beside,
        **run,
    )
    x_D, beside, counts = _added(x_D, h_F, weight(mlp["down"]), counts, summed, run)
    return x_D, beside, counts, keys


def _launched(
    config: LlamaConfig,
    params: PyTree,
    caches: Any,
    x_D: jax.Array,
    counts: jax.Array,
    at: tuple[jax.Array, jax.Array],
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    implementation: str,
    processors: int,
) -> tuple[jax.Array, jax.Array, jax.Array, list[Any]]:
    """Returns the residual after all layers, the sums of its squares, the counters, and every layer's keys and values. For weights of
    `with_transposed`.

    Args:
      config, params, caches, implementation, processors: see `extend`.
      x_D, counts: the token's embedding, and counters.
      at: the cosines and sines, and the slot.
      attend: (queries, keys, values, counts=) -> what `cached_attention.attend_counted` does.
    """
    from pallas_kernels import one_token_mosaic

    layers = [_products(config, params[f"layer_{number}"]) for number in range(len(caches))]
    launch: Any = functools.partial(one_token_mosaic.run, processors=processors, implementation=implementation)

    places: list[Any] = [((k_1SJC[0], v_1SJC[0]), *at) for k_1SJC, v_1SJC in caches]
    row, after = launch(layers[0][:1], x_D, counts, place=places[0]), []
    # After attention a layer's other products, and the next layer's first.
    later = [one[0] for one in layers[1:]], places[1:]
    for (_, o, gate, down), project, place in itertools.zip_longest(layers, *later):
        keys = tuple(part[None] for part in row.keys)
        after.append(keys)
        y_1HC, counts = attend(row.q.reshape(1, -1, config.head_dim), *keys, counts=row.counts)
        products = [o, gate, down] if project is None else [o, gate, down, project]
        row = launch(products, row.x_D, counts, y_K=y_1HC.reshape(-1), place=place)
    x_D, squares = one_token.whole(row.x_D, delta=jnp.sum(row.sums_PD, axis=0))
    return x_D, squares, row.counts, after


def _products(config: LlamaConfig, layer: Mapping[str, Any]) -> list[Any]:
    """Returns a layer's four products in their order: queries, keys and values; o; gate and up; down."""
    from pallas_kernels.one_token_mosaic import Product

    attention, mlp = layer["attention"], layer["mlp"]
    norms = [one_token.Norm(layer[f"{name}_norm"]["scale"], config.norms.eps) for name in ("attention", "mlp")]
    scales_of_o = attention["o"][KERNEL][quantized.TRANSPOSED]
    return [
        Product("project", tuple(weight(attention[name]) for name in "qkv"), norms[0]),
        Product("add", (weight(attention["o"], rows=scales_of_o.shape[1]),)),
        Product("gate", tuple(weight(mlp[name]) for name in ("gate", "up")), norms[1]),
        Product("add", (weight(mlp["down"]),)),
    ]


def _embedded(
    table_VD: jax.Array, token: jax.Array, summed: Callable[[jax.Array], jax.Array] | None, number: Any
) -> jax.Array:
    """Returns a token's row of the embedding table, of which each device has a range of rows."""
    if summed is None:
        return table_VD[token]
    own = token - number * table_VD.shape[0]
    is_here = (own >= 0) & (own < table_VD.shape[0])
    return summed(jnp.where(is_here, table_VD[jnp.where(is_here, own, 0)], 0))


def _added(
    x_D: jax.Array,
    y_K: jax.Array,
    matrix: one_token.Weight,
    counts: jax.Array,
    summed: Callable[[jax.Array], jax.Array] | None,
    run: Mapping[str, Any],
) -> tuple[jax.Array, dict[str, Any], jax.Array]:
    """Adds W y to the residual, where each of several devices has a term of W y. Returns x, what the next norm needs beside it, and the
    counters. On one device x has W y, and beside it are "squares", the sums of squares of its parts. On several, W y is beside it, as
    "delta"."""
    if summed is None:
        x_D, squares, counts = one_token.add(x_D, y_K, matrix, counts=counts, **run)
        return x_D, {"squares": squares}, counts
    how = one_token.form_of_add(matrix)
    part_D, counts = one_token.multiply(y_K, [matrix], counts=counts, how=how, **run)
    return x_D, {"delta": summed(part_D)}, counts


def _scores(
    config: LlamaConfig,
    params: PyTree,
    x_D: jax.Array,
    beside: Mapping[str, Any],
    counts: jax.Array,
    run: Mapping[str, Any],
) -> jax.Array:
    """Returns the logits: float32[1, V]. `beside`: see `_added`."""
    c, norm = config, one_token.Norm(params["norm"]["scale"], config.norms.eps)
    head = None if c.tie_embeddings else weight(params["head"])
    if head is None or c.scales.logits != 1:
        x_D = one_token.normed(*one_token.whole(x_D, **beside), norm)
        x_D = x_D if c.scales.logits == 1 else x_D * jnp.asarray(c.scales.logits, x_D.dtype)
    if head is None:
        scores_V = jnp.dot(x_D, params["embed"]["embedding"].T, preferred_element_type=jnp.float32)
    else:
        given: dict[str, Any] = {"norm": norm, **beside} if c.scales.logits == 1 else {}
        scores_V, _ = one_token.multiply(x_D, [head], **given, counts=counts, **run)
    return softcap.softcap(scores_V, c.scales.logits_cap)[None]


def weight(module: Mapping[str, Any], rows: int = 0) -> one_token.Weight:
    """Returns the weight of a linear module as a matrix of `rows` rows; 0: as many as its first dim has."""
    stored = module[KERNEL]
    if not quantized.is_quantized(stored):
        return one_token.Weight(stored.reshape(rows or stored.shape[0], -1))
    kind = quantized.kind_of(stored)
    rows = rows or stored[kind].shape[0]
    codes, scales = (stored[name].reshape(rows, -1) for name in (kind, quantized.SCALES))
    return one_token.Weight(codes, scales, 1 / quantized.TOP[kind], stored.get(quantized.TRANSPOSED))


def _turn(rotation: rope.Rope, dims: int, position: jax.Array) -> jax.Array:
    """Returns the cosines and then the sines of a position's angles: float32[dims]."""
    theta, scaling = rotation
    angle_F = position.astype(jnp.float32) * rope.frequencies(dims, theta, scaling, None)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.concatenate([jnp.cos(angle_F), jnp.sin(angle_F)]) * factor


def _kernel_of(params: PyTree) -> Any:
    """Returns one of the layers' kernels, which are all stored alike."""
    return params["layer_0"]["attention"]["q"][KERNEL]


def _kind(node: Any) -> str:
    """Returns how a weight is stored."""
    return quantized.kind_of(node) if quantized.is_quantized(node) else node.dtype.name


def _can_be_read(node: Any) -> bool:
    """Returns whether the kernels read a weight in this form and shape."""
    is_coded = quantized.is_quantized(node)
    shape = quantized.shape_of(node) if is_coded else node.shape
    return (
        (not is_coded or quantized.kind_of(node) in quantized.TOP)
        and math.prod(shape) < 2**31
        and all(size % one_token.BLOCK == 0 for size in (math.prod(shape[:-1]), shape[-1]))
    )
