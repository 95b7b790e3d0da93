"""Checks how files are told apart. This module tests zerojax.migration.documents."""

import base64
import json

import pytest

from zerojax.errors import UserError
from zerojax.migration import documents

DS = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}


def write(folder, text, name="file"):
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text, kind",
    [
        (json.dumps(DS), documents.DEEPSPEED),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", documents.ACCELERATE),
        ("output_dir: out\ndeepspeed: ds.json\nlearning_rate: 1e-5\n", documents.TRAINER),
        ("node1 slots=8\nnode2 slots=8\n", documents.HOSTFILE),
    ],
)
def test_four_kinds_are_told_apart(tmp_path, text, kind):
    document = documents.read(write(tmp_path, text))
    assert document.kind == kind
    assert documents.translated(document).lines


@pytest.mark.parametrize("name", ["llama.toml", "base.yml"])
def test_a_config_of_another_kind_is_refused_and_not_read_as_deepspeeds(tmp_path, name):
    texts = {
        "llama.toml": "[training]\nseq_len = 128\n",
        "base.yml": "per_device_batch_size: 2\nici_tensor_parallelism: 2\nsteps: 5\n",
    }
    with pytest.raises(UserError, match="configs of torchtitan and MaxText are not translated"):
        documents.read(write(tmp_path, texts[name], name))
    assert documents.read(write(tmp_path, '{"zero_optimisation": {}}')).kind == documents.DEEPSPEED


def test_a_config_of_llama_factorys_v1_is_refused_and_not_read_as_a_trainers(tmp_path):
    text = "model: Qwen/Qwen3-4B\noutput_dir: out\npeft_config:\n  name: lora\ndist_config:\n  name: fsdp2\n"
    with pytest.raises(UserError, match=r"has dist_config, peft_config, as the v1 form of configs with `stage` has"):
        documents.read(write(tmp_path, text))


def test_comments_and_last_commas_are_read_as_in_hjson(tmp_path):
    text = '{ // one\n # two\n "train_batch_size": 8, /* three */ "zero_optimization": {"stage": 2,},'
    text += ' "tensorboard": {"output_path": "a//b"},}'
    assert documents.read(write(tmp_path, text)).content == {**DS, "tensorboard": {"output_path": "a//b"}}


def test_a_config_may_be_given_as_text_or_base64():
    text = json.dumps(DS)
    assert documents.read(text).content == DS
    assert documents.read(base64.urlsafe_b64encode(text.encode()).decode()).content == DS


@pytest.mark.parametrize("text", ['{"a": {"b": 1, "b": 2}}', "a: 1\nb: 2\na: 3\n"])
def test_a_key_that_comes_twice_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"the key '[ab]' comes twice"):
        documents.read(write(tmp_path, text))


def test_a_key_of_yaml_that_comes_twice_with_one_value_is_read(tmp_path):
    text = "debug: false\ndistributed_type: MULTI_GPU\ndebug: false\n"
    assert documents.read(write(tmp_path, text)).content == {"debug": False, "distributed_type": "MULTI_GPU"}


def test_yaml_builds_plain_values_alone(tmp_path):
    with pytest.raises(UserError, match=r"is neither JSON nor YAML"):
        documents.read(write(tmp_path, "a: !!python/object/apply:os.system ['true']\n"))


def test_the_deepspeed_config_that_a_file_names_is_read_beside_it(tmp_path):
    write(tmp_path, json.dumps(DS), "ds.json")
    trainer = documents.read(write(tmp_path, "output_dir: out\ndeepspeed: ds.json\n"))
    assert documents.translated(trainer).settings["zero.stage"] == 2
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert documents.translated(documents.read(write(tmp_path, text))).settings["zero.stage"] == 2


def test_a_trainers_arguments_are_told_from_an_accelerate_config_by_their_own_names(tmp_path):
    dumped = {"output_dir": "out", "bf16": True, "fsdp": [], "fsdp_config": {"min_num_params": 0}, "deepspeed": None}
    document = documents.read(write(tmp_path, json.dumps(dumped)))
    assert document.kind == documents.TRAINER
    found = documents.translated(document)
    assert found.settings["precision"] == "bf16" and [line.key for line in found.unsupported] == ["output_dir"]


def test_a_file_of_which_more_than_half_of_the_keys_are_unknown_is_refused(tmp_path):
    path = write(tmp_path, '{"train_batch_size": 8, "zero_stag": 3, "mine": {"a": 1}}')
    with pytest.raises(UserError, match=r"2 of its 3 keys are unknown in a DeepSpeed config: 'zero_stag, mine.a'"):
        documents.translated(documents.read(path))
    half = documents.read(write(tmp_path, '{"train_batch_size": 8, "mine": 1}'))
    assert documents.translated(half).settings["global_batch_size"] == 8


def test_an_error_names_the_file(tmp_path):
    path = write(tmp_path, '{"zero_optimization": {"stage": 9}}')
    with pytest.raises(UserError, match=rf"{path}: zero_optimization.stage"):
        documents.translated(documents.read(path))


@pytest.mark.parametrize(
    "text, words",
    [
        ("&a\ndistributed_type: DEEPSPEED\ndeepspeed_config: *a\n", "names a part that it is inside of"),
        ("a: &a [1]\nb: &b\n  - *b\n", "names a part that it is inside of"),
        (
            "k0: &k0 {x: 1}\n" + "".join(f"k{n}: &k{n} {{p: *k{n - 1}, q: *k{n - 1}}}\n" for n in range(1, 40)),
            "holds more than 100000 values",
        ),
        ("zero_optimization: {1: 2}\n", "keys must be names, and one is 1"),
    ],
    ids=["itself", "a list in itself", "doubled forty times", "a number as key"],
)
def test_aliases_that_never_end_are_refused(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        documents.read(str(tmp_path / "a.yaml"))
