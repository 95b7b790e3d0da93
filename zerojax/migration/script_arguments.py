"""Translates arguments of the scripts around a Trainer. This module reads the model, the adapters and the data.

The names are those of PEFT's and TRL's scripts, of the tool whose files have a `stage`, and of Axolotl, whose files have a `base_model`.
Such a file holds a Trainer's arguments too. docs/migrate.md names the sources.
"""

import math
from collections.abc import Mapping
from typing import Any

from zerojax.migration.draft import Draft
from zerojax.migration.keys import IMPLIED, NO_EFFECT, TAKEN, UNSUPPORTED, Key

TEXT, WHOLE, NUMBER, FLAG, MODULES = "text", "whole", "number", "flag", "modules"
# argument -> (the setting, the form of its value); the first of several arguments for a setting counts
PLACES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("model_name_or_path", "model_name"), ("init_from", TEXT)),
    "adapter_name_or_path": ("lora.init_from", TEXT),
    **dict.fromkeys(
        "cutoff_len max_seq_length max_seq_len max_length model_max_length block_size max_source_length".split(),
        ("seq_len", WHOLE),
    ),
    "max_target_length": ("data.answer_len", WHOLE),
    "train_file": ("data.train_file", TEXT),
    **dict.fromkeys(("dataset_text_field", "text_column_name"), ("data.text_key", TEXT)),
    **dict.fromkeys(("packing", "neat_packing"), ("data.pack", FLAG)),
    "run_name": ("metrics.name", TEXT),
}
ADAPTERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lora_r", "lora_rank"), ("lora.r", WHOLE)),
    "lora_alpha": ("lora.alpha", NUMBER),
    "lora_dropout": ("lora.dropout", NUMBER),
    **dict.fromkeys(("lora_target_modules", "lora_target", "target_modules"), ("lora.target_modules", MODULES)),
    **dict.fromkeys(
        ("lora_modules_to_save", "additional_target", "modules_to_save"), ("lora.modules_to_save", MODULES)
    ),
    **dict.fromkeys(("lora_target_parameters", "target_parameters"), ("lora.target_parameters", MODULES)),
    "use_rslora": ("lora.rslora", FLAG),
    "use_dora": ("lora.dora", FLAG),
}
_ALL_LINEAR = "lora_target_linear"
_ADAPTERS = ("lora", "qlora")  # values of `adapter`
# names of files with a `base_model`, and of PEFT's scripts -> the arguments that they mean
ALIASES: Mapping[str, str] = {
    "base_model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "cutoff_len",
    "sample_packing": "packing",
    "lora_model_dir": "adapter_name_or_path",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "rl_beta": "pref_beta",
    "dpo_beta": "pref_beta",
    "wandb_name": "run_name",
    "chat_template": "template",
    "early_stopping_steps": "early_stopping_patience",
    "activation_checkpointing": "gradient_checkpointing",  # the name since transformers 5.24
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "use_peft_lora": "use_peft",
    "use_4bit_quantization": "load_in_4bit",
    "use_8bit_quantization": "load_in_8bit",
}
# the key that tells a tool's files -> (the tool, what it takes for arguments that a file omits, where transformers takes something else)
OMITTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stage": ("the script", {"finetuning_type": "lora"}),
    "base_model": (
        "Axolotl",
        {
            "per_device_train_batch_size": 1,
            "num_train_epochs": 1.0,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.03,
            "cutoff_len": 512,
            "bf16": "auto",
        },
    ),
}
MOST_WARMUP = 100  # steps of Axolotl's own warm-up, where the number of steps is known
_BITS = ("quantization_bit", "load_in_4bit", "load_in_8bit")
QUANTIZED = {4: "nf4", 8: "int8"}
PREFERENCES = ("sigmoid", "ipo")
CLIENTS = ("tensorboard", "wandb", "mlflow")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# the prompt of type alpaca, which is that of Stanford Alpaca
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
# type of an entry of `datasets` -> (its settings, the one that names a field, the entry's key for it, the field without one)
_TYPES: Mapping[str, tuple[dict[str, str], str, str, str]] = {
    "alpaca": ({"data.task": "seq2seq", "data.prompt": _ALPACA, "data.answer": "{output}"}, "", "", ""),
    "chat_template": ({"data.task": "chat"}, "data.messages", "field_messages", "messages"),
    "sharegpt": ({"data.task": "chat"}, "data.messages", "field", "conversations"),
    "completion": ({"data.task": "text"}, "data.text_key", "field", "text"),
}

WANTED = "config.metrics.to has tensorboard, wandb and mlflow"
_PROCESS = "a run is one command a process"
_TOKENIZER = "the tokenizer is that of config.init_from; config.data.tokenizer names another tokenizer.json"
_READS = "examples are read and encoded once, before anything is compiled"
_BEST = "config.evaluate.patience ends a run without a lower loss, and exports its best step"
_ENGINE = "the task grpo draws answers by zerojax.Engine, ahead of a step with config.grpo.rollout_devices"
_HUB = "config.export.push_to names the model on the hub"
_LORA = ("lora.r", "lora.alpha", "lora.dropout", "lora.target_modules")

KEYS: Mapping[str, Key] = {
    **{name: Key(TAKEN, "", (place,)) for name, (place, _) in {**PLACES, **ADAPTERS}.items()},
    **dict.fromkeys(("validation_file", "eval_file"), Key(TAKEN, "", ("data.eval_file",))),
    **dict.fromkeys(
        ("dataset", "dataset_name", "dataset_name_or_path"), Key(TAKEN, "", ("data.name", "data.train_file"))
    ),
    "datasets": Key(
        TAKEN,
        "of its entry path, type and the field of its type are read; alpaca has one prompt, that of examples with an input",
        ("data.name", "data.train_file", "data.task", "data.messages", "data.prompt", "data.answer", "data.text_key"),
    ),
    **dict.fromkeys(_BITS, Key(TAKEN, "of frozen kernels", ("lora.quantize",), (False, None))),
    "finetuning_type": Key(TAKEN, "", _LORA),
    "use_peft": Key(TAKEN, "", _LORA, (False, None)),
    _ALL_LINEAR: Key(TAKEN, "", ("lora.target_modules",), (False, None)),
    **dict.fromkeys(("stage", "rl"), Key(TAKEN, "", ("data.task",))),
    "pref_beta": Key(TAKEN, "", ("dpo.beta",)),
    "pref_loss": Key(TAKEN, "", ("dpo.loss",)),
    "dpo_label_smoothing": Key(TAKEN, "", ("dpo.label_smoothing",), (0, None)),
    "beta": Key(UNSUPPORTED, "config.dpo.beta of the task dpo, config.grpo.kl of grpo"),
    "loss_type": Key(UNSUPPORTED, "config.dpo.loss of the task dpo, config.grpo.variant of grpo"),
    "label_smoothing": Key(UNSUPPORTED, "config.dpo.label_smoothing of the task dpo", (), (0, None)),
    "num_generations": Key(UNSUPPORTED, "config.grpo.group of the task grpo"),
    "num_iterations": Key(UNSUPPORTED, "config.grpo.inner_steps of the task grpo"),
    "epsilon": Key(UNSUPPORTED, "config.grpo.clip of the task grpo"),
    "epsilon_high": Key(UNSUPPORTED, "config.grpo.clip_high of the task grpo", (), (None,)),
    "reward_funcs": Key(UNSUPPORTED, "config.grpo.reward of the task grpo"),
    "max_completion_length": Key(UNSUPPORTED, "config.data.answer_len of the task grpo"),
    "assistant_only_loss": Key(UNSUPPORTED, "the task chat learns the assistant's messages alone", (), (False, None)),
    "completion_only_loss": Key(UNSUPPORTED, "the tasks seq2seq and chat learn answers alone", (), (None,)),
    "max_prompt_length": Key(UNSUPPORTED, "config.seq_len has room for a prompt and its answer", (), (None,)),
    "scale_rewards": Key(
        UNSUPPORTED, "config.grpo.variant says whether an advantage is divided by a deviation", (), ("group", True)
    ),
    "temperature": Key(UNSUPPORTED, "the task grpo draws answers at a temperature of 1", (), (1, None)),
    **dict.fromkeys(("use_vllm", "vllm_mode"), Key(UNSUPPORTED, _ENGINE, (), (False, None))),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience"),
        Key(UNSUPPORTED, _BEST, (), (False, None)),
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), Key(UNSUPPORTED, _HUB, (), (False, None))
    ),
    "evals_per_epoch": Key(UNSUPPORTED, "evaluations are counted in steps; set config.evaluate.every"),
    "saves_per_epoch": Key(UNSUPPORTED, "checkpoints are counted in steps; set config.checkpoint.every"),
    "wandb_project": Key(
        TAKEN, "a run needs its package: pip install 'zerojax[wandb]'", ("metrics.to", "metrics.project")
    ),
    "adapter": Key(IMPLIED, "adapters are trained where config.lora.r is above 0"),
    "report_to": Key(TAKEN, "wandb and mlflow need their packages", ("metrics.to",)),
    "bnb_4bit_quant_type": Key(UNSUPPORTED, "4 bits are nf4", (), ("nf4", None)),
    "bnb_4bit_compute_dtype": Key(NO_EFFECT, "matmuls are in the precision's dtype"),
    **dict.fromkeys(
        ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization"),
        Key(NO_EFFECT, "scales are bf16, for 64 weights each"),
    ),
    "lora_bias": Key(UNSUPPORTED, "adapters train no biases", (), ("none", None)),
    "lora_task_type": Key(IMPLIED, "the model's family says it"),
    "task_type": Key(IMPLIED, "the model's family says it"),
    "template": Key(UNSUPPORTED, "chats have the tokenizer's own template; config.data.chat_template"),
    "dataset_dir": Key(UNSUPPORTED, "name the file itself in config.data.train_file"),
    "dataset_config_name": Key(UNSUPPORTED, "name the file itself in config.data.train_file", (), (None, "")),
    "max_samples": Key(UNSUPPORTED, "all examples are read", (), (None,)),
    **dict.fromkeys(
        ("val_size", "val_set_size"),
        Key(UNSUPPORTED, "held-out examples are config.data.eval_file or config.data.eval_split", (), (0, None)),
    ),
    **dict.fromkeys(("model_type", "tokenizer_type"), Key(IMPLIED, "config.json of the model's folder says it")),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), Key(UNSUPPORTED, _TOKENIZER, (), (None, ""))),
    "use_fast_tokenizer": Key(IMPLIED, _TOKENIZER),
    "model_revision": Key(UNSUPPORTED, "config.init_from is a folder", (), ("main", None)),
    "trust_remote_code": Key(NO_EFFECT, "no code of a model's folder is run"),
    "cache_dir": Key(NO_EFFECT, "config.init_from is a folder, and data are in config.data.dir"),
    **dict.fromkeys(
        ("torch_dtype", "dtype", "model_dtype"),
        Key(NO_EFFECT, "config.precision decides the dtype of weights; frozen ones have config.lora.frozen_dtype"),
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "use_flash_attention_2", "use_flash_attn", "flash_attention"),
        Key(IMPLIED, "config.model.attention=auto takes cuDNN's flash attention where there is one"),
    ),
    **dict.fromkeys(
        "preprocessing_num_workers dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc "
        "overwrite_cache remove_unused_columns dataloader_persistent_workers preprocessing_batch_size dataset_prepared_path "
        "dataset_processes".split(),
        Key(NO_EFFECT, _READS),
    ),
    "pad_to_sequence_len": Key(IMPLIED, "rows have config.seq_len tokens"),
    "average_tokens_across_devices": Key(IMPLIED, "a loss is the mean over the tokens of all devices and passes"),
    "dataloader_drop_last": Key(IMPLIED, "batches are full: an epoch's last one begins the next"),
    "do_train": Key(IMPLIED, "a run trains"),
    "do_eval": Key(IMPLIED, "held-out examples are evaluated; config.evaluate.every"),
    "overwrite_output_dir": Key(NO_EFFECT, "a run resumes in its --workdir; name a new one to begin anew"),
    "plot_loss": Key(IMPLIED, "a run writes losses.png"),
    "logging_dir": Key(NO_EFFECT, "events go to WORKDIR/tensorboard"),
    "logging_first_step": Key(NO_EFFECT, "config.log_every counts steps"),
    "data_seed": Key(NO_EFFECT, "config.seed is that of the data too"),
    "use_reentrant": Key(NO_EFFECT, "config.model.remat decides what is kept"),
    "gradient_checkpointing_kwargs.*": Key(NO_EFFECT, "config.model.remat decides what is kept"),
    "tf32": Key(NO_EFFECT, "config.precision decides the arithmetic"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), Key(IMPLIED, "an evaluation has the precision of training")),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), Key(IMPLIED, "XLA compiles the whole step")
    ),
    **dict.fromkeys(
        "use_liger_kernel enable_liger_kernel liger_rms_norm liger_layer_norm liger_rope liger_glu_activation "
        "liger_fused_linear_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel".split(),
        Key(IMPLIED, "XLA fuses norms, rotations and activations, and the loss is computed in parts"),
    ),
    "use_cache": Key(NO_EFFECT, "training has no cache of keys and values"),
    "save_safetensors": Key(IMPLIED, "exports are safetensors"),
    "save_only_model": Key(NO_EFFECT, "a checkpoint holds the state too, so that a run resumes"),
    "include_num_input_tokens_seen": Key(NO_EFFECT, "metrics.jsonl has tokens_per_second"),
    **dict.fromkeys(
        "ddp_timeout ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb local_rank disable_tqdm log_level "
        "log_on_each_node skip_memory_metrics".split(),
        Key(NO_EFFECT, _PROCESS),
    ),
}


def omitted(content: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the tool whose file this is, and what it takes for arguments that the file omits.

    Args:
      content: the file.
      arguments: the same under the names of a Trainer's arguments.
    """
    tool, values = next((OMITTED[name] for name in OMITTED if name in content), ("transformers", {}))
    given = {name for name, value in arguments.items() if value is not None}
    found = {name: value for name, value in values.items() if name not in given}
    if tool == "Axolotl":
        if "warmup_steps" in given or "warmup_ratio" in given:
            found.pop("warmup_ratio", None)
        elif isinstance(steps := arguments.get("max_steps"), int) and 0 < steps < 2**31:
            found["warmup_steps"] = min(int(found.pop("warmup_ratio") * steps), MOST_WARMUP)
        if arguments.get("fp16"):
            found.pop("bf16", None)
        if arguments.get("fsdp_config") and "fsdp" not in given:
            found["fsdp"] = True
        if "eval_steps" in given and given.isdisjoint(("eval_strategy", "evaluation_strategy")):
            found["eval_strategy"] = "steps"
    return tool, found


def read(draft: Draft) -> None:
    """Puts the settings of the arguments that a script adds to a Trainer's.

    Raises:
      UserError: a value has a wrong type.
    """
    for name, (place, form) in PLACES.items():
        if name == "max_length" and draft.has("stage"):
            draft.say(name, NO_EFFECT, "it bounds what is generated; cutoff_len is the length of examples")
        else:
            _put(draft, name, place, form)
    for name in ("validation_file", "eval_file"):
        if _put(draft, name, "data.eval_file", TEXT) and "data.train_file" not in draft.settings:
            del draft.settings["data.eval_file"]
            draft.say(name, UNSUPPORTED, "config.data.eval_file goes with config.data.train_file; name both")
    _dataset(draft)
    _adapters(draft)
    _stage(draft)
    _clients(draft)


def _put(draft: Draft, name: str, place: str, form: str) -> bool:
    """Puts an argument's value in the form of a setting, if it has one."""
    if draft.get(name) in (None, "") or place in draft.settings:
        return False
    value = draft.get(name)
    if form == WHOLE:
        value = draft.whole(name)
    elif form == NUMBER:
        value = draft.number(name)
    elif form == FLAG:
        value = draft.flag(name)
    elif form == MODULES:
        value = _modules(value)
    else:
        value = str(value)
    if form in (WHOLE, NUMBER) and value <= 0 and name != "lora_dropout":
        return False  # -1: not given
    draft.put(place, value, name)
    return True


def _modules(value: object) -> str:
    """Returns names of modules as config.lora has them: with commas, and "all-linear" for all."""
    names = [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]
    return "all-linear" if names == ["all"] else ",".join(names)


def _dataset(draft: Draft) -> None:
    """Puts a dataset's name, or the file that it is."""
    for name in ("dataset", "dataset_name", "dataset_name_or_path"):
        value = draft.get(name)
        if value in (None, ""):
            continue
        if not isinstance(value, str) or "," in value:
            draft.say(
                name, UNSUPPORTED, "a run reads one dataset; join the files and name them in config.data.train_file"
            )
        elif draft.has("stage") and _named(value) == ("data.name", value):
            draft.say(name, UNSUPPORTED, "a name of dataset_info.json; name its file in config.data.train_file")
        else:
            draft.put(*_named(value), name)
    found = draft.get("datasets")
    entry = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], Mapping) else {}
    path, kind = entry.get("path"), entry.get("type")
    if not isinstance(path, str) or not path or not isinstance(kind, str) or kind not in _TYPES:
        if found:
            draft.say(
                "datasets",
                UNSUPPORTED,
                f"a run reads one dataset, here of type {', '.join(_TYPES)}; name it in config.data.train_file, or as hf:USER/DATASET in "
                "config.data.name, and set config.data.task",
            )
        return
    settings, place, key, default = _TYPES[kind]
    settings = {**settings, **({place: str(entry.get(key) or default)} if place else {}), **dict([_named(path)])}
    for place, value in settings.items():
        draft.put(place, value, "datasets")


def _named(value: str) -> tuple[str, str]:
    """Returns the setting that names a dataset, and its value."""
    if value.lower().endswith(SUFFIXES):
        return "data.train_file", value
    return "data.name", f"hf:{value}" if "/" in value else value  # USER/DATASET is one of the hub


def _adapters(draft: Draft) -> None:
    """Puts the adapters, with the defaults of the script for what it omits."""
    kind = str(draft.get("finetuning_type", "")).lower()
    if kind not in ("", "lora", "full"):
        draft.say("finetuning_type", UNSUPPORTED, "adapters are LoRA; config.lora, or all weights are trained")
    given = [name for name in ADAPTERS if draft.get(name) not in (None, "")]
    is_peft = draft.flag("use_peft")
    adapter = str(draft.get("adapter") or "").lower()
    if adapter not in ("", *_ADAPTERS):
        draft.say("adapter", UNSUPPORTED, "adapters are LoRA; config.lora, or all weights are trained")
    is_on = kind == "lora" or is_peft or adapter in _ADAPTERS
    is_on |= any(name in ("lora_r", "lora_rank", "adapter_name_or_path") for name in given)
    if kind not in ("", "lora") or (draft.get("use_peft") is not None and not is_peft) or not is_on:
        if kind == "full":
            draft.say("finetuning_type", IMPLIED, "all weights are trained where config.lora.r is 0")
        for name in (*given, *_BITS):
            draft.say(name, NO_EFFECT, "no adapters are trained")
        return
    for name, (place, form) in ADAPTERS.items():
        _put(draft, name, place, form)
    if draft.flag(_ALL_LINEAR):
        draft.put("lora.target_modules", "all-linear", _ALL_LINEAR)
    defaults: dict[str, Any] = {"lora.r": 8, "lora.alpha": 8.0}
    if kind == "lora" or draft.has("lora_rank"):
        rank = draft.settings.get("lora.r", 8)
        defaults = {"lora.r": 8, "lora.alpha": 2.0 * rank, "lora.target_modules": "all-linear"}
    elif is_peft:
        defaults = {"lora.r": 16, "lora.alpha": 32.0, "lora.dropout": 0.05}
    if "lora.init_from" in draft.settings:
        defaults = {}
    lacking = {place: value for place, value in defaults.items() if place not in draft.settings}
    switch = next((name for name in ("finetuning_type", "use_peft", "adapter") if draft.has(name)), "")
    if lacking:
        draft.assume(switch or "lora_alpha", lacking, "the script's default for what is absent")
    elif switch:
        draft.say(switch, IMPLIED, "adapters are trained where config.lora.r is above 0")
    for name in _BITS:
        bits = {"load_in_4bit": 4, "load_in_8bit": 8}.get(name, draft.get(name)) if draft.flag(name) else None
        if bits in QUANTIZED:
            draft.put("lora.quantize", QUANTIZED[bits], name)
        elif bits is not None:
            draft.say(name, UNSUPPORTED, f"frozen kernels are stored in {' or '.join(map(str, QUANTIZED))} bits")
    if "export.format" not in draft.settings:
        draft.put("export.format", "peft", *given, switch)


def _stage(draft: Draft) -> None:
    """Puts the task of the argument `stage` or `rl`, and the length of examples that its tool takes where the file has none."""
    name = next((one for one in ("stage", "rl") if draft.get(one)), "")
    kind = str(draft.get(name)).lower()
    if kind == "pt":
        draft.put("data.task", "text", name)
    elif kind == "sft":
        why = "its examples are conversations; for other fields config.data.task=seq2seq, prompt and answer"
        draft.assume(name, {"data.task": "chat"}, why)
    elif kind in ("dpo", "ipo"):
        draft.put("data.task", "dpo", name)
        _put(draft, "pref_beta", "dpo.beta", NUMBER)
        _put(draft, "dpo_label_smoothing", "dpo.label_smoothing", NUMBER)
        if kind == "ipo":
            draft.put("dpo.loss", kind, name)
        elif str(draft.get("pref_loss", "sigmoid")) in PREFERENCES:
            _put(draft, "pref_loss", "dpo.loss", TEXT)
        else:
            draft.say(
                "pref_loss",
                UNSUPPORTED,
                "config.dpo.loss has sigmoid, ipo, kto, orpo and simpo; set it with its config.dpo.beta",
            )
    elif name:
        draft.say(name, UNSUPPORTED, "config.data.task has what is learned: supervised, of preferences, or of rewards")
    if name == "stage" and "seq_len" not in draft.settings:
        draft.assume("cutoff_len", {"seq_len": 2048}, "absent: the script's default is taken")


def _clients(draft: Draft) -> None:
    """Puts the clients that show the metrics."""
    if project := draft.get("wandb_project"):
        draft.put("metrics.project", str(project), "wandb_project")
        draft.put("metrics.to", ("tensorboard", "wandb"), "wandb_project")
    value = draft.get("report_to")
    if not draft.has("report_to") or value is None:
        return
    names = [str(one).lower() for one in (value if isinstance(value, list) else str(value).split(","))]
    names = [name.strip() for name in names if name.strip() not in ("", "none")]
    others = [name for name in names if name not in CLIENTS]
    draft.put("metrics.to", tuple(name for name in CLIENTS if name in names), "report_to")
    if others:
        draft.say("report_to", UNSUPPORTED, f"there is no client for {', '.join(others)}; {WANTED}")


def share(value: object, steps: Any) -> int | None:
    """Returns a number of steps; a value below 1 is a share of `steps`. None if it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        return None
    if value < 1:
        return math.ceil(value * steps) if isinstance(steps, int) and 0 < steps < 2**31 else None
    return int(value) if value == int(value) else None
