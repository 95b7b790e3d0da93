"""Runs adapters in Linen models that know nothing of them. This module intercepts the calls to linear modules.

A linear module whose weights have an adapter beside the kernel returns W x + scale * B A dropout(x), and so do the experts of a mixture
(`models.experts.Experts`), each with its own adapter and without dropout, and an embedding, of which A B has rows too. With DoRA each
output but the bias is multiplied by its magnitude over the norm of its column of the weights with the adapter. A quantized kernel is
dequantized where its module multiplies, so at any time about one exists, and none is kept for the backward pass. No other module changes.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.errors import UserError
from zerojax.lora import adapters
from zerojax.lora import settings as settings_lib
from zerojax.lora import targets as targets_lib
from zerojax.lora.targets import KERNEL, MAGNITUDE, A, B
from zerojax.models import experts, layers
from zerojax.ops import embedding, expert_matrices, quantized, tiles
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import alike, marks
from zerojax.zero.sharded_batch import keys

EMBEDDING = "embedding"  # the name of an embedding's weight
RNG = "lora"  # the name of Linen's random stream for dropout


def find(function: Callable[..., Any], params: PyTree, *args: Any) -> dict[str, targets_lib.LinearModule]:
    """Returns the linear modules that `function(params, *args)` calls, by path. Computes nothing.

    Args:
      function: calls a Linen model, such as `lambda params, x: net.apply({"params": params}, x)`.
      params: its weights, abstract or not.
      *args: example inputs.
    """
    found: dict[str, targets_lib.LinearModule] = {}
    stored = targets_lib.flat(params)
    tied: set[str] = set()  # embeddings that are output projections too

    def note(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        inputs = _inputs_of(module) if context.method_name == "__call__" else None
        result = call(*args, **kwargs)
        if _is_mixture(module, context.method_name):
            found.update(_stacks_of(module))
        if inputs is not None and module.scope is not None and module.scope.has_variable("params", KERNEL):
            kernel = module.scope.get_variable("params", KERNEL)
            path = "/".join(module.path)
            found[path] = targets_lib.LinearModule(path.replace("/", "."), tuple(kernel.shape), inputs)._replace(
                stack=_stack(path, tuple(kernel.shape), stored.get(f"{path}/{KERNEL}"))
            )
        if _is_table(module, context.method_name) and module.scope is not None:
            path, shape = "/".join(module.path), tuple(module.scope.get_variable("params", EMBEDDING).shape)
            stack = _stack(path, shape, stored.get(f"{path}/{EMBEDDING}"))
            found[path] = targets_lib.LinearModule(path.replace("/", "."), shape, 1, stack=stack, is_embedding=True)
        if isinstance(module, nn.Embed) and context.method_name == "attend":
            tied.add("/".join(module.path))
        return result

    plain = getattr(function, "__wrapped__", function) if hasattr(function, "lower") else function
    # JAX remembers what it has traced: a jitted function, and a function that it has seen
    with nn.intercept_methods(note):
        jax.eval_shape(lambda *values: plain(*values), params, *args)
    return {path: one._replace(is_output=path in tied) for path, one in found.items()}


def _stack(path: str, shape: tuple[int, ...], stored: Leaf) -> tuple[int, ...]:
    """Returns the first dims of a stored kernel, which count the layers of a stack; `shape` is that of the kernel in a call."""
    found = shape if stored is None else tuple(stored.shape)
    dims = len(found) - len(shape)
    if found[max(dims, 0) :] != shape:
        raise UserError(
            f"add_lora: {path} is called with a kernel of shape {shape}, and its weights are {found}; an adapter is stacked as nn.scan and "
            'nn.vmap with variable_axes={"params": 0} stack kernels: stack them so, or name it in exclude_modules'
        )
    return found[:dims]


def add(
    params: PyTree, lora: settings_lib.Lora, key: jax.Array, function: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """Returns a Linen model's weights with fresh adapters; see `zerojax.add_lora`."""
    for path, leaf in tree.flatten(params, is_leaf=lambda node: isinstance(node, nn.meta.AxisMetadata)):
        if isinstance(leaf, nn.meta.AxisMetadata):
            raise UserError(
                f"add_lora: {path} is in a {type(leaf).__name__}, as nn.with_partitioning makes them; pass flax.linen.meta.unbox(params)"
            )
    weights = targets_lib.flat(params)
    chosen = targets_lib.choose(lora, find(function, params, *args), weights)
    for path in chosen.adapted:
        if (kernel := chosen.kernels(path)[0]) not in weights:
            raise UserError(
                f"add_lora: {path} is called, and the params have no {kernel}: function= calls a model with a part of "
                'them, or inside another; call it with all, net.apply({"params": params}, ...), or name the module in exclude_modules'
            )
    return adapters.add(params, chosen, key)


@contextlib.contextmanager
def applied(scale: Callable[[str], float], dropout: float = 0.0) -> Iterator[None]:
    """Runs adapters in all Linen modules that are called inside.

    Args:
      scale: f(path of a module) -> the factor of its adapter; 0 turns its magnitude off too.
      dropout: the share of an adapter's input that is set to 0 inside `dropout_key`.
    """

    def scales(path: str, names: Sequence[str]) -> tuple[float, ...]:
        adapted = (
            name.removesuffix(f"/{A}").removesuffix(targets_lib.BESIDE) for name in names if name.endswith(f"/{A}")
        )
        return tuple(scale(f"{path}/{name}") for name in adapted)

    with alike.intercepting(_Interceptor(scale, dropout).intercept, scales):
        yield


def dropout_key(key: jax.Array | None) -> contextlib.AbstractContextManager[None]:
    """Turns the dropout of adapters on inside, with this random key. None: off."""
    return keys.stream(RNG, key)


def with_lora(
    function: Callable[..., Any], lora: settings_lib.Lora, *, key: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wraps a function of a Linen model's weights, such as a loss, so that it runs the adapters among these weights.

    Args:
      function: `function(params, *args)`.
      lora: the settings with which `add_lora` made the adapters.
      key: `key(*args)` -> the random key of dropout, from the function's other arguments: `lambda batch, state:
        jax.random.fold_in(state.rng, state.step)`. None: no dropout, as in evaluation.

    >>> train_step = make_train_step(with_lora(loss_fn, lora), partition)
    """

    def run(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        own = key(*args, **kwargs) if key is not None and lora.dropout else None
        with applied(lambda path: lora.scale_of(path.replace("/", ".")), lora.dropout), dropout_key(own):
            return function(params, *args, **kwargs)

    return run


class _Interceptor:
    """Intercepts calls to modules that have an adapter or a quantized kernel."""

    def __init__(self, scale: Callable[[str], float], dropout: float):
        self._scale, self._dropout = scale, dropout

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs one call of one module; for `flax.linen.intercept_methods`."""
        module, method = context.module, context.method_name
        scope = module.scope
        if scope is None:
            return call(*args, **kwargs)
        if _is_mixture(module, method):
            return self._mixed(module, call, args, kwargs)
        if _is_table(module, method) and scope.has_variable("params", A):
            return self._looked_up(module, args[0], call(*args, **kwargs))
        if method == "setup" or not hasattr(type(module), method) or not scope.has_variable("params", KERNEL):
            return call(*args, **kwargs)
        kernel = scope.get_variable("params", KERNEL)
        has_adapter, is_coded = scope.has_variable("params", A), quantized.is_quantized(kernel)
        if not has_adapter and not is_coded:
            return call(*args, **kwargs)
        inputs = _inputs_of(module) if method == "__call__" else None
        if inputs is None:
            return self._merged(module, method, args, kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        y = _linear(module, x, kernel, inputs) if is_coded else call(*args, **kwargs)
        if not has_adapter:
            return y
        if self._dropout and keys.has_stream(RNG) and not scope.has_rng(RNG):
            raise UserError(
                f"lora.dropout: {'/'.join(module.path)} is in a stack of nn.scan or nn.vmap that hands it no random keys; pass "
                f'split_rngs={{"{RNG}": True}} there, or set lora.dropout to 0'
            )
        seen = self._dropped(module, x) if self._dropout and scope.has_rng(RNG) else x
        adapter = self._adapter(module)
        if adapter.magnitude is None:
            return (y + output(seen, *adapter[:3], y.shape)).astype(y.dtype)
        bias = scope.get_variable("params", "bias") if scope.has_variable("params", "bias") else 0
        plain = y - bias
        if seen is not x:
            plain = multiply(seen, kernel, inputs, y.dtype, None)
        return with_magnitude(y, plain, seen, kernel, adapter)

    def _adapter(self, module: nn.Module) -> adapters.KernelAdapter:
        found: list[Any] = [module.get_variable("params", name) for name in (A, B, MAGNITUDE)]
        a, b, magnitude = found
        return adapters.KernelAdapter(a, b, scale := self._scale("/".join(module.path)), magnitude if scale else None)

    def _looked_up(self, module: nn.Module, numbers: jax.Array, y: jax.Array) -> jax.Array:
        """Returns what an embedding with an adapter returns, without dropout, as in PEFT."""
        adapter = self._adapter(module)
        table: Any = module.get_variable("params", EMBEDDING)
        with jax.named_scope("lora"):
            rows = embedding.embedding_lookup(adapter.a.astype(y.dtype), numbers)
            y = y + (rows * adapter.scale) @ adapter.b.astype(y.dtype)
            return (y if adapter.magnitude is None else y * share(table, adapter)).astype(y.dtype)

    def _mixed(self, module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a mixture whose experts have adapters, or are quantized."""
        scope = module.scope
        assert scope is not None
        known: Mapping[str, Any] = scope.variables()["params"]
        if not any(name.endswith(targets_lib.BESIDE) or quantized.is_quantized(known[name]) for name in known):
            return call(*args, **kwargs)

        def beside(variables: PyTree) -> PyTree:
            params = dict(variables["params"])
            pairs = {name: params.pop(name) for name in [*params] if name.endswith(targets_lib.BESIDE)}
            for name in params:
                if quantized.is_quantized(params[name]):
                    params[name] = expert_matrices.StoredMatrices(params[name])
            for beside, pair in pairs.items():
                name = beside.removesuffix(targets_lib.BESIDE)
                a, b, scale = pair[A], pair[B], self._scale("/".join((*module.path, name)))
                if name == experts.ROUTER:
                    adapter = adapters.KernelAdapter(a, b, scale)
                    params[name] = adapters.merged(params[name], adapter).astype(params[name].dtype)
                else:
                    own = experts.JOINED.get(name, (name,))
                    for part, one in enumerate(own):
                        number = part if len(own) > 1 else None
                        params[one] = expert_matrices.with_adapter(params[one], a, b, scale, number)
            return {**variables, "params": params}

        def run(bound: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

        return nn.map_variables(run, "params", trans_in_fn=beside)(module, *args, **kwargs)

    def _dropped(self, module: nn.Module, x: jax.Array) -> jax.Array:
        scope = module.scope
        assert scope is not None
        scope.rng_counters[RNG] += 1
        lazy = scope.rngs[RNG]
        call = zlib.crc32(repr((lazy.suffix, scope.rng_counters[RNG])).encode())
        return drop(lazy.rng, x, self._dropout, call)

    def _merged(self, module: nn.Module, method: str, args: tuple, kwargs: dict) -> Any:
        """Runs a module that does more than multiply, such as an output projection that computes its loss, with its kernel merged."""
        scope = module.scope
        assert scope is not None
        path = "/".join(module.path)
        if self._dropout and scope.has_rng(RNG):
            raise UserError(
                f"lora.dropout: {path} does more than multiply its input, so its adapter has no dropout; leave it out of "
                "lora.target_modules, or set lora.dropout to 0"
            )

        def merge(variables: PyTree) -> PyTree:
            params = dict(variables["params"])
            kernel, a, b, magnitude = params[KERNEL], *(params.pop(name, None) for name in (A, B, MAGNITUDE))
            if quantized.is_quantized(kernel):
                # The dtype of scales that a precision casts, or else of the module's input
                like = kernel.get(quantized.SCALES, args[0] if args else next(iter(kwargs.values()), None))
                kernel = quantized.dequantize(kernel, getattr(like, "dtype", jnp.float32))
            if a is not None:
                adapter = adapters.KernelAdapter(a, b, scale := self._scale(path), magnitude if scale else None)
                kernel = adapters.merged(kernel, adapter).astype(kernel.dtype)
            return {**variables, "params": {**params, KERNEL: kernel}}

        def run(bound: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return getattr(bound, method)(*args, **kwargs)

        return nn.map_variables(run, "params", trans_in_fn=merge)(module, *args, **kwargs)


def output(x: jax.Array, a: jax.Array, b: jax.Array, scale: float, shape: tuple[int, ...]) -> jax.Array:
    """Returns an adapter's output, scale * B A x, in the shape of its module's output.

    The second matmul is not kept for the backward pass by remat="dots": it would double what is kept, and costs little.
    """
    with jax.named_scope("lora"):
        kept = x.shape[: _leading(x.shape, a.shape[0])]
        low = (x.reshape(*kept, -1) @ a) * scale
        return marks.not_kept(lambda: [low @ b])[0].reshape(shape)


def with_magnitude(
    y: jax.Array, plain: jax.Array, seen: jax.Array, kernel: Any, adapter: adapters.KernelAdapter
) -> jax.Array:
    """Returns the output of a linear module with DoRA.

    Args:
      y: its output without the adapter.
      plain: W `seen`, without the bias; `y` has W x, and the bias.
      seen: x, or with some elements dropped.
      kernel: W, plain or quantized.
      adapter: of the module.
    """
    low = output(seen, *adapter[:3], y.shape)
    if quantized.is_quantized(kernel):
        kernel = quantized.dequantize(kernel, y.dtype)
    by = share(kernel, adapter).reshape(y.shape[y.ndim - _trailing(y.shape, adapter.b.shape[-1]) :])
    return (y + (by - 1) * plain + by * low).astype(y.dtype)


def share(kernel: jax.Array, adapter: adapters.KernelAdapter) -> jax.Array:
    """Returns magnitude / ||W + scale B A||, float32[outputs], the norms over inputs. They have no gradient, and W + scale B A is not made:

    ||W + s A B||^2 = ||W||^2 + 2 s sum_r B (A^T W) + s^2 sum_r B ((A^T A) B)        of each output, with A [inputs, r], B [r, outputs]
    """
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    w, a, b = jax.lax.stop_gradient((kernel.reshape(adapter.a.shape[0], -1), adapter.a, adapter.b.astype(jnp.float32)))
    with jax.named_scope("dora"):
        crossed = jnp.matmul(a.astype(w.dtype).T, w, **exact)
        low = jnp.matmul(jnp.matmul(a.T, a, **exact), b, **exact)
        squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=0)
        squares += adapter.scale * jnp.sum(b * (2 * crossed + adapter.scale * low), axis=0)
        return adapters.factor(adapter.magnitude, squares)


def drop(key: jax.Array, x: jax.Array, rate: float, call: int = 0) -> jax.Array:
    """Returns x with the share `rate` of its elements set to 0 and the rest divided by 1 - rate.

    `call` tells the calls with one key apart. The bits are a hash of the key's words, the call and the element's position. JAX's own
    generator has ten times as many operations, which it unrolls for each adapter: a step of 72 adapters then has 70,000 operations, and
    takes minutes to compile.
    """
    words = tree.key_words(key)
    first, second = words.reshape(-1)[:2].astype(jnp.uint32)
    tokens = tiles.tokens()  # of a tile: it drops what all tokens at once would
    position = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    if tokens is not None:
        width = x.size // tokens.size
        position = (tokens[:, None] * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)).reshape(x.shape)
    bits = _mixed(_mixed(position ^ _mixed(first + jnp.uint32(call))) + second)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return jnp.where(bits >= jnp.uint32(threshold), x / (1 - rate), 0).astype(x.dtype)


def _mixed(bits: jax.Array) -> jax.Array:
    """Returns a hash of uint32 values of which every bit depends on all bits (the constants are those of Hash Prospector's triple32)."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 14)


def _leading(shape: tuple[int, ...], inputs: int) -> int:
    """Returns the number of dims before the last ones that have `inputs` elements together."""
    return next(n for n in range(len(shape) - 1, -1, -1) if math.prod(shape[n:]) == inputs)


def _trailing(shape: tuple[int, ...], outputs: int) -> int:
    """Returns the number of last dims that have `outputs` elements together."""
    return next(n for n in range(1, len(shape) + 1) if math.prod(shape[-n:]) == outputs)


def _inputs_of(module: nn.Module) -> int | None:
    """Returns the number of dims that a linear module contracts, the last of its input and the first of its kernel; None for others."""
    if isinstance(module, layers.Linear):
        return module.contracted
    if isinstance(module, nn.Dense):
        return 1
    if isinstance(module, nn.DenseGeneral) and not module.batch_dims:
        axis = (module.axis,) if isinstance(module.axis, int) else tuple(module.axis)
        return len(axis) if axis == tuple(range(-len(axis), 0)) else None
    return None


def _is_mixture(module: nn.Module, method: str) -> bool:
    return isinstance(module, experts.Experts) and method == "__call__"


def _is_table(module: nn.Module, method: str) -> bool:
    return isinstance(module, nn.Embed) and method == "__call__"


def _stacks_of(module: nn.Module) -> dict[str, targets_lib.LinearModule]:
    """Returns the experts of a mixture that was called, by path."""
    found = {}
    for name in expert_matrices.NAMES:
        stored: Any = module.get_variable("params", name)
        if stored is not None and stored.ndim == 3:
            path = "/".join((*module.path, name))
            (count, *shape) = stored.shape
            found[path] = targets_lib.LinearModule(
                path.replace("/", "."), tuple(shape), 1, stack=(count,), is_experts=True
            )
    return found


def _linear(module: nn.Module, x: jax.Array, stored: Mapping[str, jax.Array], inputs: int) -> jax.Array:
    scope = module.scope
    assert scope is not None
    bias = scope.get_variable("params", "bias") if scope.has_variable("params", "bias") else None
    return multiply(x, stored, inputs, getattr(module, "dtype", None), bias)


def multiply(x: jax.Array, stored: Any, inputs: int, dtype: DTypeLike | None, bias: jax.Array | None) -> jax.Array:
    """Returns what a linear module with a quantized kernel returns.

    Args:
      x: float[..., inputs].
      stored: the kernel, an array or quantized; see `ops.quantized`.
      inputs: the number of dims of x that are contracted.
      dtype: of the result; None: that of x.
      bias: added to the result; None for none.
    """
    dtype = dtype or x.dtype
    kernel = quantized.dequantize(stored, dtype) if quantized.is_quantized(stored) else stored.astype(dtype)
    kept, features = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    y = x.astype(dtype).reshape(*kept, -1) @ kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
    y = y.reshape(*kept, *features)
    return y if bias is None else y + bias.astype(dtype)
