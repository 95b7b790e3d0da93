"""Holds how fast kinds of GPUs run kernels, collectives and copies. This module reads the tables in `tables/`, each figure with its source.

matmul       flops / (rate of its dtype and smallest dim x share of the multiprocessors that its tiles fill)
             of groups of rows: a rate of their own x the share of full tiles
attention    flops / rate of its direction, head dim and number of keys
elementwise  bytes / bandwidth
collective   alpha x log2(devices) + bytes / beta; beta.alone while no kernel runs beside it
copy         alpha + bytes / the link's rate in its direction, or in both at once
of a token   kernels that read a weight or a cache once: start + bytes / a bandwidth of their own

Of a figure that is known at several sizes the last part of the name is the size. Between sizes it is interpolated. Figures of collectives
may be those of one kind ("beta.all-gather"), and of several numbers of devices ("beta.all-gather.8"). Figures of "token." are those of
programs that generate (`of_tokens`), and no train step reads them. `zerojax calibrate` writes such a table.
"""

import dataclasses
import functools
import json
import math
import os
import re
import statistics
from collections.abc import Mapping
from importlib import resources
from typing import Any

from zerojax import bounded, errors
from zerojax.clock import kernels as kernels_lib
from zerojax.errors import UserError

HALF_TILE = {"grouped_rows": 64, "grouped_matrices": 32}  # rows, of the tiles of `pallas_kernels.grouped`
HALF_TILE_OF_FEW = 8  # of `pallas_kernels.grouped_mxfp4`, where a group has 16 rows or fewer
_SIZE = r"[1-9][0-9]{0,8}"
# names of figures whose last parts are sizes, and of those of kinds of collectives
_SIZED = re.compile(
    rf"(alpha|beta|beta\.alone)(\.[a-z-]+(\.{_SIZE})?)?|matmul\.(bf16|fp8|fp32)\.{_SIZE}|attention\.(forward|backward)\.{_SIZE}\.{_SIZE}"
    rf"|host\.(both|to host|from host)\.{_SIZE}"
)
MEASURED = "measured: "  # the beginning of the source of a figure of `zerojax calibrate`
# Times that a figure may be less or more than its table's; some hosts share 1 Gbit/s
USUAL, FAR = 100, {"network": 10_000}
TOKEN = "token."  # the beginning of the names of figures that only programs of generation have
FEW = 128  # rows of a matmul that reads a weight once
SHORT = 512  # elements that a matmul sums over; of so few it is slower in a step ("matmul.short"), though not alone in `zerojax calibrate`


@dataclasses.dataclass(frozen=True)
class GpuRates:
    """The rates of one kind of GPU."""

    name: str  # the target's name
    # name -> value, in FLOP/s, bytes/s, seconds or shares; the names are those of the table's file
    figures: Mapping[str, float]
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> where the figure is from

    @property
    def gap(self) -> float:
        """Returns the seconds from the end of a kernel to the start of the next."""
        return self.figures["gap"]

    def beside(self, devices: int) -> "GpuRates":
        """Returns the rates of one device when so many of one host copy at once: they share what its memory takes and gives."""
        shared = {}
        for kind in (*kernels_lib.COPIES, "both"):
            share = self._by_size(f"host.{kind}", devices) / devices
            shared[f"link.{kind}"] = min(self.figures[f"link.{kind}"], share)
        return dataclasses.replace(self, figures={**self.figures, **shared})

    def of_tokens(self) -> "GpuRates":
        """Returns the rates in programs that add a token, or read a prompt: figures of "token." replace those of steps."""
        own = {name.removeprefix(TOKEN): value for name, value in self.figures.items() if name.startswith(TOKEN)}
        return dataclasses.replace(self, figures={**self.figures, **own})

    def spread(self, devices: int) -> float:
        """Returns by how much the slowest of so many devices is slower than their mean; the others wait for it.

        It is the expected maximum of normal variates (Blom's approximation).
        """
        if devices == 1:
            return 0.0
        return self.figures["spread"] * statistics.NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    @property
    def errors(self) -> dict[str, float] | None:
        """Returns the "median" and the "worst" relative error over "settings" measured ones that are not fitted; or None."""
        names = ("median", "worst", "settings")
        return {name: self.figures[f"error.{name}"] for name in names} if "error.worst" in self.figures else None

    def launch(self, kind: str) -> float:
        """Returns the seconds that the host takes to launch a kernel of a kind outside of a CUDA graph; 0 if it is unknown."""
        return self.figures.get(f"launch.{kind}", self.figures.get("launch", 0.0))

    def hastened(self, kernel: kernels_lib.KernelWork, per_host: int = 0) -> float:
        """Returns the time of a collective while no kernel runs, over that beside kernels; between hosts it is the same."""
        if per_host:
            return 1.0
        start, beta = self._start(kernel), self._of_collective("beta", kernel)
        alone = max(beta, self._of_collective("beta.alone", kernel, beta))
        return (start + kernel.nbytes / alone) / (start + kernel.nbytes / beta)

    def slowdown(self, kernel: kernels_lib.KernelWork) -> float:
        """Returns how many times as long a kernel takes while a collective runs."""
        return self.figures.get(f"slowdown.{kernel.kind}", 1.0)

    def seconds(self, kernel: kernels_lib.KernelWork, per_host: int = 0, is_duplex: bool = False) -> float:
        """Returns the seconds of a kernel, a collective or a copy alone.

        Args:
          kernel: the work.
          per_host: of a collective between hosts, the devices of each host; 0: it stays on one host.
          is_duplex: of a copy, whether another runs in the other direction.
        """
        return _SECONDS[kernel.kind](self, kernel, per_host, is_duplex)

    def _streamed(self, kernel: kernels_lib.KernelWork) -> float:
        """Returns the time of a kernel of a token, which reads a weight or a cache once."""
        bandwidth = self.figures.get(f"bandwidth.{kernel.form}", self.figures["bandwidth"])
        start = self.figures.get(f"start.{kernel.form.partition('.')[0]}", 0.0)
        return max(self.figures["least"], start + kernel.nbytes / bandwidth)

    def _matmul(self, kernel: kernels_lib.KernelWork, *_: Any) -> float:
        if not kernel.dims:
            return self._streamed(kernel)
        batch, m, n, k = kernel.dims
        start, of_groups = self.figures.get("start.matmul", 0.0), kernel.form.partition(".")[0]
        if of_groups in HALF_TILE:  # groups, whose last tiles are half full
            own = self.figures.get(f"matmul.{kernel.form}", self.figures[f"matmul.{of_groups}"])
            used = 1 - (1 - 1 / batch) ** m if of_groups == "grouped_rows" else 1.0  # of groups: they have rows
            has_few = kernel.form == "grouped_rows.mxfp4" and m <= 16 * batch
            half = HALF_TILE_OF_FEW if has_few else HALF_TILE[of_groups]
            own *= m / (m + used * batch * half)
            known = (f"bandwidth.{name}" for name in (kernel.form, of_groups))
            bandwidth = next((self.figures[one] for one in known if one in self.figures), self.figures["bandwidth"])
            return start + max(kernel.flops / own, used * kernel.nbytes / bandwidth)
        if start and min(m, n) <= FEW:
            rate = self._by_size(self._of_dtype(kernel.form), 0)
            return start + max(kernel.flops / rate, kernel.nbytes / self.figures["bandwidth"])
        rate = self._by_size(self._of_dtype(kernel.form), min(m, n, k))
        if k <= SHORT:
            rate = min(rate, self.figures["matmul.short"])
        rate *= filled(batch, m, n, k, int(self.figures["cores"]))
        return start + max(kernel.flops / rate, kernel.nbytes / self.figures["bandwidth"])

    def _of_dtype(self, form: str) -> str:
        """Returns the name of the rates of matmuls of a dtype."""
        return f"matmul.{form}" if f"matmul.{form}" in self._sizes else "matmul.bf16"

    def _by_size(self, name: str, size: float) -> float:
        """Returns a figure that is known at several sizes, interpolated between the logarithms of the sizes."""
        known = self._sizes[name]
        nearest = min(max(size, known[0]), known[-1])
        place = max(1, next((i for i, one in enumerate(known) if one >= nearest), 1))
        low, high = known[place - 1], known[min(place, len(known) - 1)]
        share = math.log(nearest / low) / math.log(high / low) if high > low else 0.0
        return self.figures[f"{name}.{low}"] * (1 - share) + self.figures[f"{name}.{high}"] * share

    @functools.cached_property
    def _sizes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name in self.figures:
            stem, _, size = name.rpartition(".")
            if size.isdigit():
                found.setdefault(stem, []).append(int(size))
        return {stem: sorted(sizes) for stem, sizes in found.items()}

    def _attention(self, kernel: kernels_lib.KernelWork, *_: Any) -> float:
        if not kernel.dims:
            return self._streamed(kernel)
        keys, head_dim = kernel.dims[-2:]
        name = f"attention.{kernel.form}"
        dim = min((d for d in self._dims(name)), key=lambda d: (abs(d - head_dim), d))
        rate = self._by_size(f"{name}.{dim}", keys) * min(1.0, head_dim / dim)
        return max(kernel.flops / rate, kernel.nbytes / self.figures["bandwidth"])

    def _dims(self, name: str) -> list[int]:
        """Returns the head dims for which the rates of attention are known."""
        stems = (stem.rpartition(".") for stem in self._sizes)
        return [int(dim) for stem, _, dim in stems if stem == name]

    def _elementwise(self, kernel: kernels_lib.KernelWork, *_: Any) -> float:
        bandwidth = self.figures.get(f"bandwidth.{kernel.form}", self.figures["bandwidth"])
        seconds = max(self.figures["least"], kernel.nbytes / bandwidth)
        return seconds * (self.figures["unfused"] if kernel.form == kernels_lib.FUSED else 1.0)

    def _collective(self, kernel: kernels_lib.KernelWork, per_host: int, _: bool) -> float:
        seconds = kernel.nbytes / self._of_collective("beta", kernel)
        if per_host:
            far = kernel.nbytes / per_host / self.figures["network"]
            seconds = far if per_host == 1 else max(seconds, far)
        return self._start(kernel) + seconds

    def _start(self, kernel: kernels_lib.KernelWork) -> float:
        return self._of_collective("alpha", kernel) * max(1.0, math.log2(len(kernel.group)))

    def _of_collective(self, name: str, kernel: kernels_lib.KernelWork, default: float | None = None) -> float:
        """Returns a figure of a collective's kind and number of devices, as far as it is known by them."""
        own = f"{name}.{kernel.form}"
        if own in self._sizes:
            return self._by_size(own, len(kernel.group))
        found = self.figures.get(own, self.figures.get(name, default))
        assert found is not None
        return found

    def _copy(self, kernel: kernels_lib.KernelWork, _: int, is_duplex: bool) -> float:
        name = "link.both" if is_duplex else f"link.{kernel.kind}"
        return self.figures["link.alpha"] + kernel.nbytes / self.figures[name]


_SECONDS = {
    kernels_lib.MATMUL: GpuRates._matmul,
    kernels_lib.ATTENTION: GpuRates._attention,
    kernels_lib.ELEMENTWISE: GpuRates._elementwise,
    kernels_lib.COLLECTIVE: GpuRates._collective,
    kernels_lib.TO_HOST: GpuRates._copy,
    kernels_lib.FROM_HOST: GpuRates._copy,
}


def filled(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """Returns the share of the multiprocessors that a matmul's tiles fill, in all waves. A long k is shared by several."""
    best = 0.0
    for rows, columns, share in ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75)):
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        used = (m / rows / math.ceil(m / rows)) * (n / columns / math.ceil(n / columns))
        for parts in (1, 2, 4, 8):
            if parts > 1 and k / parts < 4096:
                break
            waves = tiles * parts / cores
            best = max(best, share * used * waves / math.ceil(waves) * (1.0 if parts == 1 else 0.95))
    return best


@functools.cache
def of(name: str) -> GpuRates | None:
    """Returns the rates of a target by its name ("h200"); None if there are none."""
    path = resources.files("zerojax.clock") / "tables" / f"{name}.json"
    return read(path.read_text()) if path.is_file() else None


def read(text: str) -> GpuRates:
    """Returns the rates in the text of a table."""
    document = json.loads(text)
    figures = {name: value for name, (value, _) in document["figures"].items()}
    sources = {name: source for name, (_, source) in document["figures"].items()}
    return GpuRates(document["name"], figures, sources)


def as_text(document: Mapping[str, Any]) -> str:
    """Returns a table as the text of its file: a line for each figure."""
    rows = [f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in document["figures"].items()]
    head = {key: value for key, value in document.items() if key != "figures"}
    return json.dumps(head)[:-1] + ', "figures": {\n' + ",\n".join(rows) + "\n}}\n"


def measured(path: str | os.PathLike[str], target: str) -> GpuRates:
    """Returns the rates in a file of `zerojax calibrate`.

    Args:
      path: the file.
      target: the name of the GPUs to which they are to apply.

    Raises:
      UserError: the file cannot be read, is no table of rates, or is one of other GPUs.
    """
    place = f"--rates {path}"
    try:
        document = bounded.parse_json(bounded.read_text(path), is_strict=True)
        figures = {one: (_number(value), str(source)) for one, (value, source) in document["figures"].items()}
        name = str(document["name"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(
            f"{place}: is no table of rates ({errors.one_line(error)}); zerojax calibrate writes one"
        ) from error
    if name != target:
        raise UserError(
            f"{place}: holds rates of {errors.shown(name)}, and --target is {target}; measure that kind of GPU"
        )
    common, own = of("h200"), of(target)
    assert common is not None
    table = common if own is None else own  # an A100 has no fp8
    # Read by no step, or only beside a figure for all dtypes
    spared = ("error.", TOKEN, "matmul.grouped_rows.", "bandwidth.grouped_rows.")
    needed = [one for one in common.figures if one in table.figures and not one.startswith(spared)]
    if missing := [one for one in needed if one not in figures]:
        raise UserError(f"{place}: has no figure {missing[0]!r}; zerojax calibrate writes all of them")
    # errors are those of the table's own rates
    figures = {one: figure for one, figure in figures.items() if not one.startswith("error.")}
    if unknown := next((one for one in figures if one not in table.figures and not _SIZED.fullmatch(one)), None):
        raise UserError(f"{place}: {errors.shown(unknown)} is no figure of a table of rates; remove it")
    for one, (value, _) in figures.items():
        least, most = _believed(one, table.figures)
        if not least <= value <= most:
            raise UserError(
                f"{place}: {errors.shown(one)} must be from {least:.3g} to {most:.3g}, which is far from the table's, and is {value:g}; "
                "measure again with zerojax calibrate"
            )
    return read(json.dumps({"name": name, "figures": figures}))


def _believed(name: str, known: Mapping[str, float]) -> tuple[float, float]:
    """Returns the least and the most that a figure may be: so many times less and more than those of its kind in a table."""
    far, kind = FAR.get(name, USUAL), name
    while not (alike := [value for one, value in known.items() if one == kind or one.startswith(f"{kind}.")]):
        kind = kind.rpartition(".")[0]
    return min(alike) / far, max(alike) * far


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{errors.shown(value)} is no number")
    return float(value)
