"""Reads the models of tests/golden/huggingface and what transformers computes from them. This module holds their paths and batches."""

import functools
import hashlib
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
import safetensors.numpy

import zerojax
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import pretrained

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def _in_float32(stored: pathlib.Path) -> pathlib.Path:
    """Returns a copy of the stored folders whose weights, which are numbers of bfloat16, are in float32. Processes share it."""
    files, digest = sorted(file for file in stored.glob("*/**/*") if file.is_file()), hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(stored)).encode() + file.read_bytes())
    folder = pathlib.Path(tempfile.gettempdir(), f"zerojax-golden-{os.getuid()}-{digest.hexdigest()[:16]}")
    if not folder.exists():
        new = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.copytree(stored, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for file in new.rglob("*.safetensors"):
            tensors = safetensors.numpy.load_file(file)
            wide = {name: array.astype(np.float32) for name, array in tensors.items()}
            safetensors.numpy.save_file(wide, file, {"format": "pt"})
        try:
            new.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new)
    return folder


FOLDER = _in_float32(GOLDEN / "huggingface")
NAMES = ("llama", "qwen2", "t5", "bart")
DECODERS = ("gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "gpt2", "mamba2")
DECODERS += ("seedoss", "exaone4", "olmo3", "glm4", "ernie45", "cohere2", "starcoder2", "ministral3", "ministral")
MIXTURES = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "gptoss", "deepseekv3")
MIXTURES += ("granitemoe", "deepseekv2", "glm4moe", "ernie45moe", "minimaxm2", "phimoe", "qwen3next")
DECODERS += ("gemma3n", "gemma4")
MIXTURES += ("llama4", "gemma4moe")
HYBRIDS = ("qwen35", "qwen35moe", "granitehybrid", "nemotronh", "lfm2")
CLASSIFIERS = ("bert", "roberta", "xlmroberta", "distilbert", "modernbert")
ENCODER_DECODERS = ("mbart", "pegasus", "marian")
GENERATORS = (*NAMES, *DECODERS, *MIXTURES, *HYBRIDS, *ENCODER_DECODERS)


def expected(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays that transformers computed."""
    return dict(np.load(FOLDER / name / "expected.npz"))


@functools.cache
def load(name: str, stage: int, model: int = 1) -> pretrained.Pretrained:
    """Loads a model over all devices. Even small weights are sharded."""
    return zerojax.load_huggingface(FOLDER / name, mesh=zerojax.make_mesh(model=model), stage=stage, min_size=64)


def batch(name: str) -> dict[str, np.ndarray]:
    """Returns the inputs and the labels of the expected logits and loss."""
    found = expected(name)
    arrays = {key: found[key] for key in ("input_ids", "attention_mask", "labels")}
    if name not in CLASSIFIERS and "decoder_start_token_id" not in (FOLDER / name / "config.json").read_text():
        arrays["labels"] = np.where(found["attention_mask"] > 0, found["input_ids"], -100)
    return arrays


def assert_written_as(tensors: dict[str, np.ndarray], loaded: pretrained.Pretrained, folder: pathlib.Path) -> None:
    """Exports a model whose file was quantized, and compares the folder with plain tensors in float32."""
    zerojax.export_huggingface(loaded.params, loaded, folder, dtype=np.float32)
    found = safetensors.numpy.load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, name)
    assert "quantization_config" not in (folder / "config.json").read_text()


def assert_refused_with(folder: pathlib.Path, tensors: dict[str, np.ndarray | None], line: str) -> None:
    """Opens a folder whose file holds other tensors, without those that are None, and expects an error."""
    kept = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match=line):
        folder_lib.open_folder(folder)
