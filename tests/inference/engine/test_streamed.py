"""Checks engines whose weights are in host memory. This module tests zerojax.inference.engine.streamed."""

import golden_engines
import golden_models
import jax
import numpy as np
import pytest
import runs

import zerojax
from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.zero.host import memory_kind


@pytest.mark.parametrize("name", runs.cases(golden_models.GENERATORS, long=set(golden_models.GENERATORS) - {"gemma3"}))
def test_weights_in_host_memory_give_the_same_tokens_and_a_step_frees_the_keys_that_it_replaces(name):
    one, offload = zerojax.make_mesh(devices=jax.devices()[:1]), {"params": "host", "params_fraction": 0.7}
    how = {"mesh": one, "stage": 3, "min_size": 64, "offload": offload}
    own = golden_engines.assert_tokens_of_transformers(
        name, zerojax.load_huggingface(golden_models.FOLDER / name, **how)
    )
    where = set(map(memory_kind.is_on_host, jax.tree.leaves(own._params)))
    assert where == {True, False}
    own.submit([9], max_tokens=3, ignores_end=True)
    own.step()
    former = jax.tree.leaves(own._caches)
    own.step()
    kept = set(map(id, jax.tree.leaves(own._caches)))  # of an encoder's states
    read = [leaf for leaf in former if id(leaf) not in kept]
    assert read and all(leaf.is_deleted() for leaf in read)


def test_what_does_not_go_with_weights_in_host_memory_is_refused_in_one_line():
    def load(devices):
        mesh, offload = zerojax.make_mesh(devices=jax.devices()[:devices]), {"params": "host"}
        return zerojax.load_huggingface(golden_models.FOLDER / "llama", mesh=mesh, stage=3, offload=offload)

    loaded = load(1)
    adapter = {"one": {"head": (np.ones((64, 2)), np.ones((2, 384)))}}
    wrong = {"format": "int8", "dtype": "bfloat16", "is_gathered": True, "adapters": adapter}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=f"^{name}: is for weights on the devices, and these are in host memory"):
            engine_lib.Engine(loaded, **{name: value})
    with pytest.raises(UserError, match=r"params: are in host memory, .* and the mesh has 2"):
        engine_lib.Engine(load(2))
