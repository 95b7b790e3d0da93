"""Checks what the arguments of fine-tuning scripts become. This module tests zerojax.migration.script_arguments."""

import pytest

from zerojax.migration import draft, keys, script_arguments, trainer_arguments


def translated(**arguments):
    found = trainer_arguments.translate_trainer({"output_dir": "out", **arguments}, None)
    return found, {line.key: line for line in found.lines}


TELLING = {
    "lora_target_modules": ["q_proj", "v_proj"],
    "target_modules": "q_proj, v_proj",
    "modules_to_save": "lm_head",
    "packing": True,
    "neat_packing": True,
    "use_rslora": True,
    "use_dora": True,
    "model_name_or_path": "opt/model",
}


@pytest.mark.parametrize("name", [*script_arguments.PLACES, *script_arguments.ADAPTERS])
def test_an_argument_decides_its_setting(name):
    place, form = {**script_arguments.PLACES, **script_arguments.ADAPTERS}[name]
    value = TELLING.get(name, "text" if form in (script_arguments.TEXT, script_arguments.MODULES) else 4)
    beside = {"lora_r": 8} if name in script_arguments.ADAPTERS and place != "lora.r" else {}
    found, said = translated(**{name: value, **beside})
    expected = "q_proj,v_proj" if "target_modules" in name else value
    assert found.settings[place] == expected and said[name].verdict == keys.TAKEN
    assert f"config.{place} = " in said[name].text


@pytest.mark.parametrize(
    "arguments, lora",
    [
        ({"finetuning_type": "lora"}, (8, 16.0, None, "all-linear")),
        ({"finetuning_type": "lora", "lora_rank": 32, "lora_target": "all"}, (32, 64.0, None, "all-linear")),
        ({"lora_rank": 4, "lora_alpha": 1, "lora_target": "q_proj,v_proj"}, (4, 1.0, None, "q_proj,v_proj")),
        ({"use_peft": True}, (16, 32.0, 0.05, None)),
        ({"use_peft": True, "lora_r": 8, "lora_dropout": 0.0}, (8, 32.0, 0.0, None)),
        ({"lora_r": 8}, (8, 8.0, None, None)),
        ({"adapter": "qlora"}, (8, 8.0, None, None)),
        ({"use_peft": False, "lora_r": 8}, (None, None, None, None)),
        ({"finetuning_type": "full", "lora_rank": 8}, (None, None, None, None)),
        ({"adapter_name_or_path": "opt/adapter", "finetuning_type": "lora"}, (None, None, None, None)),
    ],
)
def test_adapters_have_the_numbers_of_the_script_or_its_defaults_with_a_line(arguments, lora):
    found, _ = translated(**arguments)
    places = ("lora.r", "lora.alpha", "lora.dropout", "lora.target_modules")
    assert tuple(found.settings.get(place) for place in places) == lora
    told = " ".join(line.text for line in found.lines)
    assert all(f"config.{place} = " in told for place in places if place in found.settings)
    assert ("export.format" in found.settings) == any(place.startswith("lora.") for place in found.settings)


@pytest.mark.parametrize(
    "arguments, quantize",
    [({"quantization_bit": 4}, "nf4"), ({"quantization_bit": 8}, "int8"), ({"load_in_4bit": True}, "nf4"), ({"load_in_8bit": "no"}, None)],
)  # fmt: skip
def test_bits_of_frozen_kernels(arguments, quantize):
    assert translated(**arguments, lora_r=8)[0].settings.get("lora.quantize") == quantize
    assert "lora.quantize" not in translated(**arguments)[0].settings
    assert translated(quantization_bit=3, lora_r=8)[1]["quantization_bit"].verdict == keys.UNSUPPORTED


def test_a_dataset_is_a_name_or_a_file_and_several_are_refused():
    assert translated(dataset="lm1b")[0].settings["data.name"] == "lm1b"
    assert translated(dataset_name="trl-lib/tldr")[0].settings["data.name"] == "hf:trl-lib/tldr"
    assert translated(dataset_name="data/chats.jsonl")[0].settings["data.train_file"] == "data/chats.jsonl"
    assert translated(dataset="one,two")[1]["dataset"].verdict == keys.UNSUPPORTED
    files = {"train_file": "a.jsonl", "validation_file": "b.jsonl"}
    assert (
        translated(**files)[0].settings.items() >= {"data.train_file": "a.jsonl", "data.eval_file": "b.jsonl"}.items()
    )
    assert "data.eval_file" not in translated(validation_file="b.jsonl")[0].settings


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"path": "a.jsonl", "type": "alpaca"}, {"data.train_file": "a.jsonl", "data.task": "seq2seq", "data.answer": "{output}"}),
        ({"path": "u/d", "type": "chat_template"}, {"data.name": "hf:u/d", "data.task": "chat", "data.messages": "messages"}),
        ({"path": "a.json", "type": "sharegpt", "field": "talk"}, {"data.task": "chat", "data.messages": "talk"}),
        ({"path": "a.json", "type": "completion"}, {"data.task": "text", "data.text_key": "text"}),
    ],
)  # fmt: skip
def test_one_entry_of_datasets_is_data_and_a_task(entry, expected):
    found, said = translated(datasets=[entry])
    assert found.settings.items() >= expected.items() and said["datasets"].verdict == keys.TAKEN
    for other in ([entry, entry], [{**entry, "type": "odd"}], [{**entry, "path": 3}], "text"):
        found, said = translated(datasets=other)
        assert "data.task" not in found.settings and said["datasets"].verdict == keys.UNSUPPORTED


def test_a_stage_is_a_task_and_epochs_count_with_one():
    found, said = translated(stage="sft", num_train_epochs=2, warmup_ratio=0.1, eval_strategy="epoch")
    expected = {"data.task": "chat", "epochs": 2.0, "optimizer.warmup_steps": 0.1, "seq_len": 2048}
    assert found.settings.items() >= expected.items()
    assert said["stage"].verdict == said["cutoff_len"].verdict == keys.ASSUMED
    assert said["eval_strategy"].verdict == keys.IMPLIED and said["num_train_epochs"].verdict == keys.TAKEN
    assert translated(stage="pt")[0].settings["data.task"] == "text"
    found, said = translated(stage="dpo", pref_beta=0.3, pref_loss="ipo")
    assert found.settings.items() >= {"data.task": "dpo", "dpo.beta": 0.3, "dpo.loss": "ipo"}.items()
    assert translated(stage="dpo", pref_loss="simpo")[1]["pref_loss"].verdict == keys.UNSUPPORTED
    assert translated(stage="rm")[1]["stage"].verdict == keys.UNSUPPORTED


@pytest.mark.parametrize(
    "name, value, place",
    [
        ("loss_type", "dapo", "grpo.variant"),
        ("scale_rewards", "none", "grpo.variant"),
        ("scale_rewards", False, "grpo.variant"),
        ("epsilon_high", 0.28, "grpo.clip_high"),
        ("max_completion_length", 256, "data.answer_len"),
        ("max_prompt_length", 128, "seq_len"),
        ("use_vllm", True, "grpo.rollout_devices"),
    ],
)
def test_an_argument_of_trls_grpo_names_its_setting(name, value, place):
    line = translated(**{name: value})[1][name]
    assert line.verdict == keys.UNSUPPORTED and f"config.{place}" in line.text


def test_other_names_of_an_argument_are_read_and_reported_as_the_file_has_them():
    found, said = translated(
        base_model="opt/m", micro_batch_size=2, num_epochs=4, optimizer="adamw_8bit", lr_scheduler="cosine",
        sequence_len=64, sample_packing=True, bf16="auto", lora_r=4, lora_target_linear=True,
    )  # fmt: skip
    expected = {
        "init_from": "opt/m", "micro_batch_size": 2, "optimizer.name": "adamw", "optimizer.moments": "int8",
        "optimizer.schedule": "cosine", "seq_len": 64, "data.pack": True, "precision": "bf16",
        "lora.target_modules": "all-linear",
    }  # fmt: skip
    assert found.settings.items() >= expected.items()
    assert said["micro_batch_size"].verdict == said["base_model"].verdict == keys.TAKEN
    assert said["bf16"].value == "auto" and said["bf16"].verdict == keys.ASSUMED
    assert said["num_epochs"].verdict == keys.UNSUPPORTED


def test_clients_are_those_that_there_are():
    assert translated(report_to="wandb")[0].settings["metrics.to"] == ("wandb",)
    assert translated(report_to=["none"])[0].settings["metrics.to"] == ()
    found, said = translated(report_to=["tensorboard", "swanlab"])
    assert found.settings["metrics.to"] == ("tensorboard",) and said["report_to"].verdict == keys.UNSUPPORTED


@pytest.mark.parametrize(
    "optim, expected",
    [
        ("adamw_torch", ("adamw", None)),
        ("adamw_8bit", ("adamw", "int8")),
        ("adafactor", ("adafactor", None)),
        ("sgd", ("sgd", None)),
        ("paged_lion_8bit", ("lion", "int8")),
        ("rmsprop", ("adamw", None)),
    ],
)
def test_the_optimizer_of_a_trainer_is_ours_of_that_name(optim, expected):
    found, said = translated(optim=optim, learning_rate=1e-4)
    assert (found.settings["optimizer.name"], found.settings.get("optimizer.moments")) == expected
    assert found.settings["optimizer.learning_rate"] == 1e-4
    assert said["optim"].verdict == (keys.UNSUPPORTED if optim == "rmsprop" else keys.TAKEN)


@pytest.mark.parametrize(
    "arguments, place, value",
    [
        ({"save_steps": 0.25, "max_steps": 100}, "checkpoint.every", 25),
        ({"save_strategy": "no", "save_steps": 500}, "checkpoint.every", 0),
        ({"save_strategy": False}, "checkpoint.every", 0),
        ({"save_strategy": "epoch", "save_steps": 500}, "checkpoint.every", None),
        ({"eval_strategy": "steps", "eval_steps": 10}, "evaluate.every", 10),
        ({"eval_steps": 10}, "evaluate.every", None),
        ({"evaluation_strategy": "no"}, "evaluate.every", 0),
        ({"logging_steps": 5}, "log_every", 5),
        ({"gradient_checkpointing": True}, "model.remat", "full"),
    ],
)
def test_strategies_decide_which_steps_count(arguments, place, value):
    assert translated(**arguments)[0].settings.get(place) == value


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"micro_batch_size": 1, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 0.03, "seq_len": 512, "epochs": 1.0}),
        ({}, {"precision": "bf16", "zero.stage": 0}),
        ({"max_steps": 200}, {"optimizer.warmup_steps": 6, "steps": 200}),
        ({"max_steps": 9000}, {"optimizer.warmup_steps": 100}),
        ({"warmup_steps": 0, "fp16": True, "num_epochs": 2}, {"optimizer.warmup_steps": 0, "precision": "fp16", "epochs": 2.0}),
        ({"fsdp_config": {"offload_params": True}}, {"zero.stage": 3, "offload.params": "host"}),
        ({"max_steps": 100, "eval_steps": 5}, {"evaluate.every": 5}),
        ({"rl": "ipo", "rl_beta": 0.2}, {"data.task": "dpo", "dpo.loss": "ipo", "dpo.beta": 0.2}),
        ({"wandb_project": "mine"}, {"metrics.project": "mine", "metrics.to": ("tensorboard", "wandb")}),
    ],
)  # fmt: skip
def test_what_a_file_of_axolotl_omits_is_what_axolotl_takes(given, expected):
    content = {"base_model": "opt/m", "datasets": [{"path": "a.jsonl", "type": "alpaca"}], **given}
    found = trainer_arguments.translate_trainer(content, None)
    assert found.settings.items() >= expected.items()
    absent = {line.key: line.text for line in found.lines if line.value is None}
    assert not absent.keys() & content.keys() and ("num_epochs" in absent) == ("num_epochs" not in given)
    assert all("Axolotl takes" in absent.get(name, "Axolotl takes") for name in ("micro_batch_size", "sequence_len"))
    assert {name for names in found.sources.values() for name in names if "assumed" not in name} <= {
        *content,
        *(name for name, _ in draft.leaves(content)),
    }


def test_a_file_of_llama_factory_means_lora_unless_it_says_otherwise_and_its_datasets_are_names():
    found, said = translated(stage="sft", dataset="alpaca_en_demo", neat_packing=True, use_muon=True)
    expected = {"lora.r": 8, "lora.alpha": 16.0, "lora.target_modules": "all-linear", "optimizer.name": "muon"}
    assert found.settings.items() >= {**expected, "data.pack": True}.items() and "data.name" not in found.settings
    assert said["dataset"].verdict == keys.UNSUPPORTED and said["finetuning_type"].value is None
    assert "lora.r" not in translated(stage="sft", finetuning_type="full")[0].settings
    assert translated(stage="sft", dataset="a.jsonl")[0].settings["data.train_file"] == "a.jsonl"
    assert translated(stage="sft", max_length=64)[0].settings["seq_len"] == 2048
    found, _ = translated(stage="dpo", dpo_label_smoothing=0.1)
    assert found.settings["dpo.label_smoothing"] == 0.1


def test_checkpointing_that_offloads_is_remat_and_says_so():
    found, said = translated(
        base_model="opt/m", gradient_checkpointing="offload_disk", gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    assert said["gradient_checkpointing_kwargs.use_reentrant"].verdict == keys.NO_EFFECT
    assert found.settings["model.remat"] == "full" and said["gradient_checkpointing"].verdict == keys.UNSUPPORTED


def test_transformers_newest_names_are_read():
    found, said = translated(
        activation_checkpointing=True,
        fsdp=True,
        fsdp_config={"cpu_offload": True},
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        average_tokens_across_devices=True,
    )
    assert found.settings.items() >= {"optimizer.schedule": "cosine", "optimizer.final_fraction": 0.1}.items()
    assert said["average_tokens_across_devices"].verdict == keys.IMPLIED
    assert found.settings.items() >= {"model.remat": "full", "offload.params": "host", "zero.stage": 3}.items()
    assert said["activation_checkpointing"].verdict == said["fsdp_config.cpu_offload"].verdict == keys.TAKEN
