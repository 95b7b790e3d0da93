"""Checks what is said of checkpoints of other programs. This module tests zerojax.interop.other_forms, and the line that tells it."""

import shutil

import golden_models
import numpy as np
import orbax.checkpoint as ocp
import pytest

from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import other_forms

STEP = "run/checkpoint-500"
# the files of a checkpoint -> (the path that a user names, what the line says)
FORMS = {
    (
        f"{STEP}/pytorch_model_fsdp_0/.metadata",
        f"{STEP}/pytorch_model_fsdp_0/__0_0.distcp",
        f"{STEP}/trainer_state.json",
    ): (
        STEP,
        "in shards of FSDP: merge them with `accelerate merge-weights {path}/pytorch_model_fsdp_0 OUT`, copy config.json",
    ),
    (f"{STEP}/pytorch_model_fsdp_0/.metadata", f"{STEP}/config.json"): (STEP, "accelerate merge-weights"),
    (f"{STEP}/pytorch_model_fsdp_0/.metadata", "x"): (
        f"{STEP}/pytorch_model_fsdp_0",
        "accelerate merge-weights {path} OUT`, copy config.json",
    ),
    ("step-10/.metadata", "step-10/__0_0.distcp", "step-10/__1_0.distcp"): (
        "step-10",
        "is a distributed checkpoint of PyTorch (__0_0.distcp): `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} ",
    ),
    (f"{STEP}/config.json", "run/checkpoint-60/config.json", "run/checkpoint-1000/optimizer.pt"): (
        "run",
        "holds the checkpoints of a Trainer, and is no model itself; name one of them, such as {path}/checkpoint-500",
    ),
    (f"{STEP}/pytorch_model_fsdp_0/.metadata", "run/training_args.bin"): (
        "run",
        "name one of them, such as {path}/checkpoint-500",
    ),
    ("m/model.Q4_K_M.gguf", "m/README.md"): ("m", 'from_pretrained("{path}", gguf_file="model.Q4_K_M.gguf")'),
    ("m/consolidated.00.pth", "m/params.json", "m/tokenizer.model"): (
        "m",
        "(params.json and consolidated.00.pth): take",
    ),
    ("m/consolidated.safetensors", "m/params.json"): ("m", "is in the form of the model's authors"),
    ("m/latest", "m/global_step4/mp_rank_00_model_states.pt"): (
        "m",
        "`zerojax import-deepspeed {path} --out DIR` takes",
    ),
    ("m/500/sizes.json", "m/500/_CHECKPOINT_METADATA"): ("m", "holds the checkpoints of a run; name the run's export"),
}


def refusal(path, config=folder_lib.CONFIG):
    with pytest.raises(UserError) as caught:
        folder_lib.check_folder(path, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("files", FORMS)
def test_a_checkpoint_of_another_program_is_named_with_the_way_on(tmp_path, files):
    named, line = FORMS[files]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    path = tmp_path / named
    assert line.format(path=path) in refusal(path)


def test_a_checkpoint_of_orbax_is_named_with_or_without_the_step(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.ones(3)}))
        manager.wait_until_finished()
    for path in (tmp_path / "run", tmp_path / "run" / "3", tmp_path / "run" / "3" / "default"):
        assert "is a checkpoint of Orbax (" in refusal(path)


def test_a_file_in_a_folders_place_is_named_too(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert f'from_pretrained("{tmp_path}", gguf_file="model.gguf")' in refusal(path)
    (tmp_path / "notes.txt").write_bytes(b"")
    assert "is not a folder; name one that save_pretrained of transformers wrote" in refusal(tmp_path / "notes.txt")


def test_a_trainers_folder_of_adapters_names_its_last_for_an_adapter(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / folder_lib.ADAPTER).write_text("{}")
    assert refusal(tmp_path, folder_lib.ADAPTER).endswith(f"such as {tmp_path / 'checkpoint-10'}")
    folder_lib.check_folder(tmp_path)  # none of them is a model


def test_a_models_folder_is_no_other_form_whatever_lies_beside_it(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(golden_models.FOLDER / "llama", folder)
    for name in ("consolidated.00.pth", "params.json", "model.gguf"):
        (folder / name).write_bytes(b"{}")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "config.json").write_bytes(b"{}")
    folder_lib.open_folder(folder)
    assert other_forms.told(tmp_path / "nowhere", ()) == ""
