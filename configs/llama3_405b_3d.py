"""Llama 3's 405B shapes over data 8, pipe 8, context 2 and model 8 on 1,024 GPUs, stage 1, sequences of 8,192 tokens.

    srun python -m zerojax.train --config configs/llama3_405b_3d.py --workdir /shared/runs/405b --config.data.name=random

Devices: 1,024 GPUs of 141 GB in hosts of 8. The plan for H200s has 42 to 47 GiB on the devices of a group, of which the sums of gradients
are 24, and a step of 17.5 s (117 tokens/s/GPU). By arithmetic at 400 Gb/s it takes 20.5 s, of which 10.3 are arithmetic, 5.0 waits for
`model` and `context`, 3.6 the bubble and 0.6 waits for gradients; at stage 2, which sums them in each of 32 micro-batches, 35 s. The bubble
is 18.8%, that of equal stages 17.9%: 126 layers and the head do not divide by 8. Nobody has measured it. Text: as configs/llama3_1b.py.
Result: as there.
"""

from zerojax.configs import llama3_1b


def get_config():
    c = llama3_1b.get_config()
    c.model.preset = "llama3_405b"
    c.mesh.pipe, c.mesh.context, c.mesh.model = 8, 2, 8
    c.zero.stage = 1  # gradients are summed once a step, for 4 bytes an element of a group's weights on each device
    c.model.remat = "full"
    c.seq_len = 8192
    c.global_batch_size, c.micro_batch_size, c.grad_accum = 0, 1, 32
    return c
