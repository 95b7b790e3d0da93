"""Checks attention over sharded tokens against attention over whole sequences. This module tests zerojax.ops.context_attention."""

import functools
import itertools
import random
import re

import context_costs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.ops import context_attention, token_order

ROUNDING = 1e-5  # float32 sums of some terms in another order
BATCH, CHUNK, HEAD_DIM = 2, 3, 4  # tokens of the smallest chunk


@pytest.fixture(autouse=True)
def short_halos(monkeypatch):
    """Lets a halo be shorter than a chunk of these few tokens."""
    monkeypatch.setattr(context_attention, "_TILE", 2)


def whole(q, k, v, bias, segments, mask, *, is_causal, window):
    """Attention of whole sequences by JAX; a causal query that sees no key has 0."""
    length = q.shape[1]
    distance = np.arange(length)[:, None] - np.arange(k.shape[1])
    seen = jnp.asarray(distance >= 0 if is_causal else distance == distance) & (distance < (window or length))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    seen = jnp.broadcast_to(seen if mask is None else seen & mask[:, None], (BATCH, length, k.shape[1]))
    out = jax.nn.dot_product_attention(q, k, v, bias, seen[:, None])
    return jnp.where(jnp.any(seen, -1)[:, :, None, None], out, 0)


def value_and_grads(function, q, k, v, bias, *masks):
    def total(q, k, v, bias):
        out = function(q, k, v, bias, *masks)
        return jnp.sum(jnp.sin(3 * out)), out

    (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)
    return out, grads


def moved(x, places, dim=1):
    return None if x is None else np.take(np.asarray(x), places, axis=dim)


def check(way, order, ways, *, heads, kv_heads, is_causal, window=0, packed=False, masked=False, biased=False, model=1):
    """Compares values and gradients on `ways` x `model` devices with whole sequences on one."""
    length = CHUNK * 2 * ways
    draw = np.random.default_rng(0)
    shapes = [(BATCH, length, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    bias = draw.normal(size=(1, heads, length, length)).astype(np.float32) if biased else None
    segments = np.sort(draw.integers(0, 3, (BATCH, length), np.int32), axis=1) if packed else None
    mask = np.array(draw.random((BATCH, length)) < 0.7)
    mask[
        :, 0 if not packed else slice(None)
    ] |= not is_causal  # what a query without a key has is told only of causal ones
    mask = mask if masked else None
    on_one = functools.partial(value_and_grads, functools.partial(whole, is_causal=is_causal, window=window))
    expected = jax.jit(on_one)(q, k, v, bias, segments, mask)
    mesh = mesh_lib.Mesh(np.asarray(jax.devices()[: ways * model]).reshape(ways, model), ("context", "model"))
    places = token_order.permutation(length, ways, order)
    tokens, scores = P(None, "context"), P(None, None, "context")
    chosen = context_attention.Way("gather" if way == "halo" else way, order, "", halo=way == "halo")

    def attend(q, k, v, bias, segments, mask):
        return context_attention.attend(
            q,
            k,
            v,
            "xla",
            axis="context",
            way=chosen,
            order=order,
            is_causal=is_causal,
            window=window,
            segments_BT=segments,
            mask_BT=mask,
            bias=bias,
        )

    specs = (tokens, tokens, tokens, scores, tokens, tokens)
    run = jax.shard_map(
        lambda *args: value_and_grads(attend, *args),
        mesh=mesh,
        in_specs=specs,
        out_specs=(tokens, specs[:4]),
        axis_names={"context"},
        check_vma=False,
    )
    fed = [moved(x, places, 2 if x is bias else 1) for x in (q, k, v, bias, segments, mask)]
    out, grads = jax.jit(run)(*fed)
    found = (
        moved(out, np.argsort(places)),
        tuple(moved(grad, np.argsort(places), dim) for grad, dim in zip(grads, (1, 1, 1, 2))),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, ROUNDING, ROUNDING), found, expected)


def products(count, seed):
    """Returns cases that a random choice of every value makes."""
    draw, cases = random.Random(seed), []
    for way, order in itertools.islice(
        itertools.cycle(itertools.product((*context_attention.WAYS, "halo"), token_order.CHUNKS)), count
    ):
        ways = draw.choice([2, 2, 4, 4, 8])
        group = draw.choice([1, 2])
        kv_heads = draw.choice([1, 2, 3, ways])
        heads = group * kv_heads * (ways if way == "ulysses" and group * kv_heads % ways else 1)
        is_causal = draw.random() < 0.7 or way == "halo"
        chunk = CHUNK * 2 // token_order.CHUNKS[order]
        cases.append(
            {
                "way": way,
                "order": order,
                "ways": ways,
                "heads": heads,
                "kv_heads": kv_heads,
                "is_causal": is_causal,
                "window": draw.randint(2, chunk + 1)
                if way == "halo"
                else draw.choice([0, 1, 2, 7])
                if is_causal
                else 0,
                "packed": draw.random() < 0.4,
                "masked": draw.random() < 0.4,
                "biased": draw.random() < 0.3 and way not in ("ring", "halo"),
                "model": draw.choice([1, 2]) if ways < 8 and (way != "ulysses" or heads % (2 * ways) == 0) else 1,
            }
        )
    return cases


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if n >= 6 else ()) for n, case in enumerate(products(12, seed=7595))],
    ids=lambda case: f"{case['way']}-{case['order']}-{case['ways']}",
)
def test_values_and_gradients_are_those_of_whole_sequences(case):
    check(**case)


@pytest.mark.long
@pytest.mark.parametrize("case", products(160, seed=1), ids=lambda case: "-".join(map(str, case.values())))
def test_values_and_gradients_of_many_products(case):
    check(**case)


@pytest.mark.parametrize("way", context_attention.WAYS)
def test_keys_may_be_of_another_sequence_and_longer(way):
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(BATCH, length, 2, HEAD_DIM)).astype(np.float32) for length in (4, 12, 12))
    mask = np.arange(12) < np.array([[12], [7]])
    mesh = mesh_lib.Mesh(np.asarray(jax.devices()[:2]), ("context",))

    def attend(q, k, v, mask):
        chosen = context_attention.Way(way, "contiguous", "")
        return context_attention.attend(
            q, k, v, "xla", axis="context", way=chosen, order="contiguous", is_causal=False, mask_BT=mask
        )

    tokens = P(None, "context")
    run = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    expected = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])
    np.testing.assert_allclose(jax.jit(run)(q, k, v, mask), expected, ROUNDING, ROUNDING)


def test_the_products_have_cases_of_every_kind():
    cases = products(12, seed=7595)
    assert {case["ways"] for case in cases} == {2, 4, 8} and {case["model"] for case in cases} == {1, 2}
    for key in ("window", "packed", "masked", "biased"):
        assert {bool(case[key]) for case in cases} == {False, True}


@pytest.mark.parametrize(
    "way, shape, name, text",
    [
        ("auto", {"heads": 32, "kv_heads": 8, "ways": 8}, "ulysses", "some heads, 4 of 32$"),
        (
            "auto",
            {"heads": 32, "kv_heads": 8, "ways": 16},
            "ulysses",
            "each of 8 heads of keys and values is sent 2 times",
        ),
        (
            "auto",
            {"heads": 32, "kv_heads": 8, "ways": 4, "model": 8},
            "ulysses",
            "1 of 4, and each of 1 .* sent 4 times",
        ),
        ("auto", {"heads": 32, "kv_heads": 4, "ways": 4, "model": 8}, "ulysses", "each of 1 .* sent 4 times"),
        ("auto", {"heads": 12, "kv_heads": 12, "ways": 8}, "gather", "because 12 heads do not divide by 8; gathered"),
        ("auto", {"heads": 12, "kv_heads": 12, "ways": 8, "length": 2**16}, "ring", "take 1.12 GiB a layer"),
        (
            "auto",
            {"heads": 8, "kv_heads": 8, "ways": 8, "length": 2**17, "packed": True},
            "ring",
            "32.0 GiB by ulysses",
        ),
        ("auto", {"heads": 8, "kv_heads": 8, "ways": 8, "length": 2**15, "packed": True}, "ulysses", "1 of 8$"),
        ("ring", {"heads": 8, "kv_heads": 8, "ways": 8}, "ring", "as asked"),
        ("auto", {"heads": 8, "kv_heads": 8, "ways": 8, "has_bias": True}, "gather", "because of a bias"),
        (
            "auto",
            {"heads": 8, "kv_heads": 8, "ways": 8, "window": 9},
            "ulysses",
            r"1 of 8; a sliding window .* .halo.$",
        ),
        ("auto", {"heads": 8, "kv_heads": 8, "ways": 8, "window": 10}, "ulysses", "1 of 8$"),
        ("auto", {"heads": 9, "kv_heads": 9, "ways": 8, "window": 6}, "gather", r"GiB a layer$"),  # in zigzag order
        ("gather", {"heads": 8, "kv_heads": 8, "ways": 8, "window": 9}, "gather", "as asked$"),
        ("ulysses", {"heads": 8, "kv_heads": 8, "ways": 8, "has_bias": True}, "ulysses", "as asked"),
    ],
)
def test_what_is_chosen_and_why(way, shape, name, text):
    found = context_attention.choose(**{"length": 64, "is_causal": True, "way": way} | shape)
    assert found.name == name and re.search(text, found.text), found


def test_causal_blocks_are_balanced_where_the_length_allows():
    heads = {"heads": 3, "kv_heads": 3, "ways": 2}
    orders = [
        context_attention.choose(**heads, length=length, is_causal=is_causal, order=order).order
        for length, is_causal, order in ((8, True, None), (6, True, None), (8, False, None), (8, True, "contiguous"))
    ]
    assert orders == ["zigzag", "contiguous", "contiguous", "contiguous"]


@pytest.mark.parametrize(
    "case, message",
    [
        ({"way": "ulysses", "heads": 12}, "ulysses gives each of 8 devices some of 12 heads, which do not divide"),
        ({"way": "ring", "has_bias": True}, 'ring takes no bias of the scores; set `way="gather"`'),
        ({"length": 60}, "60 tokens of a sequence do not divide into 8 chunks .contiguous over 8 devices.; make the"),
        ({"length": 72, "order": "zigzag"}, "72 tokens .* into 16 chunks .* make the sequence 80 tokens long"),
        (
            {"way": "ulises"},
            "way: must be one of auto, gather, ulysses, ring, and is 'ulises'; did you mean 'ulysses'?",
        ),
        ({"order": "zig"}, "order: must be one of contiguous, zigzag, and is 'zig'; did you mean 'zigzag'?"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(case, message):
    with pytest.raises(UserError, match=message) as error:
        context_attention.choose(**{"heads": 8, "kv_heads": 8, "ways": 8, "length": 64, "is_causal": True} | case)
    assert "\n" not in str(error.value)


def test_causal_pairs_are_half_of_all_but_where_chunks_are_contiguous():
    shape = {"heads": 2, "kv_heads": 2, "ways": 4, "length": 64, "batch": 3}
    every = 3 * 2 * 64 * 64 // 4
    for way in context_attention.WAYS:
        assert context_costs.cost(way, "zigzag", is_causal=False, **shape).pairs == every
        assert context_costs.cost(way, "zigzag", is_causal=True, **shape).pairs == every // 2
    assert context_costs.cost("ring", "contiguous", is_causal=True, **shape).pairs == every * 7 // 8
    assert context_costs.cost("ring", "contiguous", is_causal=True, window=5, **shape).pairs == every * 3 // 8
    assert context_costs.cost("ulysses", "zigzag", is_causal=True, window=5, **shape).pairs == 3 * 2 * 64 * 5 // 4
