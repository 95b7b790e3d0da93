"""Compiles small train steps for compile-only GPUs. This module's model is plain Flax and does not use zerojax."""

import functools
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training import train_state
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.plan import findings, ledger, targets

WIDTH, HIDDEN, EXAMPLES = 256, 512, 512
# Kernels are never run here, so their code need not be fast. The text of a program is the same. There is no GPU to tune kernels on; where
# JAX 0.11 and later are told to tune none, they find no form of some matmuls.
FAST = {
    **({"xla_gpu_autotune_level": 0} if jax.__version_info__ < (0, 11) else {}),
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
ASSEMBLED = dict(FAST)  # for tests of our own kernels, which NVIDIA's assembler has to accept
# Of other programs no kernel is assembled: to start the assembler for each takes more than a third of the time.
FAST["xla_gpu_cuda_data_dir"] = str(pathlib.Path(__file__).with_name("no_assembler"))


class Block(nn.Module):
    """A residual block. Because of the norm's scale, every kernel's backward pass reads the kernel."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(use_bias=False, dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(HIDDEN, use_bias=False, dtype=jnp.bfloat16, name="wide")(y))
        return x + nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name="narrow")(y)


class Net(nn.Module):
    """Blocks, one after the other."""

    depth: int = 2

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            x = Block(name=f"block_{i}")(x)
        return x


def gpus(target: str = "h200", topology: str = "1x8") -> list:
    """Returns compile-only GPUs. Skips the test only where no compiler is published; elsewhere the extra `test` installs it."""
    if sys.platform != "linux":
        pytest.skip("JAX's CUDA compiler is published for Linux")
    return targets.devices(target, topology)


@functools.cache
def devices(count: int = 8) -> tuple:
    """Returns compile-only H200s."""
    return tuple(gpus(topology=f"{-(-count // 8)}x8"))


def optimized() -> Any:
    """Sets optimized, uncached compilation as users have it, since other tests turn optimizations off and the cache on."""
    return runs.jax_settings(jax_disable_most_optimizations=False, jax_enable_compilation_cache=False)


def mesh(axes: tuple[str, ...] = ("fsdp",), shape: tuple[int, ...] = (8,)) -> Mesh:
    """Returns a mesh with the named axes."""
    return Mesh(np.asarray(devices()).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def create(
    key: jax.Array, tx: Any = None, dtype: Any = jnp.float32, depth: int | None = None
) -> train_state.TrainState:
    """Returns the initial state."""
    net = Net() if depth is None else Net(depth)  # tests replace Net by other modules
    params = jax.tree.map(lambda w: w.astype(dtype), net.init(key, jnp.zeros((1, WIDTH)))["params"])
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx or optax.adam(1e-3))


def plain_state(on: Mesh, split: P = P("fsdp"), **kwargs: Any) -> train_state.TrainState:
    """Returns an abstract state whose matrices have the spec `split` and whose other leaves are replicated."""

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, split if leaf.ndim > 1 else P()))

    return jax.tree.map(place, jax.eval_shape(functools.partial(create, **kwargs), jax.random.key(0)))


def plain_step(state, batch, used=lambda params: params):
    """A plain train step, as users write it."""

    def loss_fn(params):
        error = state.apply_fn({"params": used(params)}, batch) - batch
        return jnp.mean(error.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def compile_plain(step, state, on: Mesh, donate: bool = True) -> str:
    """Returns the compiled text of a step under the user's own jit."""
    batch = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.bfloat16, sharding=NamedSharding(on, P(on.axis_names[0])))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, out_shardings=(shardings, None), donate_argnums=(0,) if donate else ())
    with runs.jax_settings(jax_traceback_in_locations_limit=10):  # rows name the line of the model, below flax
        lowered = jitted.lower(state, batch)
    return compile_gpu(lowered)


def compile_gpu(lowered: jax.stages.Lowered, options: Mapping[str, Any] = FAST) -> str:
    """Returns the compiled text."""
    with optimized():
        return lowered.compile(compiler_options=dict(options)).as_text()


def read(text: str, state, on: Mesh) -> ledger.Ledger:
    """Returns the ledger of a plain step."""
    return ledger.ledger(text, on, dict(tree.flatten(state.params)))


@functools.cache  # the key differs for omitted arguments, so callers pass all
def plain(stored: P, moments: P, donate: bool) -> tuple[train_state.TrainState, ledger.Ledger]:
    """Returns the state planned for a plain step, of the moments' spec, and the step's ledger; its params have the spec `stored`."""
    on = mesh()
    planned = plain_state(on, moments)
    state = planned.replace(params=plain_state(on, stored).params)
    return planned, read(compile_plain(plain_step, state, on, donate), planned, on)


def rules(found: ledger.Ledger, planned, **kwargs: Any) -> list[str]:
    """Returns the rules that a step breaks."""
    return [finding.rule for finding in findings.findings(found, planned=planned, **kwargs)]


def staged(
    stage: int, count: int = 8, replica: int = 1, remat: str = "dots", grad_accum: int = 1, reduce_dtype: Any = None
):
    """Returns (ledger, partition) of this project's train step on the model."""
    text, partition = _staged(stage, count, replica, remat, grad_accum, reduce_dtype, "", None, None)
    return ledger.ledger(text, partition.mesh, partition.placements), partition


def staged_text(
    stage: int, reduce_dtype: Any = None, offload: str = "", depth: int | None = None, wires: Any = None
) -> str:
    """Returns the compiled text of that step."""
    return _staged(stage, 8, 1, "dots", 1, reduce_dtype, offload, depth, wires)[0]


@functools.cache  # the key differs for omitted arguments, so callers pass all
def _staged(
    stage: int,
    count: int,
    replica: int,
    remat: str,
    grad_accum: int,
    reduce_dtype: Any,
    offload: str,
    depth: int | None,
    wires: Any,
):
    on = zerojax.make_mesh(replica=replica, devices=devices(count))
    keeps_copy = stage < 3
    tx = zerojax.with_master_weights(optax.adam(1e-3)) if keeps_copy else optax.adam(1e-3)
    init = functools.partial(create, tx=tx, dtype=jnp.bfloat16 if keeps_copy else jnp.float32, depth=depth)
    partition = zerojax.partition_state(jax.eval_shape(init, jax.random.key(0)), mesh=on, stage=stage)

    def loss_fn(params, batch, state):
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch).astype(jnp.float32) ** 2)

    step = zerojax.make_train_step(
        loss_fn,
        partition,
        compute_dtype=jnp.bfloat16,
        blocks=r"block_\d",
        remat=remat,
        offload=offload,
        grad_accum=grad_accum,
        reduce_dtype=reduce_dtype,
        wires=wires,
    )
    shape = (16 * count, WIDTH) if grad_accum == 1 else (grad_accum, 16 * count, WIDTH)
    batch = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return compile_gpu(step.lower(partition.abstract_state, batch)), partition
