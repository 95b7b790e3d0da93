"""Writes the golden folders whose positions depend on a text's length. This module needs torch and transformers.

    python tests/golden/huggingface/make_by_length.py

`texts` are read each alone (`logits`, with zeros after its `lengths`), and the first `prompts` tokens of each are continued greedily with
transformers' cache (`generated`).
"""

import pathlib

import numpy as np
import torch
import transformers

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + 1.5 * n for n in range(8)],
}
MODELS = {
    "phi3long": transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **SHAPE, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONGROPE
        )
    ),
    "llamadynamic": transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SHAPE,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        )
    ),
}
LENGTHS, PROMPTS, NEW = (30, 20, 12), (12, 15, 12), 24


def main() -> None:
    """Writes the folders beside this file."""
    for name, model in MODELS.items():
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.15 + (weight.ndim == 1))
        folder = pathlib.Path(__file__).parent / name
        model.generation_config.eos_token_id = 2
        model.save_pretrained(folder)
        texts = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
        logits = np.zeros((*texts.shape, SHAPE["vocab_size"]), np.float32)
        generated = np.zeros((len(LENGTHS), NEW), np.int32)
        for row, length in enumerate(LENGTHS):
            # Its rotation remembers the longest text
            own = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            texts[row, :length] = np.random.RandomState(row).randint(3, 96, length)
            text = torch.tensor(texts[row : row + 1, :length]).long()
            with torch.no_grad():
                logits[row, :length] = own(text, use_cache=False).logits[0]
            own = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
            generated[row] = own.generate(text[:, : PROMPTS[row]], **how)[0, PROMPTS[row] :]
        np.savez(
            folder / "expected.npz",
            texts=texts,
            lengths=np.array(LENGTHS),
            prompts=np.array(PROMPTS),
            logits=logits,
            generated=generated,
        )


if __name__ == "__main__":
    main()
