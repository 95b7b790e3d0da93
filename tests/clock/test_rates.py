"""Checks the rates of GPUs: the tables' files, and the formulas that read them."""

import dataclasses
import itertools
import json
import pathlib

import pytest

from zerojax.clock import kernels, rates
from zerojax.errors import UserError
from zerojax.plan import targets

TABLES = sorted((pathlib.Path(rates.__file__).parent / "tables").glob("*.json"))
ROUNDING = 1e-12  # of a few float64 operations


def matmul(m, n, k, form="bf16", batch=1):
    return kernels.KernelWork(kernels.MATMUL, form, 2.0 * m * n * k, 2 * (m * k + k * n + m * n), (batch, m, n, k))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_each_figure_of_a_table_is_positive_and_has_a_source(path):
    document = json.loads(path.read_text())
    assert document["name"] == path.stem and document["name"] in targets.TARGETS
    assert all(value > 0 and len(source) > 4 for value, source in document["figures"].values())


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp32"])
def test_no_matmul_is_faster_than_the_data_sheet_and_more_work_takes_longer(path, form):
    own, target = rates.of(path.stem), targets.TARGETS[path.stem]
    peak = target.matrix_rates.get(form, target.matrix_rates["bf16"]).value
    sizes = (512, 1024, 2048, 4096, 8192, 16384)
    cubes = [own.seconds(matmul(size, size, size, form)) for size in sizes]
    assert all(2 * size**3 / seconds < peak for size, seconds in zip(sizes, cubes))
    rows = [own.seconds(matmul(size, 4096, 4096, form)) for size in sizes]
    assert all(low < high for low, high in itertools.pairwise(rows))


def test_more_groups_of_as_many_rows_take_longer_and_never_faster_than_dense():
    own = rates.of("h200")
    for form in ("grouped_rows", "grouped_matrices"):
        times = [own.seconds(matmul(32768, 768, 2048, form, batch=groups)) for groups in (1, 8, 64, 128)]
        assert times == sorted(set(times))
        assert times[0] > own.seconds(matmul(32768, 768, 2048, "bf16"))


def test_groups_of_rows_in_fp8_take_the_time_that_was_measured_and_that_of_16_bits_where_no_rate_is_known():
    work = matmul(32768, 768, 2048, "grouped_rows.fp8", batch=128)
    measured = (820, 674, 668, 832)  # TFLOP/s, raw/experts_fp8_1xh200.txt
    assert work.flops / rates.of("h200").seconds(work) / 1e12 == pytest.approx(sum(measured) / 4, rel=0.01)
    in_16_bits = dataclasses.replace(work, form="grouped_rows")
    assert rates.of("h100").seconds(work) == rates.of("h100").seconds(in_16_bits)


def test_groups_of_rows_in_mxfp4_take_the_time_that_was_measured():
    for columns, measured in ((5760, (2152e-6, 2127e-6)), (2880, (1060e-6, 1125e-6))):  # raw/stored_1xh200.txt
        work = matmul(16384, columns, 2880, "grouped_rows.mxfp4", batch=128)
        work = dataclasses.replace(work, nbytes=128 * columns * 2880 * 17 // 32)
        assert rates.of("h200").seconds(work) == pytest.approx(sum(measured) / 2, rel=0.02)
    work = dataclasses.replace(work, dims=(128, 256, columns, 2880), flops=2.0 * 256 * columns * 2880)
    assert rates.of("h200").seconds(work) == pytest.approx(285e-6, rel=0.05)  # of 64 tokens, which read 7 experts of 8


def test_few_rows_a_group_leave_gradients_of_matrices_to_the_rate_at_which_float32_results_are_written():
    nbytes = 2 * 32768 * (768 + 2048) + 4 * 128 * 768 * 2048
    for name, seconds in (("h200", 379e-6), ("h100", 460e-6)):
        own = rates.of(name)
        work = matmul(32768, 768, 2048, "grouped_matrices", batch=128)
        assert own.seconds(dataclasses.replace(work, nbytes=nbytes)) == pytest.approx(seconds, rel=0.01)


def test_a_rate_is_exact_at_a_known_size_and_between_its_neighbours_elsewhere():
    own = rates.of("h200")
    name = "attention.forward.128"
    low, high = (own.figures[f"{name}.{size}"] for size in (8192, 131072))
    assert own._by_size(name, 8192) == low and own._by_size(name, 131072) == pytest.approx(high, rel=ROUNDING)
    assert own._by_size(name, 32768) == pytest.approx((low + high) / 2, rel=ROUNDING)  # half-way between the logarithms
    assert own._by_size(name, 1) == low and own._by_size(name, 10**7) == pytest.approx(high, rel=ROUNDING)


def test_devices_of_a_host_share_what_its_memory_takes():
    own = rates.of("h200")
    copy = kernels.KernelWork(kernels.TO_HOST, nbytes=1e9)
    alone, four, eight = (own.beside(devices).seconds(copy) for devices in (1, 4, 8))
    assert alone == own.seconds(copy) and alone < four < eight
    bytes_per_second = 8 * 1e9 / (eight - own.figures["link.alpha"])
    assert bytes_per_second == pytest.approx(own.figures["host.to host.8"], rel=ROUNDING)


def test_the_slowest_of_more_devices_is_slower_and_one_waits_for_nobody():
    own = rates.of("h200")
    waits = [own.spread(devices) for devices in (1, 2, 4, 8, 512)]
    assert waits[0] == 0 and all(low < high for low, high in itertools.pairwise(waits))


def test_a_collective_between_hosts_goes_at_the_rate_of_the_network():
    own = rates.of("h200")
    kernel = kernels.KernelWork(kernels.COLLECTIVE, "all-gather", nbytes=1e9, group=tuple(range(8)))
    near, far, alone = (own.seconds(kernel, per_host) for per_host in (0, 4, 1))
    start = 3 * own.figures["alpha"]
    assert near == pytest.approx(start + 1e9 / own.figures["beta"], rel=ROUNDING)
    across = max(1e9 / 4 / own.figures["network"], 1e9 / own.figures["beta"])  # four adapters carry it
    assert far == pytest.approx(start + across, rel=ROUNDING)
    assert alone == pytest.approx(start + 1e9 / own.figures["network"], rel=ROUNDING)


def test_a_dtype_without_a_rate_runs_as_16_bits():
    own = rates.of("h200")
    plain = {name: value for name, value in own.figures.items() if not name.startswith("matmul.fp8")}
    assert dataclasses.replace(own, figures=plain).seconds(matmul(4096, 4096, 4096, "fp8")) == own.seconds(
        matmul(4096, 4096, 4096)
    )


def test_collectives_have_figures_of_their_kind_and_number_of_devices():
    own = rates.of("h200")
    kernel = kernels.KernelWork(kernels.COLLECTIVE, "all-gather", nbytes=1e9, group=tuple(range(4)))
    more = {
        "beta.all-gather.2": 1e11,
        "beta.all-gather.8": 3e11,
        "alpha.all-gather": 1.0,
        "beta.alone.all-gather.4": 4e11,
    }
    found = dataclasses.replace(own, figures={**own.figures, **more})
    assert found.seconds(kernel) == pytest.approx(2.0 + 1e9 / 2e11, rel=ROUNDING)
    assert found.hastened(kernel) == pytest.approx((2.0 + 1e9 / 4e11) / (2.0 + 1e9 / 2e11), rel=ROUNDING)
    assert found.hastened(kernel, per_host=1) == 1.0
    other = dataclasses.replace(kernel, form="all-reduce")
    assert found.seconds(other) == own.seconds(other)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_no_kernel_of_a_token_reads_faster_than_the_memory_and_figures_of_tokens_are_theirs_alone(path):
    own, memory = rates.of(path.stem), targets.TARGETS[path.stem].memory_bandwidth.value
    token, step = own.of_tokens(), matmul(16, 14336, 4096)
    for form in ("one_token.bf16", "one_token.int8", "narrow.bf16", "narrow.nf4"):
        sizes = [token.seconds(kernels.KernelWork(kernels.MATMUL, form, nbytes=nbytes)) for nbytes in (1e3, 1e7, 1e9)]
        assert token.figures["least"] <= sizes[0] < sizes[1] < sizes[2] and sizes[2] > 1e9 / memory
    assert step.nbytes / memory < token.seconds(step)
    assert own.seconds(step) == dataclasses.replace(
        own, figures={name: value for name, value in own.figures.items() if not name.startswith(rates.TOKEN)}
    ).seconds(step)
    assert token.launch(kernels.COLLECTIVE) > token.launch(kernels.MATMUL) > 0 == own.launch(kernels.MATMUL)


def test_few_rows_read_the_weights_of_the_groups_that_they_are_in():
    token = rates.of("h200").of_tokens()
    weights = 128 * 2048 * 768 * 2
    times = [
        token.seconds(
            kernels.KernelWork(kernels.MATMUL, "grouped_rows", 2.0 * rows * 2048 * 768, weights, (128, rows, 768, 2048))
        )
        for rows in (8, 64, 4096)
    ]
    assert times[0] < 0.12 * times[2] < times[1] < times[2] and times[2] > weights / token.figures["bandwidth"]


def test_a_file_of_rates_is_of_the_target_and_complete_or_refused_in_one_line(tmp_path):
    table = json.loads((TABLES[0].parent / "h100.json").read_text())
    figures = {**table["figures"], "alpha": [1e-6, "measured: here"]}
    path = tmp_path / "rates.json"
    path.write_text(rates.as_text(table | {"figures": figures}))
    found = rates.measured(path, "h100")
    path.write_text(rates.as_text(table | {"figures": {**figures, "error.worst": [0.1, ""]}}))
    assert rates.measured(path, "h100").errors is None
    without_fp8 = json.loads((TABLES[0].parent / "a100.json").read_text())
    (tmp_path / "a100.json").write_text(rates.as_text(without_fp8))
    assert rates.measured(tmp_path / "a100.json", "a100").name == "a100"
    assert found.figures["alpha"] == 1e-6 and found.sources["alpha"] == "measured: here" and found.name == "h100"
    less = {name: figure for name, figure in figures.items() if name != "alpha"}
    for target, content, why in (
        ("h200", table, "holds rates of 'h100', and --target is h200"),
        ("h100", table | {"figures": less}, "has no figure 'alpha'"),
        ("h100", table | {"figures": {**figures, "beta": [0, ""]}}, "'beta' must be from .*, and is 0;"),
        ("h100", table | {"figures": {**figures, "beta": [True, ""]}}, "is no table of rates .*True.* is no number"),
        ("h100", table | {"figures": {**figures, "cores": [0.5, ""]}}, "'cores' must be from 1.32 to"),
        (
            "h100",
            table | {"figures": {**figures, "matmul.bf16.512": [700.0, ""]}},
            "'matmul.bf16.512' must be from 6.62e",
        ),
        (
            "h100",
            table | {"figures": {**figures, "beta.all-gather.8": [1.0, ""]}},
            "'beta.all-gather.8' must be from 1.29e",
        ),
        ("h100", table | {"figures": {**figures, "gap": [1.0, ""]}}, "'gap' must be from 1e-08 to 0.0001"),
        (
            "h100",
            table | {"figures": {**figures, "matmul.bf16.\u00b2": [1, ""]}},
            "is no figure of a table of rates; remove",
        ),
        ("h100", table | {"figures": {**figures, "host.both.0": [1, ""]}}, "'host.both.0' is no figure"),
        ("h100", {"name": "h100"}, "is no table of rates"),
        ("h100", [], "is no table of rates"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=why) as error:
            rates.measured(path, target)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is no table of rates"):
        rates.measured(tmp_path, "h100")
