"""Adapters in NNX models. This module gives linear modules a class that adds the adapter's output, in place.

NNX has no way to intercept calls. The new class is a subclass of the module's own, so `isinstance`, attributes and paths stay as they are.
An adapter's weights are `nnx.LoRAParam`s beside the kernel, which NNX's own filters find.
Dropout follows `model.train()` and `model.eval()`.
"""

import functools
from typing import Any

import jax
from flax import nnx

from zerojax.lora import adapters, linen
from zerojax.lora import settings as settings_lib
from zerojax.lora import targets as targets_lib
from zerojax.lora.targets import MAGNITUDE, A, B


def add(model: nnx.Module, lora: settings_lib.Lora, key: jax.Array) -> nnx.Module:
    """Adds fresh adapters to a model in place, and returns it; see `zerojax.add_lora`."""
    modules: dict[str, Any] = {
        _joined(path): module for path, module in nnx.iter_modules(model) if _inputs_of(module) is not None
    }
    linear = {path: _linear(path, module) for path, module in modules.items()}
    weights = [_joined(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    chosen = targets_lib.choose(lora, linear, weights)
    for path, module in modules.items():
        if path in chosen.quantized:
            one = linear[path]
            stored = adapters.quantize_stack(module.kernel[...], lora.quantize, len(one.stack), one.inputs)
            module.kernel = nnx.Dict({name: nnx.Param(part) for name, part in stored.items()})
        if path in chosen.adapted:
            for name, shape in chosen.shapes(path).items():
                if name == MAGNITUDE:
                    kernel = _stored(module) if path in chosen.quantized else module.kernel[...]
                    leaf = adapters.magnitude(kernel, shape, len(linear[path].stack))
                else:
                    how = adapters.beginning(name, is_embedding=False)
                    leaf = adapters.draw(key, adapters.number_of(f"{path}/{name}"), shape, how)
                setattr(module, name, nnx.LoRAParam(leaf))
            module.lora_scale = chosen.scale(path)
            own = jax.random.fold_in(key, adapters.number_of(path))
            module.lora_dropout = nnx.Dropout(lora.dropout, rngs=nnx.Rngs(dropout=own) if lora.dropout else None)
            if lora.dropout and linear[path].stack:
                module.lora_dropout.rngs = module.lora_dropout.rngs.split(linear[path].stack)
        if path in chosen.quantized or path in chosen.adapted:
            cls: Any = type(module)
            module.__class__ = _adapted(cls)
    return model


@functools.cache
def _adapted(cls: type) -> type:
    """Returns a subclass whose calls add the adapter's output and read quantized kernels."""

    def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        is_coded = isinstance(self.kernel, nnx.Dict)
        y = _coded(self, x) if is_coded else cls.__call__(self, x, *args, **kwargs)
        if not hasattr(self, A):
            return y
        seen = self.lora_dropout(x)
        a, b = getattr(self, A)[...], getattr(self, B)[...]
        if not hasattr(self, MAGNITUDE):
            return (y + linen.output(seen, a, b, self.lora_scale, y.shape)).astype(y.dtype)
        again = y if seen is x else _coded(self, seen) if is_coded else cls.__call__(self, seen, *args, **kwargs)
        bias = getattr(self, "bias", None)
        plain = again if bias is None else again - bias[...]
        kernel = _stored(self) if is_coded else self.kernel[...]
        adapter = adapters.KernelAdapter(a, b, self.lora_scale, getattr(self, MAGNITUDE)[...])
        return linen.with_magnitude(y, plain, seen, kernel, adapter)

    return type(f"Adapted{cls.__name__}", (cls,), {"__call__": call, "__doc__": cls.__doc__})


def _coded(module: Any, x: jax.Array) -> jax.Array:
    """Returns what a linear module returns, with a quantized kernel."""
    bias = getattr(module, "bias", None)
    inputs = _inputs_of(module)
    assert inputs is not None
    return linen.multiply(x, _stored(module), inputs, module.dtype, None if bias is None else bias[...])


def _stored(module: Any) -> dict[str, jax.Array]:
    return {name: variable[...] for name, variable in module.kernel.items()}


def _linear(path: str, module: Any) -> targets_lib.LinearModule:
    inputs = _inputs_of(module)
    assert inputs is not None
    shape = tuple(module.kernel.shape)
    dims = len(shape) - sum(1 if isinstance(n, int) else len(n) for n in (module.in_features, module.out_features))
    return targets_lib.LinearModule(path.replace("/", "."), shape[dims:], inputs, stack=shape[:dims])


def _inputs_of(module: nnx.Module) -> int | None:
    """Returns the number of dims that a linear module contracts, the last of its input; None for others."""
    if isinstance(module, nnx.Linear):
        return 1
    if isinstance(module, nnx.LinearGeneral) and not module.batch_axis:
        axis = (module.axis,) if isinstance(module.axis, int) else tuple(module.axis)
        return len(axis) if axis == tuple(range(-len(axis), 0)) else None
    return None


def _joined(path: tuple) -> str:
    return "/".join(map(str, path))
