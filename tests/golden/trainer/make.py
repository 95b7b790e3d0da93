"""Makes the files of this folder with transformers' Trainer: python make.py OUT, where torch and transformers are installed.

A folder for each model: its config.json, its weights before (model.safetensors) and after training (after.safetensors), and the batches
(batches.npz). Beside them, decayed.json holds what Trainer's rule says of the tensors of the models in tests/golden/huggingface.
"""

import collections
import json
import pathlib
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

STEPS, ROWS, LENGTH, VOCAB, CLASSES = 4, 8, 12, 64, 3
OTHERS = pathlib.Path(__file__).parents[1] / "huggingface"
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**WIDTHS, "vocab_size": VOCAB, "head_dim": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
ROTARY |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "qwen2": transformers.Qwen2Config(**ROTARY),
    "gemma": transformers.GemmaConfig(**ROTARY, attention_bias=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        **NO_DROPOUT,
    ),
    "bert": transformers.BertConfig(
        **WIDTHS,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
}


def train(name: str, config: transformers.PretrainedConfig, out: pathlib.Path) -> None:
    """Trains one model, all weights drawn at random, norms and biases too."""
    torch.manual_seed(0)
    is_classifier = name == "bert"
    auto = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and weight.endswith("weight") and name != "gemma"  # which adds 1
            parameter.copy_(0.2 * torch.randn_like(parameter) + is_scale)
    model.save_pretrained(out)
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(STEPS * ROWS):
        mask = (np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1)).astype(np.int64)
        ids = rng.integers(3, VOCAB, LENGTH) * mask
        labels = np.where((mask > 0) & (np.arange(LENGTH) > 0), ids, -100)
        labels = rng.integers(0, CLASSES) if is_classifier else labels
        examples.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    batches = []

    def collate(rows: list) -> dict:
        batches.append({key: np.stack([row[key] for row in rows]) for key in rows[0]})
        return {key: torch.from_numpy(array) for key, array in batches[-1].items()}

    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=0.01,
        weight_decay=0.3,
        lr_scheduler_type="linear",
        adam_epsilon=1e-4,  # a key's bias has no gradient but rounding, which a smaller one would enlarge to whole steps
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    transformers.Trainer(model, arguments, train_dataset=examples, data_collator=collate).train()
    after = {key: array for key, array in model.state_dict().items() if key in load_file(out / "model.safetensors")}
    save_file(after, out / "after.safetensors")
    np.savez_compressed(
        out / "batches.npz", **{key: np.stack([batch[key] for batch in batches[:STEPS]]) for key in batches[0]}
    )
    (out / "generation_config.json").unlink(missing_ok=True)


def rule(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns which tensors of a model's file Trainer decays, which it spares, and which are no parameters.

    transformers may hold several of them in one parameter, so all are filled with their verdict and saved.
    """
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    verdicts = ("decayed", "spared", "buffers")
    for _, buffer in model.named_buffers():
        buffer.fill_(verdicts.index("buffers"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(verdicts.index("decayed" if name in decayed else "spared"))
    found = collections.defaultdict(set)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        for name, tensor in load_file(pathlib.Path(saved) / "model.safetensors").items():
            (verdict,) = tensor.unique().tolist()
            found[verdicts[int(verdict)]].add(re.sub(r"\.\d+\.", ".0.", name))
    return {verdict: sorted(names) for verdict, names in found.items()}


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    for name, config in MODELS.items():
        train(name, config, out / name)
    rules = {folder.parent.name: rule(folder.parent) for folder in sorted(OTHERS.glob("*/config.json"))}
    (out / "decayed.json").write_text(json.dumps(rules, indent=1) + "\n")
