# ruff: noqa
"""torchtitan 0.3.0 on Llama and Qwen3 shapes, run under torch.distributed.run.

Usage: peer_titan3.py SHAPE LOCAL_BATCH SEQ selective|full|none STEPS [tp=N] [pp=N] [schedule=NAME] [async] [attn=sdpa|flex] [balanced] [float8] [layers=N] [nocompile]
SHAPE: 8B, 1B (untied, as ours), qwen30 (Qwen3-30B-A3B), moe or debug (tiny). It makes its own tokenizer and text (the standard library's sources,
in documents of at least 100,000 tokens, so that attention is causal over whole sequences), so it downloads nothing.

PyTorch 2.11.0 lacks one name that 0.3.0 imports, `torch.distributed.fsdp.DataParallelMeshDims`. Only the backend `spmd_types` uses it.
Here it is an empty class, and the backend is `partial_dtensor`. A pipeline's stages and steps take other arguments there, the norm and the
head are one group of FSDP2 (the loss in chunks needs two), and the timeouts' setter has changed: each is put right below. Attention is cuDNN's
by torchtitan's own module, as in 0.2.2, since the kernels of `varlen` (FlashAttention 3) are not in PyTorch; `attn=flex` has its default.
"""

import inspect
import json
import os
import pathlib
import sys
import sysconfig
import tempfile
import time

import torch.distributed.fsdp as fsdp

if not hasattr(fsdp, "DataParallelMeshDims"):
    fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})

import torch.distributed.pipelining.schedules as schedules
import torchtitan.distributed.fsdp as titan_fsdp
import torchtitan.distributed.pipeline_parallel as pipeline_parallel
import torchtitan.distributed.utils as dist_utils


def stage_without_get_mesh(*arguments, get_mesh=None, **named):
    return _stage(*arguments, **named)


def step_of_microbatches(self, *, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs):
    """The newer `step` takes lists of micro-batches, as `_step_microbatches` does in 2.11.0, and arguments of the loss."""
    loss_fn, count = self._loss_fn, self._n_microbatches
    for stage in getattr(self, "_stages", None) or [self._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()

    def loss_alone(output, target):
        loss = loss_fn(output, target, **loss_kwargs)
        return loss[0] if isinstance(loss, tuple) else loss

    self._loss_fn = loss_alone
    try:
        self._step_microbatches(arg_mbs or [()] * count, kwarg_mbs, target_mbs, losses, return_outputs)
    finally:
        self._loss_fn = loss_fn


if "get_mesh" not in inspect.signature(pipeline_parallel.PipelineStage.__init__).parameters:
    _stage = pipeline_parallel.PipelineStage
    pipeline_parallel.PipelineStage = stage_without_get_mesh
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        schedule.step = step_of_microbatches
_fully_shard = titan_fsdp.fully_shard


def fully_shard_each(modules, **named):
    """2.11.0 lets a group of modules go after the forward of all of them; the loss in chunks calls the head alone, again and again."""
    for module in modules if isinstance(modules, list) else [modules]:
        _fully_shard(module, **named)


titan_fsdp.fully_shard = fully_shard_each
dist_utils.set_pg_timeouts = lambda *arguments, **named: None  # a signature that has changed; timeouts alone

shape, batch, seq, ac, steps, *more = sys.argv[1:]
more = dict(m.partition("=")[::2] for m in more)
home = pathlib.Path(tempfile.gettempdir()) / "titan3_assets"
if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not (home / "ready").exists():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    (home / "tok").mkdir(parents=True, exist_ok=True)
    (home / "text").mkdir(exist_ok=True)
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    texts = [p.read_text(errors="ignore") for p in files]
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel()
    t.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    t.save(str(home / "tok/tokenizer.json"))
    (home / "tok/tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"})
    )
    whole = "\n".join(texts)
    cut = 400_000  # characters: at least 100,000 tokens
    with open(home / "text/data.json", "w") as f:
        f.writelines(json.dumps({"text": whole[i : i + cut]}) + "\n" for i in range(0, len(whole) - cut, cut))
    (home / "ready").touch()
while not (home / "ready").exists():
    time.sleep(0.2)

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

if (
    more.get("attn", "sdpa") == "sdpa"
):  # cuDNN's, causal over the whole sequence, by torchtitan's own module, which its language models no longer offer
    from torchtitan.models.common import attention, decoder

    def causal(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False, out_transform=None, **named
    ):
        return _sdpa(_holder, q_BLNH, k_BLNH, v_BLNH, scale=scale, enable_gqa=q_BLNH.shape[2] != k_BLNH.shape[2])

    _sdpa = attention.ScaledDotProductAttention.forward
    _holder = attention.ScaledDotProductAttention.Config().build()
    attention.FlexAttention.forward = causal
    decoder.Decoder.get_attention_masks = lambda self, *arguments, **named: None

module, flavor = {
    "8B": (llama3, "8B"),
    "1B": (llama3, "1B"),
    "debug": (llama3, "debugmodel"),
    "qwen30": (qwen3, "30B-A3B"),
    "moe": (qwen3, "debugmodel_moe"),
}[shape]
converters = None
if "float8" in more:
    from torchtitan.components.quantization import Float8LinearConverter

    converters = [
        Float8LinearConverter.Config(
            recipe_name=more["float8"] or "rowwise", filter_fqns=["lm_head"], model_compile_enabled=True
        )
    ]
spec = module.model_registry(
    flavor, attn_backend={"sdpa": "flex"}.get(more.get("attn", "sdpa"), more.get("attn")), converters=converters
)
if "layers" in more:
    spec.model.layers = spec.model.layers[: int(more["layers"])]
if shape == "1B":
    spec.model.enable_weight_tying = False
    spec.model.tok_embeddings.param_init = {
        "weight": __import__("functools").partial(__import__("torch").nn.init.normal_, std=1.0)
    }
compiled = "nocompile" not in more
loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
config = Trainer.Config(
    loss=loss if "pp" in more or "plainloss" in more else ChunkedLossWrapper.Config(loss_fn=loss),
    hf_assets_path=str(home / "tok"),
    model_spec=spec,
    optimizer=default_adamw(lr=3e-4),
    training=TrainingConfig(
        local_batch_size=int(batch),
        seq_len=int(seq),
        steps=int(steps),
        max_norm=1.0,
        disable_cuda_graphs="nographs" in more or "pp" in more,
    ),
    dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(home / "text")),
    metrics=MetricsProcessor.Config(log_freq=int(more.get("log", 5))),
    parallelism=ParallelismConfig(
        spmd_backend=more.get("spmd", "partial_dtensor"),
        tensor_parallel_degree=int(more.get("tp", 1)),
        pipeline_parallel_degree=int(more.get("pp", 1)),
        pipeline_parallel_schedule=more.get("schedule", "1F1B"),
    ),
    checkpoint=CheckpointManager.Config(enable=False),
    activation_checkpoint={"selective": SelectiveAC.Config, "full": FullAC.Config, "none": lambda: None}[ac](),
    compile=CompileConfig(enable=compiled, enable_async_tensor_parallel="async" in more),
)
if "balanced" in more:
    config.debug.moe_force_load_balance = True
init_logger()
trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
import torch.distributed

torch.distributed.destroy_process_group()
