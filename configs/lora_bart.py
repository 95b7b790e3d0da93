"""BART-large with LoRA adapters (r 8, alpha 32, dropout 0.1) on short labelled texts, float32: PEFT's seq2seq example at its shapes.

    python -m zerojax.train --config configs/lora_bart.py --config.init_from=opt/bart-large

Devices: 1 GPU with 4 GB or more. Add --config.offload.params=host to keep the frozen weights in host memory, block by block. Result: a
folder of PEFT in WORKDIR/export. Without init_from the weights are random, so only the time and the memory mean something.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.model.preset = "bart_large"
    c.precision = "fp32"
    c.seq_len = 64
    c.global_batch_size = 8
    c.epochs = 5.0
    c.zero.min_size = (
        65536  # adapters, norms and biases are replicated, as DeepSpeed's stage3_param_persistence_threshold does
    )
    c.lora.r, c.lora.alpha, c.lora.dropout = 8, 32.0, 0.1
    c.optimizer.learning_rate, c.optimizer.schedule, c.optimizer.final_fraction = 3e-3, "linear", 0.0
    c.optimizer.warmup_steps = 0
    c.optimizer.weight_decay = 0.0
    c.data.name, c.data.task, c.data.answer_len = "short_reviews", "seq2seq", 4
    c.data.train_split, c.data.eval_split = "train", "validation"
    c.data.prompt = "Text: {text} Label: "
    c.sample.length = 0
    c.export.format = "peft"
    return c
