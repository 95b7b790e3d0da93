"""Supervised fine-tuning of Llama 3.1 8B on conversations: all weights are trained, and the assistant's messages are the labels.

    python -m zerojax.train --config configs/sft_llama3_8b.py --config.init_from=opt/llama-3.1-8b --config.data.train_file=chats.jsonl

Devices: 8 GPUs with 80 GB. A line of the file is a conversation:
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}. Short ones share a row of 4,096 tokens and do
not see each other. Result: WORKDIR/export holds the model as transformers writes it. For memory and the least step time add --target h200
--topology 1x8 to the command of python -m zerojax.plan.
"""

from zerojax.configs import base, llama3_8b


def get_config():
    c = llama3_8b.get_config()
    c.init_from = "opt/llama-3.1-8b"
    c.data.task, c.data.train_file = "chat", "chats.jsonl"
    c.data.chat_template = "own"
    c.data.answer_len = 512
    c.seq_len, c.global_batch_size, c.micro_batch_size = 4096, 64, 2
    c.grad_accum = 0
    c.model.by_columns = ""  # answers alone are labels
    usual = base.get_config()
    c.epochs, c.steps, c.evaluate.every = 2.0, usual.steps, usual.evaluate.every  # epochs count
    c.optimizer.learning_rate, c.optimizer.schedule, c.optimizer.weight_decay = 1e-5, "cosine", 0.0
    c.optimizer.warmup_steps = 10
    c.export.format = "huggingface"
    return c
