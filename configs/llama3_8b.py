"""A decoder of Llama 3's 8B shapes (32 layers, 8.03B weights), stage 3, sequences of 8,192 tokens.

    python -m zerojax.train --config configs/llama3_8b.py --config.data.name=random --config.steps=20

Devices: 8 GPUs of 80 GB or more, and 6.6 GB of host memory for each. Weights and moments take 12 bytes per weight, 96 GB in total.
Text: as configs/llama3_1b.py. Result: as there; see docs/benchmarks/.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_8b"
    c.seq_len = 8192
    c.micro_batch_size = 2
    # 56.7 GB per GPU on 8 GPUs; 64.5 GB without offload and recompute, and 69 GB without by_columns too, which does not pay on many more:
    # hidden states of all devices' tokens are sent. A copy to the host takes the time of two layers where eight GPUs copy at once. The last
    # layers' backward pass comes too soon for one.
    c.model.by_columns = "embed|head"
    c.model.offload = r"layer_(1?[02468]|2[0246])/mlp/up"
    c.model.recompute = r"layer_(9|19)/(mlp/up|attention/q)"
    return c
