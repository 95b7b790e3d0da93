"""Times the kernels that pack weights and gradients for a wire, beside their plain twins, on one device.

    python scripts/bench_wire.py

2 GiB of bf16 in blocks of 256 are packed; four packed arrays are unpacked and added. Codes must be those of the twin, with a NaN and
an infinity in two blocks. GB/s counts what a kernel must read and write once. A time is the median of ten calls, which the host waits for.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import wire

BLOCKS, PARTS, CALLS = 1 << 22, 4, 10


def main() -> None:
    """Prints the table."""
    scales = jnp.exp(jax.random.normal(jax.random.key(1), (BLOCKS, 1))).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (BLOCKS, wire.BLOCK), jnp.bfloat16) * scales
    x = x.at[5, 3].set(jnp.nan).at[9, 200].set(jnp.inf)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':<14}{'kernel ms':>12}{'GB/s':>8}{'twin ms':>10}{'differs':>12}")
    for bits in (8, 4):
        pack = {
            how: jax.jit(lambda x, how=how, bits=bits: wire.pack(x, bits, implementation=how))
            for how in ("pallas", "jnp")
        }
        packed, expected = pack["pallas"](x), pack["jnp"](x)
        moved = x.nbytes + sum(part.nbytes for part in packed)
        codes = bool(np.array_equal(packed[0], expected[0]) and np.array_equal(packed[1], expected[1], equal_nan=True))
        show(f"pack, {bits} bits", pack, (x,), moved, "no" if codes else "YES")
        parts = tuple(jnp.stack([part] * PARTS) for part in packed)
        add = {
            how: jax.jit(lambda c, s, how=how, bits=bits: wire.unpack_sum(c, s, bits, implementation=how))
            for how in ("pallas", "jnp")
        }
        found, wanted = (np.asarray(add[how](*parts)) for how in ("pallas", "jnp"))
        finite = np.isfinite(wanted)
        largest = np.abs(found - wanted)[finite].max() / np.abs(wanted[finite]).max()
        moved = sum(part.nbytes for part in parts) + found.nbytes
        show(
            f"sum, {bits} bits",
            add,
            parts,
            moved,
            f"{largest:.1e}" if np.array_equal(finite, np.isfinite(found)) else "YES",
        )


def show(
    name: str, ways: dict[str, Callable[..., object]], arrays: tuple[jax.Array, ...], moved: int, differs: str
) -> None:
    """Prints a row: the times of the kernel and its twin, and by how much of the largest value their results differ."""
    kernel, twin = (timed(ways[how], arrays) for how in ("pallas", "jnp"))
    print(f"{name:<14}{kernel * 1e3:>12.2f}{moved / kernel / 1e9:>8,.0f}{twin * 1e3:>10.2f}{differs:>12}", flush=True)


def timed(function: Callable[..., object], arrays: tuple[jax.Array, ...]) -> float:
    """Returns the median seconds of a call."""
    jax.block_until_ready(function(*arrays))
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
