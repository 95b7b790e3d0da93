"""Trains a decoder that somebody else wrote, in Linen, NNX or Haiku, in two lines. This module shows them for three public styles.

    python examples/foreign_decoders.py --model gemma --steps 40
    python examples/foreign_decoders.py --model bonsai --steps 40
    python examples/foreign_decoders.py --model haiku --steps 40
    python examples/foreign_decoders.py --model gemma --plan h200

`gemma` stands in for google-deepmind's package of that name (Linen), whose dependencies are too many for this environment: its modules have
the same names and nesting, so the regex and the two lines are those for `gm.nn.Gemma3_1B()` too. `bonsai` stands in for the NNX decoders of
jax-bonsai, whose package holds no code yet. `haiku` needs `pip install dm-haiku`. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich
from flax import nnx

import zerojax
from zerojax.launch import devices as devices_lib
from zerojax.plan import report, targets
from zerojax.plan.own_step import plan_own_step

VOCAB, EMBED, HEADS, HEAD, HIDDEN, LAYERS, LENGTH, EXAMPLES = 256, 64, 4, 16, 128, 2, 32, 16


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns causal attention; both models call JAX's."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Einsum(nn.Module):
    """One weight `w`, in any contraction."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, formula: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x, self.param("w", nn.initializers.normal(0.05), self.shape))


class Attention(nn.Module):
    """Attention of gemma: one weight for the queries, and one for keys and values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q = Einsum((HEADS, EMBED, HEAD), name="q_einsum")("BTD,NDH->BTNH", x)
        k, v = Einsum((2, 1, EMBED, HEAD), name="kv_einsum")("BSD,CKDH->CBSKH", x)
        return Einsum((HEADS, HEAD, EMBED), name="attn_vec_einsum")("BTNH,NHD->BTD", attended(q, k, v))


class FeedForward(nn.Module):
    """The gated MLP of gemma: gate and up are one weight."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = Einsum((2, HIDDEN, EMBED), name="gating_einsum")("BTF,NHF->NBTH", x)
        return Einsum((HIDDEN, EMBED), name="linear")("BTH,HF->BTF", nn.gelu(gate) * up)


class Block(nn.Module):
    """A layer of gemma, which returns its cache too."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[None, jax.Array]:
        x = x + Attention(name="attn")(nn.RMSNorm(name="pre_attention_norm")(x))
        return None, x + FeedForward(name="mlp")(nn.RMSNorm(name="pre_ffw_norm")(x))


class Embedder(nn.Module):
    """The embedding of gemma, which is the output projection too."""

    def setup(self) -> None:
        self.table = self.param("input_embedding", nn.initializers.normal(0.05), (VOCAB, EMBED))

    def encode(self, tokens: jax.Array) -> jax.Array:
        return self.table[tokens] * EMBED**0.5

    def decode(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Transformer(nn.Module):
    """gemma's decoder. Its call is jitted, as the package's is, so no interceptor knows its weights, and a trace tells its layers."""

    def setup(self) -> None:
        self.embedder = Embedder()
        self.blocks = [Block(name=f"layer_{layer}") for layer in range(LAYERS)]
        self.final_norm = nn.RMSNorm()

    @nn.jit
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedder.encode(tokens)
        for block in self.blocks:
            _, x = block(x)
        return self.embedder.decode(self.final_norm(x))


class DecoderLayer(nnx.Module):
    """A layer in bonsai's style."""

    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v = (nnx.Linear(EMBED, HEADS * HEAD, use_bias=False, rngs=rngs) for _ in range(3))
        self.o = nnx.Linear(HEADS * HEAD, EMBED, use_bias=False, rngs=rngs)
        self.gate, self.up = (nnx.Linear(EMBED, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, EMBED, use_bias=False, rngs=rngs)
        self.input_norm, self.post_norm = nnx.RMSNorm(EMBED, rngs=rngs), nnx.RMSNorm(EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.input_norm(x)
        heads = [one(y).reshape(*y.shape[:2], HEADS, HEAD) for one in (self.q, self.k, self.v)]
        x = x + self.o(attended(*heads).reshape(*y.shape[:2], -1))
        y = self.post_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """A decoder in bonsai's style."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.lm_head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def gemma() -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Returns a function that makes the weights, and one of weights and tokens that returns scores."""
    model = Transformer()
    return (lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]), (
        lambda params, tokens: model.apply({"params": params}, tokens)
    )


def bonsai() -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Returns the same of the NNX model."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))
    return (lambda key: nnx.state(Decoder(nnx.Rngs(key)))), lambda params, tokens: nnx.merge(graph, params)(tokens)


def haiku() -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Returns the same of a model of dm-haiku."""
    if importlib.util.find_spec("haiku") is None:
        raise SystemExit("--model haiku: dm-haiku is not installed; pip install dm-haiku")
    import haiku as hk

    class Layer(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = hk.RMSNorm(-1, name="norm")(x)
            q, k, v = (hk.Linear(HEADS * HEAD, name=name)(y).reshape(*y.shape[:2], HEADS, HEAD) for name in "qkv")
            x = x + hk.Linear(EMBED, name="out")(attended(q, k, v).reshape(*y.shape[:2], -1))
            return x + hk.nets.MLP([HIDDEN, EMBED], activation=jax.nn.gelu)(hk.RMSNorm(-1, name="mlp_norm")(x))

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(VOCAB, EMBED)(tokens)
        for layer in range(LAYERS):
            x = Layer(name=f"layer_{layer}")(x)
        return hk.Linear(VOCAB, name="head")(hk.RMSNorm(-1, name="final_norm")(x))

    net = hk.without_apply_rng(hk.transform(forward))
    return lambda key: net.init(key, jnp.zeros((1, LENGTH), jnp.int32)), net.apply


MODELS = {"gemma": (gemma, r"layer_\d+"), "bonsai": (bonsai, r"layers/\d+"), "haiku": (haiku, r"layer_\d+")}
# with a regex of their layers


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields texts in which each token is the one before plus a constant of the text."""
    random = np.random.default_rng(0)
    while True:
        first, step = random.integers(0, VOCAB, (2, EXAMPLES, 1))
        yield {"tokens": ((first + step % 4 * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)}


def own_code(name: str) -> tuple[Any, Any, str]:
    """Returns the init function, the loss, and the regex of the layers."""
    make, blocks = MODELS[name]
    init, apply = make()

    def create_state(key: jax.Array) -> zerojax.TrainState:
        return zerojax.TrainState.create(apply_fn=None, params=init(key), tx=optax.adamw(1e-2))

    def loss_fn(params: Any, batch: dict[str, jax.Array], state: Any) -> jax.Array:
        scores, labels = apply(params, batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), labels).mean()

    return create_state, loss_fn, blocks


def load(folder: str, name: str, mesh: Any) -> tuple[Any, Any]:
    """Returns the state of a checkpoint's weights and its partition. Each device reads its own shards, as the package does if it is told
    `gm.ckpts.load_params(folder, sharding=partition.shardings.params)`."""
    partition = zerojax.partition_state(jax.eval_shape(own_code(name)[0], jax.random.key(0)), mesh=mesh)
    params = ocp.StandardCheckpointer().restore(folder, partition.abstract_state.params)

    def of_params(params: Any) -> zerojax.TrainState:
        return zerojax.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    return zerojax.shard_train_state(of_params, params, mesh=mesh)


def train(name: str, steps: int, stage: int = 3, devices: list | None = None) -> tuple[list[float], Any]:
    """Trains a model, and returns its losses and the partition."""
    (create_state, loss_fn, blocks), mesh = own_code(name), zerojax.make_mesh(devices=devices)
    # The two lines.
    state, partition = zerojax.shard_train_state(create_state, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = zerojax.make_train_step(loss_fn, partition, blocks=blocks, reduce_dtype=jnp.float32)

    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, partition


def plan(name: str, mesh: Any, stage: int) -> str:
    """Returns what a step needs of each device, which may be absent; allocates nothing."""
    (create_state, loss_fn, blocks), key = own_code(name), jax.random.key(0)
    how = {"batch": next(batches()), "mesh": mesh, "blocks": blocks, "reduce_dtype": jnp.float32}
    return report.verdict(plan_own_step(create_state, key, loss_fn=loss_fn, shard={"stage": stage}, **how))


def main(argv: list[str] | None = None) -> None:
    """Plans and trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma", choices=MODELS, help="the style of the model")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--plan", help="only plan, for eight of a kind of GPU that may be absent (h200)")
    args = parser.parse_args(argv)
    if not args.plan:
        devices_lib.emulate_cpu_devices(8)
    mesh = zerojax.make_mesh(devices=targets.devices(args.plan, "1x8") if args.plan else None)
    for stage in (0, 3):
        print(f"stage {stage}: {plan(args.model, mesh, stage)}")
    if args.plan:
        return
    losses, partition = train(args.model, args.steps)
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0)
    rich.print(zerojax.memory_table(partition, baseline))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
