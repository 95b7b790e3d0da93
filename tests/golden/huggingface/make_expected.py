"""Writes what transformers and PEFT compute from golden folders in float32. This module needs torch, transformers and peft.

    python tests/golden/huggingface/make_expected.py [FOLDER ...]            writes the arrays of `expected.npz` anew, from the same inputs
    python tests/golden/huggingface/make_expected.py --check [FOLDER ...]    prints how far they are from those that are there

A folder is MODEL, or MODEL/KIND of an adapter; by default all are, but those of `make_by_length.py`. Writing rounds all weights to
bfloat16, which halves their files.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import safetensors.torch
import torch
import transformers

FOLDER, NEW = pathlib.Path(__file__).parent, 12


def main() -> None:
    """Writes or checks the folders, models before their adapters."""
    is_check, names = "--check" in sys.argv, [word for word in sys.argv[1:] if word != "--check"]
    known = [file.parent for file in FOLDER.rglob("expected.npz") if "loss" in np.load(file)]
    folders = [FOLDER / name for name in names] or sorted(known, key=lambda folder: (len(folder.parts), folder))
    if not is_check:
        for folder in {*folders, *map(_model_of, folders)}:
            _round(*folder.glob("*.safetensors"))
    for folder in folders:
        old = dict(np.load(folder / "expected.npz"))
        new = expected(folder, old)
        away = {name: float(np.abs(np.asarray(array, float) - old[name]).max()) for name, array in new.items()}
        print(f"{folder.relative_to(FOLDER)}: " + ", ".join(f"{name} {value:.1e}" for name, value in away.items()))
        if not is_check:
            np.savez_compressed(folder / "expected.npz", **old | new)


def expected(folder: pathlib.Path, old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the logits, the loss and the greedy tokens, for a classifier the classes; and summaries of gradients if `old` has them."""
    model = _load(_model_of(folder))
    is_pair, writes = model.config.is_encoder_decoder, model.can_generate()
    if folder != _model_of(folder):
        model = peft.PeftModel.from_pretrained(model, folder)
    arrays = {name: old[name] for name in ("input_ids", "attention_mask", "labels")}
    if writes and not is_pair:
        arrays["labels"] = np.where(old["attention_mask"] > 0, old["input_ids"], -100)
    given = {name: torch.tensor(array).long() for name, array in arrays.items()}
    found = model.eval()(**given, **({"use_cache": False} if writes else {}))
    new = {"logits": found.logits.detach().numpy(), "loss": found.loss.detach().numpy()}
    if writes:
        prompts, mask = given["input_ids"], given["attention_mask"]
        if not is_pair:
            prompts = prompts[:, : old["generated"].shape[1] - NEW]
            mask = torch.ones_like(prompts)
        how = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1}
        new["generated"] = model.generate(input_ids=prompts, attention_mask=mask, **how).numpy()
    else:
        new["generated"] = new["logits"].argmax(axis=1)
    if "gradients" in old:
        found.loss.backward()
        grads = dict(model.named_parameters())
        new["gradients"] = np.stack([_summary(grads[name].grad.numpy()) for name in old["gradients_of"]])
    return new


def _model_of(folder: pathlib.Path) -> pathlib.Path:
    return folder if folder.parent == FOLDER else folder.parent


def _load(folder: pathlib.Path) -> transformers.PreTrainedModel:
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def _round(file: pathlib.Path) -> None:
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def _summary(array: np.ndarray) -> np.ndarray:
    """Returns the norm, and the sum with weights that differ by place; see `scripts/new_family.py`."""
    flat = np.asarray(array, np.float64).reshape(-1)
    return np.array([np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))])


if __name__ == "__main__":
    main()
