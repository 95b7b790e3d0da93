"""Checks that public functions refuse arguments of a wrong type in one line. This module tests zerojax.signatures."""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

import zerojax
from zerojax import signatures
from zerojax.errors import UserError

FUNCTIONS = {name: getattr(zerojax, name) for name in zerojax.__all__ if inspect.isfunction(getattr(zerojax, name))}
# By annotation: values that are of it, and values that are not.
VALUES: dict[Any, tuple[list, list]] = {
    int: ([0, -1, np.int64(3), jnp.int32(2)], [None, True, 2.0, "1", b"", (), np.array([1, 2]), jnp.ones(2)]),
    float: ([0, 2.5, -1, float("nan"), np.float32(2), jnp.ones(())], [None, True, "1", 1j, [1.0], jnp.ones(2)]),
    bool: ([True, np.False_], [None, 1, 0.0, "True", jnp.ones(2)]),
    str: (["", "a"], [None, 1, b"a", ["a"]]),
    float | None: ([None, 2.5], [False, "x"]),
    jax.Array: ([jnp.ones(2), np.ones(2), jax.ShapeDtypeStruct((), int)], [None, 1, [1.0], "x"]),
    float | jax.Array | Callable[..., Any]: ([1e-3, jnp.ones(()), lambda step: step], [None, "x", {}]),
    Callable[..., Any]: ([len], [None, 1, "len"]),
    DTypeLike: (["bfloat16", jnp.float32, np.dtype(int)], [None, 3, {}, jnp.ones(2), object()]),
    DTypeLike | None: ([None, "bf16"], [1.5]),
    Sequence[tuple[str, int]]: ([[], (), [("a", 1)], [["a", 1]]], [None, "ab", b"", [1], [("a", 1.5)], [("a",)], {"a": 1}]),
    Mapping[str, int]: ([{}, {"a": 1}], [None, [("a", 1)], {"a": "b"}, {1: 1}]),
    tuple[float, ...]: ([(), (1.0, 2.0)], [None, "x", ("x",)]),
    jax.sharding.Mesh: ([], [None, "data", object()]),
    Any: ([None, object(), 1], []),
}  # fmt: skip


@pytest.mark.parametrize("hint", VALUES, ids=signatures.words)
def test_a_value_is_of_its_type_or_is_not(hint):
    good, bad = VALUES[hint]
    assert [value for value in good if not signatures.is_of(value, hint)] == []
    assert [value for value in bad if signatures.is_of(value, hint)] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_annotation_of_a_public_function_takes_anything_unseen(name):
    hints = typing.get_type_hints(FUNCTIONS[name])
    hints.pop("return")
    said = {one: hint for one, hint in hints.items() if hint is not Any and not isinstance(hint, typing.TypeVar)}
    unseen = [one for one, hint in said.items() if signatures.is_of(object(), hint) and not _is_open(hint)]
    assert unseen == [], {one: hints[one] for one in unseen}


def _is_open(hint: Any) -> bool:
    """Returns whether a part of an annotation is `Any` or a variable, for which every value is right."""
    return hint is Any or isinstance(hint, typing.TypeVar) or any(map(_is_open, typing.get_args(hint)))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: zerojax.make_mesh(None), "replica: must be a whole number, and is None"),
        (lambda: zerojax.make_mesh(devices=3), "devices: must be a list of which each is a Device or None, and is 3"),
        (lambda: zerojax.attention(jnp.ones(3), "x", jnp.ones(3)), "key: must be an array, and is 'x'"),
        (lambda: zerojax.Pipeline(3, {}, "layer"), "loss_fn: must be a function, and is 3"),
        (lambda: zerojax.Pipeline(len, {}, "layer", chunks="2"), "chunks: must be a whole number, and is '2'"),
        (lambda: zerojax.muon("x"), "learning_rate: must be a number or an array or a function, and is 'x'"),
        (lambda: zerojax.embedding_lookup([1], jnp.ones(3)), "table: must be an array, and is [1]"),
        (lambda: zerojax.make_train_step(len, {}), "partition: must be a Partition, and is {}"),
        (
            lambda: zerojax.batch_sharding(jnp.ones((2, 3))),  # whose numbers may be on many devices
            "mesh: must be a Mesh, and is ArrayImpl float32[2, 3]",
        ),
        (
            lambda: zerojax.shard_train_state(dict, mesh=zerojax.make_mesh(), min_size="x"),
            "min_size: must be a whole number, and is 'x'",
        ),
    ],
)
def test_a_wrong_type_is_one_line_with_the_argument_and_the_value(call, line):
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == line


def test_an_argument_that_lacks_is_told_by_python():
    with pytest.raises(TypeError, match=r"^embedding_lookup\(\) missing 1 required positional argument: 'tokens'$"):
        zerojax.embedding_lookup(jnp.ones(3))
