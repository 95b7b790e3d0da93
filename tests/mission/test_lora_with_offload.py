"""BART, LoRA, stage 3 and both offloads: the job of PEFT's guide, by each of the ways in which a user starts it."""

import json
import pathlib
import re

import numpy as np
import pytest
import runs
import safetensors.numpy
import users

pytestmark = pytest.mark.slow

SUM_ORDER = 2e-5  # relative: the same float32 sums, block by block, or over two processes
LEARNT = 1e-3  # of an adapter's weights of some 0.1, after Adam's steps with such sums
STEPS = 12  # of 0.3 epochs
# The masks of dropout are those of a device and its examples, so a run that goes on over another mesh would draw others.
JOB = ("--config.epochs=0.3", "--config.log_every=1", "--config.evaluate.answers=24", "--config.lora.dropout=0.0")
OFFLOADS = {
    where: [f"--config.offload.{part}={where}" for part in ("optimizer", "params")] for where in ("host", "nvme")
}
# What `accelerate config` writes for PEFT's guide, and what its script says beside it.
ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
machine_rank: 0
main_training_function: main
megatron_lm_config: {}
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""
KILLED = """
import os, pathlib, signal, time
from zerojax.checkpoint import files
from zerojax.data import feed
following, taken = feed.Feed.next, []
def next_batch(streams):
    taken.append(streams)
    if len(taken) == 8:
        while not files.steps(pathlib.Path("runs/lora/checkpoints")):  # a save runs beside the steps
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return following(streams)
feed.Feed.next = next_batch
"""


def assert_same(user, resident, was_killed=False):
    """Compares a run in runs/lora and its adapter with those of a run without offload.

    After a kill, the perplexity of the training examples is that of the steps since.
    """
    (other, expected), found = resident, user.results("runs/lora")
    assert list(found["losses"]) == list(expected["losses"])
    names = ("losses", "eval_loss", "eval_perplexity", "eval_accuracy", *([] if was_killed else ["train_perplexity"]))
    for name in names:
        pair = [list(run[name].values()) if name == "losses" else run[name] for run in (found, expected)]
        np.testing.assert_allclose(*pair, rtol=SUM_ORDER, err_msg=name)
    assert found["answers"] == expected["answers"] and len(found["answers"]) == 10
    for phase in ("training", "evaluation"):
        assert found[f"memory/{phase}_host_total_peak_bytes"] >= found[f"memory/{phase}_host_before_bytes"] > 0
    folders = [one.folder / "runs" / "lora" / "export" for one in (user, other)]
    fields = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    bases = {pathlib.Path(found.pop("base_model_name_or_path")).resolve() for found in fields}
    assert (
        len(bases) == 1 and fields[0] == fields[1] and (fields[0]["peft_type"], fields[0]["lora_alpha"]) == ("LORA", 32)
    )
    one, two = (safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=LEARNT, rtol=0, err_msg=name)


def assert_answers_come_again(user):
    """Reads the adapter back in another command, which gives the answers of the evaluation."""
    answers = user.results("runs/lora")["answers"]
    prompts = [word for answer in answers for word in ("--prompt", answer["prompt"])]
    done = user.zerojax(
        "generate", "runs/bart_tiny/export", "--adapter", "runs/lora/export", "--max_new_tokens", 4, *prompts
    )
    assert [line.strip() for line in done.out.splitlines()] == [answer["found"] for answer in answers]


def migrated(tuner):
    """Returns the flags of the job in runs/lora with PEFT's config of Accelerate, as `zerojax migrate` translates it."""
    (tuner.folder / "accelerate.yaml").write_text(ACCELERATE)
    told = tuner.zerojax("migrate", "accelerate.yaml", "--out", "mine.py").out
    assert "deepspeed_config.offload_param_device = " in told
    script = """
data.name=short_reviews data.task=classification data.prompt={text} data.labels=('waste','pleasure') data.answer_len=4 seq_len=24
global_batch_size=16 micro_batch_size=0 lora.r=8 lora.alpha=32.0 lora.target_modules=all-linear optimizer.learning_rate=3e-3
optimizer.schedule=linear optimizer.final_fraction=0.0 evaluate.batches=0 checkpoint.every=0 emulate_devices=2 export.format=peft
init_from=runs/bart_tiny/export optimizer.b2=0.95 optimizer.weight_decay=0.1 optimizer.warmup_steps=20
""".split()
    settings = [f"--config.{word}" for word in (*script, "data.answer= {label}")]
    return ("--config=mine.py", "--workdir=runs/lora", *settings, *JOB)


def assert_translated(tuner):
    config = json.loads((tuner.folder / "runs" / "lora" / "config.json").read_text())
    assert (config["zero"]["stage"], config["offload"]["optimizer"], config["offload"]["params"]) == (3, "host", "host")
    assert config["optimizer"]["clip_norm"] == 1.0


@runs.LONG  # the next test begins with such a run
def test_the_accelerate_config_of_pefts_guide_is_migrated_and_trains_as_without_offload(tuner, resident):
    said = tuner.zerojax("train", *migrated(tuner)).out
    assert re.search(r"host memory +│ +[1-9]", said)
    assert_translated(tuner)
    assert_same(tuner, resident(*JOB))
    assert_answers_come_again(tuner)


ON_THE_DEVICE = ("--config.offload.optimizer=none", "--config.offload.params=none")
AGAIN = {
    "on the disk on another mesh": (*OFFLOADS["nvme"], "--config.mesh.replica=2", "--config.mesh.data=1"),
    "at stage 1 without offload": ("--config.zero.stage=1", *ON_THE_DEVICE),
    "at stage 2 on one device": (
        "--config.zero.stage=2",
        "--config.offload.params=none",
        "--config.emulate_devices=1",
    ),
    "at stage 0 on four devices": ("--config.zero.stage=0", "--config.emulate_devices=4", *ON_THE_DEVICE),
}


def begun_and_killed(tuner):
    """Returns the flags of a run with both offloads in runs/lora that was killed after a save."""
    flags = (*migrated(tuner), "--config.checkpoint.every=3")
    said = tuner.zerojax("train", *flags, before=KILLED, status=-9).out
    assert re.search(r"host memory +│ +[1-9]", said)
    assert_translated(tuner)
    return flags


def two_processes(tuner, *flags):
    """Trains in two processes of one device each, and returns what they printed."""
    out = tuner.launch("-m", "zerojax.train", *flags, "--config.emulate_devices=1").stdout
    assert "2 x cpu, 2 processes" in out
    return out


def test_pefts_config_of_accelerate_is_migrated_and_its_killed_run_goes_on_in_two_processes_with_its_state_on_the_disk(
    tuner, resident
):
    said = two_processes(tuner, *begun_and_killed(tuner), *OFFLOADS["nvme"])
    assert re.search(rf"starts at step [36] of {STEPS}", said)
    assert_same(tuner, resident(*JOB), was_killed=True)
    assert_answers_come_again(tuner)


@runs.LONG
@pytest.mark.parametrize("again", AGAIN)
def test_a_run_with_both_offloads_that_is_killed_goes_on_elsewhere(tuner, resident, again):
    said = tuner.zerojax("train", *begun_and_killed(tuner), *AGAIN[again]).out
    assert re.search(rf"starts at step [36] of {STEPS}", said)
    assert_same(tuner, resident(*JOB), was_killed=True)


@runs.LONG
@pytest.mark.parametrize("where", OFFLOADS)
def test_two_processes_train_with_both_offloads_as_one_without(tuner, resident, where):
    two_processes(tuner, "--config=lora_tiny", "--workdir=runs/lora", *JOB, *OFFLOADS[where])
    assert_same(tuner, resident(*JOB))


@pytest.mark.parametrize("where", runs.cases(["host", "nvme"], long=["nvme"]))
def test_pefts_script_line_by_line_trains_with_both_offloads_as_without(tuner, where):
    script = users.EXAMPLES / "lora_seq2seq.py"
    words = ("--folder", "runs/bart_tiny/export", "--epochs", 1, "--batch", 64)
    said = []
    for flags in (("--out", "plain"), ("--out", "runs/lora/export", "--offload", where)):
        said.append(tuner.python(script, *words, *flags).out)
    found = [re.findall(r"train_ppl=\S+|accuracy=\S+|answers: .*|labels: .*|trainable%.*", text) for text in said]
    assert found[0] == found[1] and len(found[0]) == 5
    assert "epoch 1, training: host memory" in said[1] and "epoch 1, evaluation: host memory" in said[1]
    one, two = (
        safetensors.numpy.load_file(tuner.folder / name / "adapter_model.safetensors")
        for name in ("plain", "runs/lora/export")
    )
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=LEARNT, rtol=0, err_msg=name)
