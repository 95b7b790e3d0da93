"""What a user of DeepSpeed brings: its introduction, a ds_config.json, and a checkpoint."""

import json
import re
import shutil

import numpy as np
import pytest
import runs
import tokenizers
import users

pytestmark = pytest.mark.slow

GOLDEN = runs.ROOT / "tests" / "golden" / "deepspeed"
SUM_ORDER = 1e-4  # relative: the same float32 sums in another order
HALF = 1e-3  # relative: the clip's norm may be summed in another order, which rounds some float16 weights the other way
INTRODUCTION = {
    "train_batch_size": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 2e-3}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def test_the_introduction_skips_steps_by_its_dynamic_scale_goes_on_from_its_checkpoint_and_trains_as_without_offload(
    user,
):
    """A copy of the example in the user's folder, with a ds_config.json whose first scale overflows float16."""
    shutil.copy(users.EXAMPLES / "deepspeed_intro.py", user.folder / "mine.py")
    (user.folder / "ds_config.json").write_text(json.dumps(INTRODUCTION))
    (user.folder / "resident.json").write_text(json.dumps({**INTRODUCTION, "zero_optimization": {"stage": 2}}))

    def steps(count, config, *words):
        said = user.python(user.folder / "mine.py", "--steps", count, "--config", config, *words).out
        assert "stage 2 on 8 devices" in said
        return dict(re.findall(r"step (\d+): loss (\S+)", said)), *re.search(
            r"loss scale (\S+), (\d+) steps .*\nin host memory: (.*)", said
        ).groups()

    first, *_ = steps(10, "ds_config.json", "--checkpoints", "saved")
    rest, *scale, offloaded = steps(18, "ds_config.json", "--checkpoints", "saved")
    whole, *expected, resident = steps(18, "resident.json")
    assert scale == expected and (len(first), len(rest)) == (10, 8)
    losses = [list(map(float, found.values())) for found in ({**first, **rest}, whole)]
    np.testing.assert_allclose(*losses, rtol=HALF)
    assert resident == "nothing" and len(offloaded.split(", ")) == 9  # of two layers: master weights and two moments
    assert "opt_state/master/Dense_0/kernel" in offloaded and "opt_state/inner/0/nu/Dense_1/kernel" in offloaded
    assert 4 <= int(scale[1]) <= 14  # from 2**24 down to a scale under which float16's 65504 holds the gradients


@runs.LONG  # tests/project/test_installed.py trains one too
def test_a_ds_config_is_migrated_and_trains_with_its_stage_scale_and_offload(user, stdlib_dir):
    (user.folder / "ds_config.json").write_text(json.dumps(INTRODUCTION))
    told = user.zerojax("migrate", "ds_config.json", "--out", "mine.py").out
    assert "zero_optimization.stage = 2: config.zero.stage = 2" in told
    small = {
        key: value
        for key, value in runs.SMALL.items()
        if key.split(".")[0] in ("model", "seq_len", "sample", "evaluate", "log_every")
    }
    flags = [f"--config.{key}={value}" for key, value in small.items()]
    flags += [f"--config.data.dir={stdlib_dir}", "--config.steps=24", "--config.emulate_devices=8"]
    found = user.train("mine.py", "runs/mine", *flags)
    config = json.loads((user.folder / "runs" / "mine" / "config.json").read_text())
    assert (config["precision"], config["zero"]["stage"], config["offload"]["optimizer"]) == ("fp16", 2, "host")
    assert config["global_batch_size"] == 32
    assert len(found["losses"]) == 24 and 4 <= found["skipped_steps"] <= 14
    assert found["losses"][24] < 0.9 * found["losses"][1]


def test_a_checkpoint_of_deepspeed_is_imported_and_goes_on_at_any_stage_and_offload(user):
    """As the import says, and at another stage, mesh and offload. The rest of the run is the same."""
    word = "zero3-bf16-world2"
    told = user.zerojax(
        "import-deepspeed", GOLDEN / word, "--out", "taken", "--model_config", GOLDEN / "config.json"
    ).out
    command = re.search(r"python -m zerojax.train (.*)", told)[1].split()
    assert command == ["--config", "taken/config.py", "--workdir", "taken/run"]
    shutil.copytree(user.folder / "taken" / "run", user.folder / "other")
    write_tokenizer(user.folder / "tokenizer.json")
    data = (
        "--config.data.name=random",
        "--config.data.tokenizer=tokenizer.json",
        "--config.steps=7",
        "--config.precision=fp32",
        "--config.global_batch_size=8",
    )
    data += (
        "--config.micro_batch_size=0",
        "--config.sample.length=0",
        "--config.evaluate.batches=1",
        "--config.log_every=1",
    )
    data += ("--config.emulate_devices=4",)
    one = user.train("taken/config.py", "taken/run", *data)
    changed = (
        "--config.zero.stage=1",
        "--config.mesh.data=2",
        "--config.mesh.replica=2",
        "--config.offload.optimizer=host",
    )
    two = user.train("taken/config.py", "other", *data, *changed)
    assert list(one["losses"]) == list(two["losses"]) == [5, 6, 7]
    np.testing.assert_allclose(list(one["losses"].values()), list(two["losses"].values()), rtol=SUM_ORDER)


def write_tokenizer(path):
    """Writes one with the 259 ids of the checkpoint's model."""
    vocab = {"<s>": 0, **{f"word{number}": number for number in range(1, 259)}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<s>")).save(str(path))
