"""Writes what TRL makes of conversations. This module needs torch, transformers and trl, and no test imports it.

PYTHONPATH=tests/support python tests/golden/trl/make.py
"""

import json
import pathlib
import random
import shutil
import tempfile

import chats
import datasets
import numpy as np
import transformers
import trl

FOLDER = pathlib.Path(__file__).parent
# {what is asked of TRL: its settings}
ASKED = {
    "padded": {"max_length": None},
    "truncated": {"max_length": 40},
    "packed": {"max_length": 90, "packing": True},
}
WORDS = "the weather is good in Paris and warm , a list of 12 numbers \n yes no é 中 !".split(" ")
KINDS = ("byte_level", "prepend")


def talks() -> list[list[dict[str, str]]]:
    """Returns random conversations of one to three turns."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randrange(1, 9)))

    found = []
    for number in range(24):
        messages = [{"role": "system", "content": text()}] if number % 3 == 0 else []
        for _ in range(draw.randrange(1, 4)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        found.append(messages)
    return found


def prepared(tokenizer: transformers.PreTrainedTokenizerBase, **settings: object) -> dict[str, np.ndarray]:
    """Returns one batch of all conversations, as TRL's trainer prepares and collates it, and the row of each of a packed batch."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes))
    config = trl.SFTConfig(
        tempfile.mkdtemp(),
        assistant_only_loss=True,
        shuffle_dataset=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    rows = datasets.Dataset.from_list([{"messages": messages} for messages in talks()])
    trainer = trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    batch = trainer.data_collator(list(trainer.train_dataset))
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    found = {name: np.asarray(batch[name], np.int32) for name in names if name in batch}
    sizes_of = trainer.train_dataset["seq_lengths"] if "packing" in settings else []
    return {**found, "rows": np.repeat(np.arange(len(sizes_of)), [len(sizes) for sizes in sizes_of])}


def main() -> None:
    """Writes the folders of the tokenizers, the conversations and the arrays."""
    (FOLDER / "talks.json").write_text(json.dumps(talks(), ensure_ascii=False, indent=1) + "\n")
    for kind in KINDS:
        shutil.rmtree(FOLDER / kind, ignore_errors=True)
        folder = chats.write(FOLDER / kind, kind, chats.CHATML)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found = {asked: prepared(tokenizer, **settings) for asked, settings in ASKED.items()}
        flat = {f"{asked}/{name}": array for asked, batch in found.items() for name, array in batch.items()}
        np.savez_compressed(folder / "expected.npz", **flat)


if __name__ == "__main__":
    main()
