"""Checks that equal losses pass and others do not. This module tests zerojax.commands.verify."""

import dataclasses
import json
import pathlib
import re

import pytest
import runs

from zerojax import precision
from zerojax.commands import verify
from zerojax.trainer.card import document, past

DEVICES = {"platform": "cpu", "kind": "cpu", "count": 8}
CARD = {
    "schema": 1,
    "devices": DEVICES,
    "versions": {"jax": "0.10.2"},
    "planned_peak_bytes": 2**20,
    "tokens_per_second": 1000.0,
}
LOSSES = {"loss": [3.0, 2.5, 2.0], "grad_norm": [1.0, 0.9, 0.8]}
AXES = ("pipe", "replica", "context", "model", "expert")


@pytest.fixture
def call(run_main):
    def called(*words):
        runs.forget_flags()
        return run_main(verify, *words)

    yield called
    runs.forget_flags()


@pytest.fixture
def trained(monkeypatch):
    """Returns {stage, "host" or an axis: what its run gives}, a list of the flags of each run, and makes runs give it."""
    given, started = {}, []

    def train(words, _):
        flags = dict(word.split("=", 1) for word in words)
        started.append(flags)
        on_host = flags["--config.offload.optimizer"] == "host"
        kind = next((axis for axis in AXES if f"--config.mesh.{axis}" in flags), "host" if on_host else None)
        found = given.get(kind or int(flags["--config.zero.stage"]), LOSSES)
        if isinstance(found, tuple):
            return found
        folder = pathlib.Path(flags["--workdir"])
        folder.mkdir(parents=True)
        document.write(folder, CARD)
        records = [{"step": step, **dict(zip(found, values))} for step, values in enumerate(zip(*found.values()), 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, ""

    monkeypatch.setattr(verify, "_train", train)
    return given, started


ARGUMENTS = ("--config=configs/zero3.py", "--config.precision=fp32", "--steps=3")


def with_change(name, step, factor):
    values = list(LOSSES[name])
    values[step] *= factor
    return {**LOSSES, name: values}


def test_equal_losses_are_proven_and_each_setting_has_its_flags(call, trained):
    status, out, _ = call(*ARGUMENTS, "--config.optimizer.warmup_steps=20")
    assert status == 0 and out.endswith("11 of 11 settings give the losses of setting 0\n") and "1.00 MiB" in out
    _, started = trained
    assert [(run["--config.zero.stage"], run["--config.offload.params"]) for run in started] == [
        *((str(stage), "none") for stage in range(4)),
        ("3", "none"),
        ("3", "host"),
        *[("3", "none")] * 5,
    ]
    meshes = [
        {axis: run[f"--config.mesh.{axis}"] for axis in (*AXES, "data") if f"--config.mesh.{axis}" in run}
        for run in started
    ]
    assert meshes == [{}] * 6 + [{axis: "2", "data": "-1"} for axis in AXES]
    assert {(run["--config.steps"], run["--config.optimizer.warmup_steps"]) for run in started} == {("3", "3")}
    assert (
        len({run["--config.data.dir"] for run in started}) == 1 and not pathlib.Path(started[0]["--workdir"]).exists()
    )


@pytest.mark.parametrize(
    "change",
    [
        with_change("loss", 2, 1 + 3e-5),
        with_change("loss", 0, 1 + 3e-6),
        with_change("grad_norm", 1, 8),
        with_change("loss", 1, float("nan")),
    ],
    ids=["a loss", "the first loss", "gradients eight times too large", "not finite"],
)
def test_what_rounding_does_not_explain_differs_and_the_status_is_1(call, trained, change):
    trained[0][2] = change
    status, out, _ = call(*ARGUMENTS, "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"]
    assert [row["setting"] for row in found["rows"] if row["verdict"] == "differs"] == ["2"]
    (row,) = [row for row in found["rows"] if row["verdict"] == "differs"]
    assert re.fullmatch(r"(losses|norms) from step \d on: \S+ for [\d.]+", row["line"])
    assert "10 of 11 settings give the losses of setting 0; 1 differs" in call(*ARGUMENTS)[1]


def test_rounding_is_allowed(call, trained):
    trained[0][2] = with_change("loss", 2, 1 + 5e-6)
    assert call(*ARGUMENTS)[0] == 0


def test_a_setting_that_cannot_run_here_is_told_and_does_not_fail_the_others(call, trained):
    trained[0][0] = (2, "zerojax: out of device memory: the step needs 90 GiB, use more devices\n")
    trained[0]["host"] = (2, "a warning\nzerojax: offload.optimizer: this backend has no host memory\n")
    status, out, _ = call(*ARGUMENTS)
    assert status == 0 and "3+params: offload.optimizer: this backend has no host memory" in out
    assert out.endswith("8 of 11 settings give the losses of setting 1; 3 cannot run here\n")
    trained[0][3] = (-6, "abort\n")
    status, out, _ = call(*ARGUMENTS)
    assert status == 1 and "3: ended with status -6: abort" in out
    for kind in (*range(4), *AXES):
        trained[0][kind] = (2, "zerojax: out of device memory\n")
    assert call(*ARGUMENTS)[0] == 1


def test_a_config_with_an_offload_of_its_own_adds_a_setting(call, trained):
    call(*ARGUMENTS, "--config.zero.stage=2", "--config.offload.optimizer=host", "--config.offload.chunk_bytes=1000000")
    found = [
        (run["--config.zero.stage"], run["--config.offload.optimizer"], run["--config.offload.chunk_bytes"])
        for run in trained[1]
    ]
    assert found[-1] == ("2", "host", "1000000") and len(found) == 12 and found[3] == ("3", "none", str(256 << 20))


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "--config: is missing"),
        (("--config=configs/zero9.py",), "--config configs/zero9.py: there is no such file"),
        ((*ARGUMENTS, "--config.stepz=3"), "unknown config key 'stepz'; did you mean 'steps'?"),
        ((*ARGUMENTS, "--config.zero.stage=7"), "config.zero.stage: must be one of 0, 1, 2, 3"),
        ((*ARGUMENTS, "--only=0,4"), "--only: '4' is no setting; known: 0, 1, 2, 3, 3+optimizer, 3+params, 3+pipe=2, "),
        ((*ARGUMENTS, "--only=3"), "--only: names '3' alone"),
        ((*ARGUMENTS, "--steps=1"), "'1' is no number of steps from 2 to 10000"),
        ((*ARGUMENTS, "--keep=docs"), "--keep: 'docs' exists"),
        ((*ARGUMENTS, "--save=docs"), "--save docs: is a folder"),
        (("--against=cpus",), "--against: 'cpus' is no file, and not shipped; did you mean 'cpu'?"),
        (("--against=cpu", "--steps=3"), "--steps: --against takes it from its file; omit --steps"),
        (("--against=cpu", "--config=zero3"), "--config: --against takes it from its file"),
        ((*ARGUMENTS, "--what"), "Unknown command line flag 'what'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(call, trained, words, expected):
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and expected in err, err


def test_one_of_several_processes_is_refused(call, trained, monkeypatch):
    for name, value in {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
        "JAX_COORDINATOR_ADDRESS": "a:1",
    }.items():
        monkeypatch.setenv(name, value)
    assert "is started as one of several processes by Open MPI; start it once" in call(*ARGUMENTS)[2]


def test_a_config_that_no_stage_takes_is_refused_with_its_line(call, trained):
    trained[0][0] = (2, "zerojax: config.mesh: replica 1 x data 16 x model 1 = 16 devices, but there are 8\n")
    status, _, err = call(*ARGUMENTS)
    assert status == 2 and err == "zerojax: config.mesh: replica 1 x data 16 x model 1 = 16 devices, but there are 8\n"
    assert len(trained[1]) == 1


@pytest.fixture
def kept(call, trained, tmp_path):
    """Returns the file of losses that three steps gave, kept by --save."""
    path = tmp_path / "losses.json"
    status, _, _ = call(*ARGUMENTS, "--config.mesh.model=2", f"--save={path}")
    assert status == 0
    trained[1].clear()
    return path


def test_kept_losses_are_compared_with_every_setting_by_one_flag(call, trained, kept):
    status, out, err = call(f"--against={kept}")
    assert (status, err) == (0, "") and f"11 of 11 settings give the losses of {kept} (8 x cpu, jax 0.10.2)\n" in out
    flags = trained[1][0]
    assert (
        flags["--config.precision"] == "fp32" and flags["--config.steps"] == "3" and flags["--config.mesh.model"] == "2"
    )
    assert "data.dir" not in json.loads(kept.read_text())["config"]
    assert call(f"--against={kept}", "--only=2")[0] == 0


@pytest.mark.parametrize("change", [with_change("loss", 2, 1 + 3e-5), with_change("grad_norm", 1, 1 + 3e-4)])
def test_a_setting_that_parts_from_kept_losses_is_named_with_its_step(call, trained, kept, change):
    trained[0]["context"] = change
    status, out, _ = call(f"--against={kept}", "--json")
    rows = {row["setting"]: row for row in json.loads(out)["rows"]}
    assert status == 1 and [name for name, row in rows.items() if row["verdict"] == "differs"] == ["3+context=2"]
    assert re.match("losses from step 3 on: 2.00006 for 2|norms from step 2 on: ", rows["3+context=2"]["line"])


def test_kept_losses_of_which_a_number_is_wrong_are_refused_or_differ_everywhere(call, trained, kept):
    right = kept.read_text()
    kept.write_text(right.replace("2.5", "2.501"))
    status, _, err = call(f"--against={kept}")
    assert status == 2 and "is altered (its checksum differs)" in err and not trained[1]
    saved = past.read(str(write(kept, right)))
    past.write(kept, dataclasses.replace(saved, losses=[3.0, 2.501, 2.0]))
    status, out, _ = call(f"--against={kept}")
    assert status == 1 and out.count("losses from step 2 on: 2.5 for 2.501") == 11


def write(path, text):
    path.write_text(text)
    return path


def test_losses_that_differ_are_not_kept(call, trained, tmp_path):
    trained[0][2] = with_change("loss", 2, 1.1)
    status, _, err = call(*ARGUMENTS, f"--save={tmp_path / 'new.json'}")
    assert (
        status == 1
        and "is not written, since the settings do not agree" in err
        and not (tmp_path / "new.json").exists()
    )


def test_the_shipped_losses_hold_for_every_setting_and_fall(call, trained):
    known = {setting.name for setting in verify.settings(runs.config())}
    held = {
        "cpu": (known - {"3+expert=2"}, verify.KEPT_STEPS),
        "cpu_experts": (known, 30),
        "h200_bf16": ({"0", "3", "3+optimizer"}, 50),  # one device
    }
    assert past.names() == [*held]
    for name, (settings, steps) in held.items():
        shipped = past.read(name)
        found = {"loss": shipped.losses, "grad_norm": shipped.norms}
        trained[0].update(dict.fromkeys((*range(4), "host", *AXES), found))
        assert call(f"--against={name}")[0] == 0
        assert len(shipped.losses) == steps and shipped.losses[-1] < 0.7 * shipped.losses[0]
        assert {*shipped.settings} == settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cpu" else runs.LONG) for name in past.names()]
)
def test_this_machine_gives_the_shipped_losses(call, name):
    assert call(f"--against={name}", "--only=0,3,3+pipe=2,3+model=2")[0] == 0


def test_true_runs_of_two_settings_agree(call, commands, monkeypatch):
    def train(words, _):
        command = commands(*words)
        return command.status, command.err

    monkeypatch.setattr(verify, "_train", train)
    status, out, _ = call(*runs.flags(), "--steps=3", "--only=0,3", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and [len({*row["losses"]}) for row in rows] == [3, 3]
    assert rows[1]["loss_difference"] is not None and rows[1]["planned_peak_bytes"] > 0


def test_float32_is_compared_in_float32_also_on_gpus(monkeypatch):
    monkeypatch.delenv(verify.MATMULS, raising=False)
    assert verify.environment(runs.config())[verify.MATMULS] == "highest"
    assert verify.tolerance_of(runs.config(), "gpu") == verify.TOLERANCES["fp32"]
    assert verify.MATMULS not in verify.environment(runs.config(precision="bf16"))
    monkeypatch.setenv(verify.MATMULS, "tensorfloat32")
    tolerance, why = verify.tolerance_of(runs.config(), "gpu")
    assert tolerance == 2.0**-11 and "JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32" in why


def test_every_precision_has_a_tolerance():
    for name in precision.PRECISIONS:
        assert 0 < verify.tolerance_of(runs.config(precision=name), "gpu")[0] < 0.1


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"accum_dtype": "bf16", "grad_accum": 2}, "bf16"),  # sums of passes are rounded on each device
        ({"accum_dtype": "bf16"}, "fp32"),  # a step of one pass adds up nothing
        ({"precision": "fp8", "reduce_dtype": "bf16"}, "fp8"),
        ({"precision": "fp8", "optimizer__moments": "int8"}, "fp8"),
        ({"precision": "fp16", "optimizer__moments": "int8"}, "few bits"),
    ],
)
def test_the_coarsest_rounding_of_a_run_sets_its_tolerance(changes, name):
    assert verify.tolerance_of(runs.config(**changes), "cpu") == verify.TOLERANCES[name]
