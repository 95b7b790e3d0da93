"""Writes golden adapters of PEFT, and checks those that zerojax wrote. This module needs torch, transformers and peft.

    python tests/golden/huggingface/make_adapters.py                      writes MODEL/KIND for each of ADAPTERS
    python tests/golden/huggingface/make_adapters.py MODEL/KIND FOLDER    prints how far PEFT's logits with FOLDER are from MODEL/KIND's

`fused` are adapters of stacked experts: what `all-linear` means in PEFT 0.21 with transformers 5, or `target_parameters`.
`make_expected.py MODEL/KIND` then rounds what was written to bfloat16.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

FOLDER, NEW = pathlib.Path(__file__).parent, 12
EXPERTS = ["gate_up_proj", "down_proj"]
ADAPTERS = {
    "mixtral/fused": {"target_modules": "all-linear"},
    "qwen3moe/fused": {"target_modules": "all-linear"},
    "qwen2moe/fused": {"target_modules": "all-linear", "target_parameters": ["gate.weight", *EXPERTS]},
    "deepseekv3/fused": {"target_modules": "all-linear"},
    "gptoss/fused": {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["router.weight", *EXPERTS]},
    "llama4/fused": {"target_modules": ["q_proj"], "target_parameters": ["router.weight", *EXPERTS]},
    "granitemoe/fused": {"target_modules": ["q_proj"], "target_parameters": ["router.weight", *EXPERTS]},
    "phimoe/fused": {"target_modules": ["q_proj"], "target_parameters": ["router.weight"]},
    "gptoss/down": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "use_rslora": True},
    "llama/dora": {"target_modules": "all-linear", "use_dora": True},
    "llama/embedding": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "qwen2/dora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True},
    "gpt2/dora": {"target_modules": ["c_attn", "c_proj", "wte"], "use_dora": True, "fan_in_fan_out": True},
    "llama/dora_head": {"target_modules": ["o_proj", "embed_tokens", "lm_head"], "use_dora": True},
}


def main() -> None:
    """Writes the folders, or compares one."""
    torch.manual_seed(0)
    if sys.argv[1:]:
        kind, folder = sys.argv[1:]
        expected = dict(np.load(FOLDER / kind / "expected.npz"))
        adapted = peft.PeftModel.from_pretrained(_model(kind), folder).eval()
        found = _logits(adapted, expected)
        print(f"{kind}: largest difference of logits {np.abs(found - expected['logits']).max():.2e}")
        return
    for kind, given in ADAPTERS.items():
        adapted = peft.get_peft_model(_model(kind), peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **given))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_magnitude" in name:
                    weight *= 1 + 0.2 * torch.randn(weight.shape)
                elif "lora_" in name:
                    weight.copy_(torch.randn(weight.shape) * (0.3 if "_A" in name else 0.1))
        _save(adapted.eval(), FOLDER / kind)


def _model(kind: str) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / kind.split("/")[0], dtype=torch.float32)
    model.config.name_or_path = model.name_or_path = ""  # which the folder would hold
    return model


def _save(adapted: peft.PeftModel, folder: pathlib.Path) -> None:
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = folder / "adapter_config.json"
    raw = json.loads(config.read_text())  # whose lists are sets, in any order
    raw = {key: sorted(value) if isinstance(value, list) else value for key, value in raw.items()}
    config.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    base = np.load(folder.parent / "expected.npz")
    arrays = {name: base[name] for name in ("input_ids", "attention_mask")}
    ids, mask = (torch.tensor(array).long() for array in arrays.values())
    logits = _logits(adapted, arrays)
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        loss = adapted(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        how = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        generated = adapted.generate(input_ids=ids, **how)
    np.savez(
        folder / "expected.npz",
        **arrays,
        labels=labels.numpy(),
        logits=logits,
        loss=loss.numpy(),
        generated=generated.numpy(),
    )


def _logits(adapted: peft.PeftModel, arrays: dict[str, np.ndarray]) -> np.ndarray:
    ids, mask = (torch.tensor(arrays[name]).long() for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        return adapted(ids, attention_mask=mask, use_cache=False).logits.numpy()


if __name__ == "__main__":
    main()
