"""Compares a family of models with transformers, on a tiny model with random weights (docs/new_family.md).

    python scripts/new_family.py TYPE FOLDER --torch PYTHON [--set name=value ...] [--class AutoModelForSeq2SeqLM] [--as KNOWN]
    python scripts/new_family.py FOLDER                     compares a folder that is there

PYTHON is an interpreter with torch and transformers; it makes FOLDER, a model of the model_type TYPE and `expected.npz`, unless FOLDER is
there. This one then reads FOLDER with zerojax and prints what differs. `--as` reads it as another model_type, to see how far that is.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Fields of a tiny model; those that a type's config lacks are left out.
TINY: Mapping[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 160,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "decoder_start_token_id": 0,
}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")  # that all models have
LENGTHS, ANSWER, NEW = (
    (24, 17, 9),
    10,
    12,
)  # tokens of the texts, of labels of an encoder-decoder, and of what is generated
LOGITS, LOSS, GRADIENTS = 2e-5, 1e-5, 1e-4  # the largest difference, and relative ones
STAGES = (0, 3)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: what was compared, what was found, and whether that is as it should be."""

    what: str
    found: str
    is_right: bool


def main() -> None:
    """Makes a folder where there is none, and prints the table. Ends with status 1 where something differs."""
    given = _parse(sys.argv[1:])
    if given.make:
        make(given.type, pathlib.Path(given.folder), given.auto, dict(_settings(given.set)))
        return
    folder = pathlib.Path(given.folder or given.type)
    if given.folder and not folder.exists():
        subprocess.run([given.torch, __file__, *sys.argv[1:], "--make"], check=True)
    try:
        rows = compare(folder, given.known)
    except ValueError as error:  # a UserError is one
        sys.exit(f"{folder}: is not read: {error}")
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{row.what:{width}}  {'same' if row.is_right else 'DIFFERS'}  {row.found}")
    sys.exit(not all(row.is_right for row in rows))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("type", help="a model_type of transformers; or, alone, a folder that is there")
    add("folder", nargs="?", help="the folder to make and to compare")
    add("--torch", default=sys.executable, help="the interpreter with torch and transformers")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config, its value as JSON")
    add("--class", dest="auto", default="AutoModelForCausalLM", help="transformers' class")
    add("--as", dest="known", default="", help="the model_type to read it as")
    add("--make", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        name, _, value = word.partition("=")
        try:
            yield name, json.loads(value)
        except json.JSONDecodeError:
            yield name, value


def make(kind: str, folder: pathlib.Path, auto: str, settings: Mapping[str, Any]) -> None:
    """Writes a tiny model of a type with random weights, and what transformers computes from it in float32."""
    import torch
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    default.allow_global_per_layer_attribute_access = True  # else a field that layers have of their own raises
    has = lambda name: hasattr(default, name) if name == "head_dim" else getattr(default, name, None) is not None  # noqa: E731
    own = {name: value for name, value in TINY.items() if has(name) or name in SPECIAL}
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **own | dict(settings)))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():  # larger than those of transformers, whose logits are almost 0
            weight.copy_(torch.randn(weight.shape, generator=random) * 0.15 + (weight.ndim == 1))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    numbers = np.random.RandomState(0)
    ids = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = numbers.randint(3, model.config.get_text_config().vocab_size, length)
    mask, is_pair = (ids > 0).astype(np.int32), model.config.is_encoder_decoder
    labels = numbers.randint(3, 384, (len(LENGTHS), ANSWER)) if is_pair else np.where(mask > 0, ids, -100)
    tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    given = {name: torch.tensor(array).long() for name, array in tensors.items()}
    found = model(**given, use_cache=False)
    found.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    prompts = given["input_ids"], given["attention_mask"]
    if not is_pair:
        prompts = tuple(array[:, : min(LENGTHS)] for array in prompts)
    how = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    generated = model.generate(prompts[0], attention_mask=prompts[1], **how)
    np.savez(
        folder / "expected.npz",
        **tensors,
        logits=found.logits.detach().numpy(),
        loss=found.loss.detach().numpy(),
        generated=generated.numpy(),
        gradients=np.stack([_summary(grad.numpy()) for grad in gradients.values()]),
        gradients_of=np.array([*gradients]),
    )


def _summary(array: np.ndarray) -> np.ndarray:
    """Returns two numbers by which gradients are compared: the norm, and the sum with weights that differ by place."""
    flat = np.asarray(array, np.float64).reshape(-1)
    return np.array([np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))])


def compare(folder: pathlib.Path, known: str = "") -> list[Row]:
    """Returns the table of a folder with `expected.npz`, read as the model_type `known` if one is given."""
    sys.path.insert(0, str(ROOT))
    import jax

    import zerojax
    from zerojax.interop import other_types

    with tempfile.TemporaryDirectory() as temporary:
        source = _as_known(folder, known, pathlib.Path(temporary) / "known") if known else folder
        expected = dict(np.load(folder / "expected.npz"))
        batch = {name: expected[name] for name in ("input_ids", "attention_mask", "labels")}
        rows, limit = [], LOGITS * max(1.0, float(np.abs(expected["logits"]).max()) / 10)
        for stage in STAGES:
            loaded = zerojax.load_huggingface(source, stage=stage, min_size=64, dtype="float32")
            is_pair = loaded.family.is_encoder_decoder
            if not is_pair:
                batch["labels"] = np.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
            logits = jax.jit(lambda params, loaded=loaded: loaded.apply(params, batch))(loaded.params)
            away = float(np.abs(logits - expected["logits"]).max())
            rows.append(Row(f"logits, stage {stage}", f"{away:.1e} of at most {limit:.1e}", away <= limit))
        loss, grads = jax.jit(jax.value_and_grad(lambda params: loaded.loss(params, batch)))(loaded.params)
        away = abs(float(loss) / float(expected["loss"]) - 1)
        rows.append(Row("loss", f"{away:.1e} of at most {LOSS:.1e}", away <= LOSS))
        rows.append(_gradients(loaded, grads, expected))
        wanted = expected["generated"]
        prompts = (batch["input_ids"], batch["attention_mask"])
        if not is_pair:
            prompts = (batch["input_ids"][:, : wanted.shape[1] - NEW],)
        found = np.asarray(loaded.generator(max_new_tokens=NEW)(loaded.params, *prompts))
        number = int(np.sum(found[:, -NEW:] == wanted[:, -NEW:]))
        rows.append(Row("tokens", f"{number} of {wanted[:, -NEW:].size}", np.array_equal(found, wanted)))
        zerojax.export_huggingface(loaded.params, loaded, pathlib.Path(temporary) / "export")
        rows.append(_exported(source, pathlib.Path(temporary) / "export"))
        how, names = loaded.family.huggingface, loaded.folder.entries
        unread = other_types.unread(loaded.folder.raw, lambda raw: how.read(raw, names), how.write)
        rows.append(Row("fields of config.json unread", ", ".join(unread) or "none", not unread))
        is_same = how.read(how.write(loaded.config), names) == loaded.config
        rows.append(Row("config.json written", "is read as the same" if is_same else "is read as another", is_same))
    return rows


def _as_known(folder: pathlib.Path, known: str, copy: pathlib.Path) -> pathlib.Path:
    """Returns a copy of a folder whose config.json says that it is of a known model_type."""
    from zerojax.models import families

    shutil.copytree(folder, copy)
    raw = json.loads((copy / "config.json").read_text())
    form = raw["architectures"][0].partition("For")[2]
    classes = families.MODEL_TYPES[known].huggingface.architectures[known]
    architecture = next(name for name in classes if name.partition("For")[2] == form)
    (copy / "config.json").write_text(json.dumps({**raw, "model_type": known, "architectures": [architecture]}))
    return copy


def _gradients(loaded: Any, grads: Any, expected: Mapping[str, np.ndarray]) -> Row:
    """Returns the row of the gradient that differs most, relative to its norm."""
    from zerojax import tree
    from zerojax.interop import layout

    if "gradients" not in expected:
        return Row("gradients", "are not in expected.npz", True)
    known = dict(zip(expected["gradients_of"].tolist(), expected["gradients"]))
    leaves, worst, count = dict(tree.flatten(grads)), (0.0, "none"), 0
    for tensor in layout.tensors(loaded.family, loaded.config):
        if tensor.name in known and tensor.path in leaves:
            theirs, ours = known[tensor.name], _summary(tensor.to_theirs(np.asarray(leaves[tensor.path])))
            worst = max(worst, (float(np.abs(ours - theirs).max() / (theirs[0] + 1e-6)), tensor.name))
            count += 1
    told = f"{worst[0]:.1e} of at most {GRADIENTS:.1e} ({worst[1]}); {count} of {len(known)} tensors compared"
    return Row("gradients", told, worst[0] <= GRADIENTS and count > 0)


def _exported(source: pathlib.Path, export: pathlib.Path) -> Row:
    """Returns the row of the tensors of an export: they should have the names and bytes of the folder."""
    import safetensors.numpy

    theirs, ours = (
        {
            name: array.tobytes()
            for file in at.glob("*.safetensors")
            for name, array in safetensors.numpy.load_file(file).items()
        }
        for at in (source, export)
    )
    if odd := sorted(theirs.keys() ^ ours.keys()):
        return Row("export", f"{len(odd)} names differ, such as {odd[0]}", False)
    odd = [name for name in theirs if theirs[name] != ours[name]]
    return Row("export", f"{len(odd)} tensors differ, such as {odd[0]}" if odd else f"{len(ours)} tensors", not odd)


if __name__ == "__main__":
    main()
