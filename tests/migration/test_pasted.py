"""Checks what is repaired in texts copied from web pages. This module tests zerojax.migration.pasted."""

import re

import pytest
import yaml

from zerojax.migration import documents, pasted

ACCELERATE = """compute_environment: LOCAL_MACHINE
# a comment
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
tpu_env: []
"""
FSDP = """distributed_type: FSDP
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap:
  - LlamaDecoderLayer
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: bf16
"""
DEEPSPEED = """train_micro_batch_size_per_gpu: 2
zero_optimization: # stage 3
  stage: 3
  offload_optimizer:
    device: cpu
    pin_memory: true
  offload_param:
    device: nvme
    nvme_path: /local_disk
  overlap_comm: true
optimizer:
  type: AdamW
  params:
    lr: 1.0e-4
    betas:
    - 0.9
    - 0.95
scheduler:
  type: WarmupLR
  params:
    warmup_num_steps: 10
aio:
  queue_length: 8
bf16:
  enabled: true
fp16:
  enabled: false
gradient_clipping: 1.0
unknown_key: 1
"""


def flat(text):
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("text", [ACCELERATE, FSDP, DEEPSPEED], ids=["accelerate", "fsdp", "deepspeed"])
def test_a_text_that_a_page_has_changed_is_read_as_the_text_before(text, escaped, tmp_path):
    path = tmp_path / "pasted.yaml"
    path.write_text(flat(text).replace("_", r"\_") if escaped else flat(text))
    document = documents.read(str(path))
    assert document.content == yaml.safe_load(text)
    assert "no indentation" in document.repaired and (r"\_ are read as _" in document.repaired) == escaped


def test_a_key_whose_section_is_missing_or_elsewhere_is_read_in_the_only_section_that_knows_it():
    lines = flat(ACCELERATE).splitlines(keepends=True)
    without = "".join(line for line in lines if line != "deepspeed_config:\n")
    for text in (without, "".join(sorted(lines, reverse=True))):
        repaired, sections = pasted.indented(text, is_accelerate=True)
        assert yaml.safe_load(repaired) == yaml.safe_load(ACCELERATE) and sections == ["deepspeed_config"]


@pytest.mark.parametrize(
    "text", [ACCELERATE, DEEPSPEED, '{"zero_optimization":\n{\n"stage": 3\n}}', "a: 1\nbf16: {}\nstage: 1\n"]
)
def test_a_text_that_needs_no_repair_is_kept(text):
    assert pasted.unescaped(text) == text
    assert pasted.indented(text, is_accelerate="distributed_type" in text) == (text, [])


def test_a_backslash_in_a_value_is_no_escape():
    text = '{"tensorboard": {"output_path": "C:\\\\my\\\\_runs:"}}'
    assert pasted.unescaped(text) == text
