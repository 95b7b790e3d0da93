"""Checks the sizes of launches of several products. This module tests pallas_kernels.one_token_mosaic.

What their threads compute is not run here: Mosaic has no interpreter for PTX.
"""

import functools
import itertools

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import one_token, one_token_mosaic
from pallas_kernels.one_token_ptx import ROWS, WIDE

# D, F, H, J and C: the least and the most that are taken, and heads of 64.
SIZES = ((256, 256, 2, 1, 128), (256, 512, 4, 2, 64), (8192, 28672, 224, 224, 128))
PROCESSORS = (16, 78, 114, 132)  # of a seventh of an H100 and of whole Hopper GPUs
SLOTS = 32


def layer(sizes, leaf):
    """Returns what a layer's launch is given, as arrays that `leaf` makes of shapes and dtypes."""
    embed, mlp, heads, kv_heads, dims = sizes
    q, kv = heads * dims, kv_heads * dims

    def weight(rows, columns):
        transposed = leaf((columns // one_token.BLOCK, rows), jnp.bfloat16)
        return one_token.Weight(leaf((rows, columns), jnp.int8), None, 1 / 127, transposed)

    norm = one_token.Norm(leaf((embed,), jnp.bfloat16), 1e-5)
    products = [
        one_token_mosaic.Product("add", (weight(q, embed),)),
        one_token_mosaic.Product("gate", (weight(embed, mlp), weight(embed, mlp)), norm),
        one_token_mosaic.Product("add", (weight(mlp, embed),)),
        one_token_mosaic.Product("project", (weight(embed, q), weight(embed, kv), weight(embed, kv)), norm),
    ]
    cache = leaf((SLOTS, kv_heads, dims), jnp.bfloat16)
    place = (cache, cache), leaf((dims,), jnp.float32), leaf((1,), jnp.int32)
    x_D, y_K = leaf((embed,), jnp.bfloat16), leaf((q,), jnp.bfloat16)
    return products, x_D, leaf((one_token.COUNTERS,), jnp.int32), y_K, place


@pytest.mark.parametrize("sizes", SIZES)
def test_the_least_and_the_most_that_is_taken_is_lowered_for_a_gpu(sizes):
    """Mosaic refuses a kernel that needs more shared memory than there is."""
    assert one_token_mosaic.takes(*sizes)
    on = Mesh(np.asarray(compile_only.devices(1)[:1]), ("one",))
    products, x_D, counts, y_K, place = layer(
        sizes, lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, P()))
    )
    launch = jax.jit(functools.partial(one_token_mosaic.run, processors=132))
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        text = launch.lower(products, x_D, counts, y_K=y_K, place=place).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("place", range(3))
def test_more_than_the_most_is_not_taken(place):
    """Of D, F and H: the next size that the copies divide."""
    embed, mlp, heads, *others = SIZES[-1]
    more = [(embed + ROWS, mlp, heads), (embed, mlp + ROWS, heads), (embed, mlp, heads + 2)][place]
    assert not one_token_mosaic.takes(*more, *others)


def test_products_have_whole_copies_counters_of_their_own_and_a_block_for_each_part():
    """The last part of a strip to arrive goes on, so a strip's parts are in one round of the blocks; others wait for no part."""
    sizes = itertools.product((256, 768, 4096, 8192), (256, 1280, 14336, 28672), (2, 32, 224), (1, 8, 224), (64, 128))
    taken = [each for each in sizes if each[2] % each[3] == 0 and one_token_mosaic.takes(*each)]
    assert len(taken) > 50
    for each, processors in itertools.product(taken, PROCESSORS):
        products, *_ = layer(each, jax.ShapeDtypeStruct)
        shapes = [one_token_mosaic._shape(product, processors) for product in products]
        for shape in shapes:
            assert shape.rows % ROWS == 0 and shape.columns % WIDE == 0
            assert shape.parts == 1 or shape.works <= processors
        groups = sum(shape.strips for shape, product in zip(shapes, products) if product.kind != "add")
        assert one_token_mosaic._BARRIERS + groups <= one_token.COUNTERS
        assert 2 * len(products) <= one_token_mosaic._BARRIERS
