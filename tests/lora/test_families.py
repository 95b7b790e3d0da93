"""Checks adapters in a family's functions. This module tests zerojax.lora.families.

tests/interop/test_peft.py compares logits and tokens with PEFT's.
"""

import arrays
import jax
import jax.numpy as jnp

from zerojax.interop import peft
from zerojax.lora import adapters, families
from zerojax.lora.settings import Lora
from zerojax.models import families as table
from zerojax.models import family as family_lib


def test_a_key_turns_dropout_on_and_no_key_turns_it_off():
    family = table.PRESETS["test"]
    model = family.presets["test"].__class__(**{**vars(family.presets["test"]), "vocab_size": 32, "num_layers": 1})
    chosen = peft.choose(Lora(dropout=0.5), family, model)
    shapes = family_lib.abstract_params(family.parts, model)
    params = adapters.add(
        jax.tree.map(lambda leaf: 0.1 * arrays.normal(0, leaf.shape), shapes),
        chosen,
        jax.random.key(1),
    )
    q = params["layer_0"]["attention"]["q"]
    q["lora_b"] = jnp.ones_like(q["lora_b"])
    batch = {"tokens": jnp.arange(20).reshape(2, 10)}
    own = families.with_adapters(family, chosen)
    with_key = jax.jit(lambda key: own.loss(model, params, batch, key))
    losses = [float(with_key(jax.random.key(number))) for number in (0, 1)]
    off = float(jax.jit(lambda: own.loss(model, params, batch))())
    plain = float(jax.jit(lambda: family.loss(model, adapters.merge(params, chosen), batch))())
    assert len({*losses, off}) == 3 and abs(off - plain) < 1e-5
