"""Every setting with its default, unit and effect. The other configs override some of them.

    python -m zerojax.train --config configs/base.py

Devices: any number that divides 32; without an accelerator 8 CPU devices are emulated. Result: as configs/zero3.py.
"""

from ml_collections import config_dict


def get_config():
    c = config_dict.ConfigDict()

    c.seed = 0  # of the weights, the data order and the sample
    # a folder of transformers (config.json and safetensors), or a name on the Hugging Face hub: the model and its first weights; "":
    # c.model's, drawn at random
    c.init_from = ""
    c.steps = 150  # optimizer steps; not read with epochs
    c.epochs = (
        0.0  # times that the training examples of a task are read, with an evaluation after each; 0: c.steps counts
    )
    # global_batch_size = micro_batch_size * grad_accum * data * replica; one of the three may be 0, and is then derived;
    c.global_batch_size = 32  # sequences per optimizer step, over all devices
    c.micro_batch_size = 0  # sequences per device and forward pass
    c.grad_accum = 1  # forward and backward passes per optimizer step
    c.seq_len = 128  # tokens per sequence
    # "fp32"; "bf16" and "fp16": 16-bit arithmetic, float32 master weights (fp16: see loss_scale); "bf16_sr": 16-bit weights without
    # master weights, rounded stochastically; "fp8": as "bf16", but the matmuls of blocks run in fp8 (see fp8)
    c.precision = "bf16"
    c.reduce_dtype = "fp32"  # of the gradient reduction over devices: "fp32", or "bf16" (half the bytes, rounded sums)
    c.accum_dtype = (
        "fp32"  # of the sums over the passes of a step: "fp32", or "bf16" (half the memory, rounded at random)
    )
    c.log_every = 10  # steps between lines of metrics.jsonl
    c.emulate_devices = 8  # CPU devices to emulate if there is no accelerator

    c.mesh = config_dict.ConfigDict()  # the devices are replica x data x model
    c.mesh.replica = 1  # replicas of the sharded state (hybrid sharding)
    c.mesh.data = -1  # ZeRO shards over it; -1: all remaining devices
    c.mesh.model = 1  # tensor parallel size, used by leaves whose override names `model`

    c.zero = config_dict.ConfigDict()  # what is sharded over the devices
    c.zero.stage = 3  # sharded: 0 nothing, 1 optimizer state, 2 + gradients, 3 + params
    c.zero.min_size = 1024  # elements; a smaller leaf is replicated
    c.zero.indivisible = (
        "whole"  # a leaf with no divisible dim: "whole" replicates it, "pad" pads one dim and shards it
    )
    c.zero.overrides = ()  # ordered ((path regex, (mesh axis or None for each dim)), ...); the first match wins

    c.offload = config_dict.ConfigDict()  # what lives outside of device memory between its uses: docs/offload.md
    c.offload.optimizer = (
        "none"  # moments and master weights: "host" keeps them in pinned host memory, "nvme" in a file (stages 1 to 3)
    )
    c.offload.params = "none"  # weights, with an offloaded optimizer at stage 3: the same; fetched block by block
    c.offload.fraction = 1.0  # of the optimizer state that is offloaded, above 0
    c.offload.params_fraction = 1.0  # of the params that may be offloaded, above 0
    c.offload.params_on_device = ""  # a regex of params that stay on the device ("embed|head")
    c.offload.chunk_bytes = 256 << 20  # copied and updated together on each device
    c.offload.in_flight = 8  # chunks on a device at once; half of them arrive before the forward pass
    c.offload.by_block = (
        "auto"  # "on": each block a program of its own, so that updates run beside the backward pass; "off"
    )
    c.offload.late_norm = False  # clip by the norm of the step before, so that no update waits for its own
    c.offload.nvme_path = ""  # the folder of the files, on a local disk; "": WORKDIR/offload
    c.offload.nvme_buffers = 4  # chunks of each file, for each device, that are read into host memory ahead

    c.model = config_dict.ConfigDict()  # its shapes, and what its backward pass keeps
    c.model.preset = "tiny"  # a name in a PRESETS table in zerojax/models; not read with init_from
    c.model.vocab_size = 0  # rows of the embedding; 0: the preset's, or the tokenizer's if the preset has none
    c.model.num_layers = 0  # 0: the preset's
    c.model.remat = "dots"  # residuals kept: "none" all but weights, "dots" matmuls, "full" only layer inputs
    c.model.recompute = ""  # a regex of modules in layers whose matmuls "dots" recomputes (r"layer_\d+/mlp/up")
    # a regex of the embedding and the output projection ("embed|head"), if no device shall gather them: activations are sent instead, which
    # takes less memory, and less time where a device's tokens are fewer than the vocabulary; stage 3, untied, with labels on all tokens
    c.model.by_columns = ""
    c.model.offload = ""  # a regex of modules whose outputs are offloaded to host memory until the backward pass
    c.model.attention = (
        "auto"  # "xla", "cudnn" (Ampere or newer, bf16), "splash" (TPUs, bf16), or "auto": by device and precision
    )
    c.model.dropout = (
        0.0  # in training, of T5 and BART: the share of embeddings and of outputs of residual branches that is set to 0
    )

    c.fp8 = config_dict.ConfigDict()  # read with precision "fp8": docs/precision.md
    # scales from each array's largest magnitude: "tensorwise"; from those of earlier steps: "delayed"; for each row and column: "rowwise"
    c.fp8.recipe = "tensorwise"
    c.fp8.filter = ""  # a regex of the modules whose matmuls run in fp8 (r"layer_\d+/mlp/.*"); "": all in blocks
    c.fp8.first = 0  # blocks at the beginning whose matmuls stay in bf16
    c.fp8.last = 0  # blocks at the end
    c.fp8.history = 16  # steps that "delayed" remembers

    c.lora = config_dict.ConfigDict()  # adapters (LoRA): the other weights are frozen. docs/fine_tuning.md
    c.lora.r = 0  # the rank; 0: no adapters, or that of init_from
    c.lora.alpha = 0.0  # the adapter's output is multiplied by alpha / r; 0: as r, or that of init_from
    c.lora.dropout = 0.0  # the share of an adapter's inputs that is set to 0 in a training step
    # ends of names of modules in transformers, with commas ("q_proj,v_proj"); a regex of full names; "all-linear": all but the output
    # projection; "": the family's usual ones (PEFT's), or those of init_from
    c.lora.target_modules = ""
    c.lora.exclude_modules = ""  # those that get no adapter, in the same form
    c.lora.rslora = False  # True: alpha / sqrt(r)
    c.lora.modules_to_save = ""  # ends of names of modules that are trained in full, with commas ("lm_head")
    c.lora.init_from = ""  # a folder of PEFT, or a name on the hub: the adapters that the run starts from
    c.lora.quantize = "none"  # how frozen kernels are stored: "none", "int8", "nf4" (QLoRA)
    c.lora.frozen_dtype = (
        "auto"  # of other frozen weights: "fp32", "bf16", "fp16"; "auto": as in c.init_from, or the precision's
    )

    c.optimizer = config_dict.ConfigDict()  # with its schedule
    c.optimizer.name = "adamw"  # adam, adamw, adafactor, lamb, lion, sgd
    c.optimizer.learning_rate = 3e-3  # the schedule's peak
    c.optimizer.schedule = "cosine"  # constant, linear, cosine; WarmupLR, WarmupDecayLR, WarmupCosineLR as in DeepSpeed
    # steps of the warm-up; in a run with fewer, a tenth of these. Below 1: a share of the steps (those of epochs too)
    c.optimizer.warmup_steps = 20.0
    c.optimizer.warmup = "linear"  # the form of the warm-up: "linear", "log"
    c.optimizer.initial_fraction = 0.0  # of the peak, at step 0 of a warm-up
    c.optimizer.final_fraction = 0.1  # of the peak, at the last step (linear, cosine, WarmupCosineLR); at most 1
    c.optimizer.b1 = 0.9  # decay of the mean of gradients; of sgd: the momentum
    c.optimizer.b2 = 0.95  # decay of the mean of their squares
    c.optimizer.eps = 1e-8  # added to the root of that mean
    c.optimizer.weight_decay = (
        -1.0
    )  # decoupled from the gradient; -1: 0.1, or 0 where the optimizer has none (adam, sgd)
    c.optimizer.weight_decay_on = "matrices"  # leaves with two or more dims; "all": biases and scales too
    c.optimizer.clip_norm = 1.0  # maximum of the global gradient norm, above eps; 0: no clipping
    c.optimizer.moments = "fp32"  # stored in "fp32", "bf16" or "int8": 4, 2 or 1 bytes; only for adam, adamw and lion

    c.loss_scale = config_dict.ConfigDict()  # multiplies the loss with precision "fp16"
    c.loss_scale.static = 0.0  # a constant scale; 0: dynamic, by the fields below
    c.loss_scale.init_scale = 2.0**16  # the initial scale
    c.loss_scale.window = 1000  # steps without an overflow before it doubles
    c.loss_scale.hysteresis = 2  # overflows before it halves; each skips its step
    c.loss_scale.consecutive_hysteresis = False  # True: counts only consecutive overflows
    c.loss_scale.min_scale = 1.0  # the smallest scale
    c.loss_scale.on_minimum = "raise"  # an overflow at the smallest scale ends the run; "hold": the run continues

    c.data = config_dict.ConfigDict()  # what is learned
    c.data.name = "python_stdlib"  # a tensorflow-datasets name ("lm1b"), one of the Hugging Face hub ("hf:USER/DATASET"), or "random"
    c.data.train_split = "train"  # the split of data.name that is learned
    c.data.eval_split = "validation"  # held-out split, no part of train_split; "": none
    c.data.text_key = "text"  # the name of the text feature
    c.data.tokenizer = (
        "auto"  # "bytes", the path of a Hugging Face tokenizer.json, or "auto": that of init_from, else "bytes"
    )
    c.data.dir = ""  # folder of prepared datasets; "": WORKDIR/datasets
    # files instead of a dataset: a path or a pattern with *, of .jsonl, .json, .csv, .tsv or .parquet; "": c.data.name is read
    c.data.train_file = ""
    c.data.eval_file = ""  # held-out examples beside train_file; "": none
    # "text" learns windows of documents; "seq2seq", "classification" and "chat" learn answers (docs/fine_tuning.md), and read the rest
    c.data.task = "text"
    c.data.prompt = "{text}"  # a template with fields in braces
    c.data.answer = "{label}"  # a template of the answer
    c.data.labels = ()  # the text of each number in the answer's field (or texts among these); (): the dataset's own, else as it is
    c.data.messages = "messages"  # the field of a chat: [{"role": "user", "content": "..."}, ...]
    c.data.chat_template = (
        "auto"  # "own": the tokenizer's (needs jinja2), "plain": zerojax's, "auto": the first that there is
    )
    c.data.answer_len = (
        32  # tokens of an answer, with its end: of an encoder-decoder's targets, and of generated answers
    )
    c.data.pack = True  # a decoder's row holds several short examples, which do not see each other

    c.evaluate = config_dict.ConfigDict()  # on held-out examples
    c.evaluate.every = 50  # steps between evaluations; 0: only after the last step; not read with epochs
    c.evaluate.batches = 16  # of global_batch_size sequences, at most; 0, with a task: all held-out examples
    c.evaluate.patience = (
        0  # evaluations without a lower loss that end the run, with the best checkpoint's results; 0: none
    )
    c.evaluate.answers = (
        64  # held-out examples of a task whose answers are generated at an evaluation, at most; 0: none
    )

    c.checkpoint = config_dict.ConfigDict()  # WORKDIR/checkpoints
    c.checkpoint.every = 50  # steps between checkpoints; 0: none before the last step
    c.checkpoint.at_end = True  # False: the last step is not saved (a stop by a signal is always saved)
    c.checkpoint.keep_last = 2  # newest checkpoints kept
    c.checkpoint.keep_best = 1  # checkpoints of the lowest evaluation loss, also kept

    c.sample = config_dict.ConfigDict()  # a text that the model writes at the end
    c.sample.prompt = "def "  # a T5 preset fills in each ___
    c.sample.length = -1  # tokens; 0: none; -1: 160, or as many as the model has positions for
    c.sample.temperature = 0.8  # 0: the likeliest token

    c.export = config_dict.ConfigDict()  # the weights in the form of other libraries
    # "huggingface" writes safetensors and config.json to WORKDIR/export, with adapters merged; "peft" writes the adapters alone
    c.export.format = "none"
    c.export.push_to = (
        ""  # a name on the Hugging Face hub (user/model) that the export is written to; a new one is private
    )
    c.export.dtype = "auto"  # "fp32", "bf16", "fp16"; "auto": that of each tensor in init_from, or bf16 without one

    c.profile = config_dict.ConfigDict()  # a trace of some steps
    c.profile.start = 10  # the first step to trace; the first two steps of a run are slower
    c.profile.steps = 0  # steps to trace into WORKDIR/profile, with a table of their time by phase; 0: none

    c.metrics = config_dict.ConfigDict()  # WORKDIR/metrics.jsonl is always written
    c.metrics.to = ("tensorboard",)  # and to these: "tensorboard", "wandb", "mlflow"
    c.metrics.project = "zerojax"  # of wandb; the experiment of mlflow
    c.metrics.name = ""  # of the run there; "": the workdir's
    c.metrics.dir = ""  # folder of the files of wandb and mlflow; "": WORKDIR
    c.metrics.resume_id = ""  # the run to continue there; "": that of this workdir, or a new one
    return c
