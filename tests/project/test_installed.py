"""Installs a wheel, made from an sdist, and runs commands in a folder where no checkout is.

The environment of the installed package sees the test environment's packages, but not its `zerojax`: that is this checkout.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import programs
import pytest
import runs

from zerojax import __main__, configs

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "zerojax", "pallas_kernels", "configs")
ADAMW = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}
DEEPSPEED = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1024},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": ADAMW},
}
SMALL = [flag for flag in runs.flags() if not flag.startswith("--config=")]
MATRICES = "--config.optimizer.weight_decay_on=matrices"  # DeepSpeed's optimizers shrink all weights
PLAN = ["--target=cpu", "--topology=1x2", "--config.model.num_layers=1", "--config.model.remat=none"]
TYPED = """
import jax
import jax.numpy as jnp
import zerojax
from jax.sharding import PartitionSpec

Batch = dict[str, jax.Array]


class State(zerojax.TrainState):
    seen: int = 0


def loss_fn(params: Batch, batch: Batch, state: State) -> zerojax.Mean:
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return zerojax.Mean(jnp.sum(errors), jnp.float32(errors.size))


def init(key: jax.Array) -> State:
    tx = zerojax.with_master_weights(zerojax.fused_adamw(lambda count: 1e-3 / (1 + count), moments="int8"))
    return State.create(apply_fn=None, params={"w": jax.random.normal(key, (8, 8))}, tx=tx)


def train(batch: Batch) -> float:
    mesh = zerojax.make_mesh(data=-1, model=1)
    overrides = [("w", PartitionSpec(None, "data"))]
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3, overrides=overrides)
    placement: zerojax.Placement = partition.placements["w"]
    train_step = zerojax.make_train_step(
        loss_fn,
        partition,
        clip_norm=1.0,
        compute_dtype=jnp.bfloat16,
        loss_scale=zerojax.DynamicLossScale(),
        blocks=zerojax.Blocks("layer"),
        sums=zerojax.Sums(reduce_dtype=jnp.float32, grad_accum=2),
        wires=[("w", zerojax.PackedWires())],
    )
    state, metrics = train_step(state, jax.device_put(batch, zerojax.batch_sharding(mesh)))
    zerojax.raise_if_exhausted(metrics, state.params)
    with zerojax.Checkpointer("run") as checkpoints:
        checkpoints.save(1, state)
    print(zerojax.memory_table(partition, partition), placement, zerojax.__version__)
    return float(metrics["loss"])


def answer(folder: str) -> list[list[int]]:
    loaded = zerojax.load_huggingface(folder, lora=zerojax.Lora(r=8), stage=0)
    with zerojax.main_process_first():
        zerojax.export_adapter(loaded.params, loaded, folder)
    try:
        return [[int(zerojax.decayed(loaded.params)["w"])]]
    except zerojax.UserError as error:
        raise SystemExit(str(error)) from error
"""
WRONG = """
import zerojax

zerojax.make_trian_step()  # attr-defined
mesh = zerojax.make_mesh(data="4")  # arg-type
zerojax.Blocks(patern="layer")  # call-arg
state, partition = zerojax.shard_train_state({}, stage=3)  # call-arg
step = zerojax.make_train_step(len, partition, clip="1")
step(state, {})[1]["loss"].lower()  # attr-defined
zerojax.make_train_step(len, mesh)  # arg-type
text: int = zerojax.__version__  # assignment
"""
WIZARD = ["--yes", "--quick", "--model=test", "--target=cpu", "--topology=2", "--seq_len=32", "--global_batch_size=8"]


def build(hook, where, folder):
    """Builds an archive of the source in `where`, without a network, and returns its file in `folder`."""
    program = f"from setuptools import build_meta; print(build_meta.{hook}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=where, capture_output=True, text=True, timeout=runs.LIMIT
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Returns a wheel, built from the unpacked sdist, which thereby is complete."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (runs.ROOT / name).is_dir() else shutil.copy
        copy(runs.ROOT / name, source / name)
    with tarfile.open(build("build_sdist", source, folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("zerojax-*/")
    return build("build_wheel", unpacked, folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Installs the wheel with pip, and returns the folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=runs.LIMIT)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    subprocess.run([*pip, wheel], check=True, timeout=runs.LIMIT)
    (site,) = folder.glob("lib/python*/site-packages")
    # Folders that another .pth file names are not read for .pth files of their own, such as that of an editable installation.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python.parent


@pytest.fixture(scope="module")
def ends(installed, compiled_dir, tmp_path_factory):
    """Returns (the folder, {name: the end of a command}) of commands that ran there one after the other."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    jobs = {
        "configs": ["zerojax.commands.configs"],
        "completion": ["zerojax.commands.completion", "bash"],
        "train": ["zerojax.train", *SMALL, "--config", "zero3", "--workdir=run"],
        "config": ["zerojax.commands.config", "--out=wizard.py", *WIZARD],
        "plan": ["zerojax.plan", "--config=wizard.py", *PLAN],
        "migrate": ["zerojax.commands.migrate", "ds_config.json", "--out=configs/mine.py"],
        "train migrated": ["zerojax.train", *SMALL, MATRICES, "--config=configs/mine.py", "--workdir=migrated"],
    }
    variables = {**runs.environment(compiled_dir), "PYTHONPATH": ""}
    found = programs.modules(
        list(jobs.values()), python=str(installed / "python"), folder=folder, limit=runs.LIMIT, **variables
    )
    return folder, dict(zip(jobs, found, strict=True))


def test_the_package_is_the_installed_one_and_its_command_starts(installed, tmp_path):
    done = subprocess.run([installed / "zerojax", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("zerojax 0.")
    program = "import importlib.util as u; print(u.find_spec('zerojax').origin, u.find_spec('configs'))"
    variables = {**os.environ, "PYTHONPATH": ""}
    out = subprocess.check_output([installed / "python", "-c", program], cwd=tmp_path, text=True, env=variables)
    assert str(installed.parent) in out and out.endswith("None\n")


def test_a_wheel_holds_each_file_of_the_packages_and_of_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path for room in ("zerojax", "pallas_kernels", "configs") for path in (runs.ROOT / room).rglob("*.*")}
    wanted = {path.relative_to(runs.ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    wanted = {f"zerojax/configs/{name}" if name.startswith("configs/") else name for name in wanted}
    assert wanted == {name for name in names if ".dist-info/" not in name}


def test_a_strict_type_checker_accepts_a_users_program_and_finds_its_mistakes(installed, tmp_path):
    texts = {"typed.py": TYPED, "wrong.py": WRONG}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", f"--python-executable={installed}/python"]
    mypy += [f"--cache-dir={tmp_path}/cache", "--untyped-calls-exclude=flax", "--untyped-calls-exclude=jax", *texts]
    variables = {**os.environ, "PYTHONPATH": "", "MYPYPATH": ""}
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, env=variables, timeout=runs.LIMIT)
    found = re.findall(r"^(\S+):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    lines = enumerate(WRONG.splitlines(), 1)
    wanted = [("wrong.py", str(n), line.split("# ")[1]) for n, line in lines if "# " in line]
    assert found == wanted, done.stdout + done.stderr


def test_every_command_ends_well_away_from_a_checkout(ends):
    assert {name: (end.status, end.err) for name, end in ends[1].items()} == dict.fromkeys(ends[1], (0, ""))


def test_the_names_of_configs_are_those_of_the_folder(ends):
    rows = [line.split("  ", 1) for line in ends[1]["configs"].out.splitlines()]
    assert {name: text.strip() for name, text in rows} == {name: configs.summary(name) for name in configs.names()}
    assert sorted(name for name, _ in rows) == sorted(path.stem for path in (runs.ROOT / "configs").glob("*.py"))


def test_the_completion_holds_the_flags_of_every_command(ends):
    out = ends[1]["completion"].out
    found = {
        name: set(flags.split())
        for name, flags in re.findall(r'^ +([\w-]+)\\ -\*\) known="(.*)" ;;$', out, re.MULTILINE)
    }
    assert {"--workdir", "--config", "--process_id"} <= found["train"] and {"--json", "--search"} <= found["plan"]
    assert found["show"] == {"--help", "--json"} and {"--hostfile", "--max_restarts"} <= found["launch"]
    assert found.keys() == set(__main__.COMMANDS) and all(found.values())


def test_a_translated_config_trains_as_the_named_one_with_its_settings(ends):
    folder, _ = ends
    losses = runs.losses(folder / "migrated")
    assert len(losses) == runs.SMALL["steps"] and losses == runs.losses(folder / "run")
