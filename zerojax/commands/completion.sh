# Completes zerojax in bash and zsh. Written by `zerojax completion`.
_zerojax() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" cut="" known=""
  if [[ $word == "=" ]]; then cut="$before="; word="$cut"
  elif [[ $before == "=" ]]; then cut="${COMP_WORDS[COMP_CWORD-2]}="; word="$cut$word"
  fi
  if [[ $COMP_CWORD -eq 1 ]]; then known="train launch doctor plan data generate serve merge migrate import-deepspeed disk calibrate report config configs completion show verify verify-checkpoint"
  elif [[ $before == --config && -z $cut ]]; then known="@CONFIGS@"
  else
    case "${COMP_WORDS[1]} $word" in
      configs\ [!-]*) known="@CONFIGS@" ;;
      configs\ ) known="@CONFIGS@" ;;
      *" --config="*) known="@CONFIG_FLAGS@" ;;
      *" --config.deterministic="*) known="--config.deterministic=True --config.deterministic=False" ;;
      *" --config.precision="*) known="--config.precision=fp32 --config.precision=bf16 --config.precision=fp16 --config.precision=fp8 --config.precision=bf16_sr" ;;
      *" --config.reduce_dtype="*) known="--config.reduce_dtype=fp32 --config.reduce_dtype=bf16" ;;
      *" --config.accum_dtype="*) known="--config.accum_dtype=fp32 --config.accum_dtype=bf16" ;;
      *" --config.pipeline.schedule="*) known="--config.pipeline.schedule=gpipe --config.pipeline.schedule=1f1b --config.pipeline.schedule=interleaved --config.pipeline.schedule=zero_bubble" ;;
      *" --config.zero.stage="*) known="--config.zero.stage=0 --config.zero.stage=1 --config.zero.stage=2 --config.zero.stage=3" ;;
      *" --config.zero.indivisible="*) known="--config.zero.indivisible=whole --config.zero.indivisible=pad" ;;
      *" --config.offload.optimizer="*) known="--config.offload.optimizer=none --config.offload.optimizer=host --config.offload.optimizer=nvme" ;;
      *" --config.offload.params="*) known="--config.offload.params=none --config.offload.params=host --config.offload.params=nvme" ;;
      *" --config.offload.by_block="*) known="--config.offload.by_block=auto --config.offload.by_block=on --config.offload.by_block=off" ;;
      *" --config.offload.late_norm="*) known="--config.offload.late_norm=True --config.offload.late_norm=False" ;;
      *" --config.wire.weights="*) known="--config.wire.weights=plain --config.wire.weights=int8" ;;
      *" --config.wire.gradients="*) known="--config.wire.gradients=plain --config.wire.gradients=int8 --config.wire.gradients=int4" ;;
      *" --config.wire.second_copy="*) known="--config.wire.second_copy=True --config.wire.second_copy=False" ;;
      *" --config.wire.error_feedback="*) known="--config.wire.error_feedback=True --config.wire.error_feedback=False" ;;
      *" --config.model.preset="*) known="--config.model.preset=test --config.model.preset=moe_test --config.model.preset=hybrid_test --config.model.preset=lfm2_test --config.model.preset=llama4_test --config.model.preset=gemma4_test --config.model.preset=gemma3n_test --config.model.preset=tiny --config.model.preset=llama3_1b --config.model.preset=llama3_8b --config.model.preset=llama3_8b_1m --config.model.preset=llama3_405b --config.model.preset=llama3_70b --config.model.preset=qwen2_14b --config.model.preset=deepseek_v3 --config.model.preset=kimi_k2 --config.model.preset=moonlight_16b_a3b --config.model.preset=gpt_oss_20b --config.model.preset=gpt_oss_120b --config.model.preset=deepseek_v2_lite --config.model.preset=deepseek_v2 --config.model.preset=glm4_5_air --config.model.preset=glm4_5 --config.model.preset=ernie4_5_21b_a3b --config.model.preset=minimax_m2 --config.model.preset=granite3_1b_a400m --config.model.preset=granite3_3b_a800m --config.model.preset=mixtral_8x7b --config.model.preset=mixtral_8x22b --config.model.preset=qwen2_moe_a3b --config.model.preset=qwen3_30b_a3b --config.model.preset=qwen3_235b_a22b --config.model.preset=qwen3_next_80b_a3b --config.model.preset=qwen3_5_9b --config.model.preset=qwen3_5_35b_a3b --config.model.preset=granite4_h_tiny --config.model.preset=lfm2_1.2b --config.model.preset=olmoe_1b_7b --config.model.preset=gemma_2b --config.model.preset=gemma_7b --config.model.preset=gemma2_2b --config.model.preset=gemma2_9b --config.model.preset=gemma2_27b --config.model.preset=gemma3_1b --config.model.preset=gemma3_4b --config.model.preset=phi3_mini --config.model.preset=phi3_medium --config.model.preset=olmo2_7b --config.model.preset=olmo2_13b --config.model.preset=olmo3_7b --config.model.preset=olmo3_32b --config.model.preset=exaone4_1b --config.model.preset=exaone4_32b --config.model.preset=seed_oss_36b --config.model.preset=internlm3_8b --config.model.preset=glm4_9b --config.model.preset=glm4_32b --config.model.preset=ernie4_5_0_3b --config.model.preset=command_r7b --config.model.preset=starcoder2_3b --config.model.preset=starcoder2_7b --config.model.preset=starcoder2_15b --config.model.preset=ministral3_3b --config.model.preset=ministral3_8b --config.model.preset=ministral3_14b --config.model.preset=granite3_2b --config.model.preset=granite3_8b --config.model.preset=smollm3_3b --config.model.preset=nemotron_test --config.model.preset=nemotron_nano_9b_v2 --config.model.preset=nemotron_nano_12b_v2 --config.model.preset=nemotron3_nano_30b_a3b --config.model.preset=gpt2 --config.model.preset=gpt2_medium --config.model.preset=gpt2_large --config.model.preset=gpt2_xl --config.model.preset=t5_test --config.model.preset=t5_tiny --config.model.preset=t5_v1_1_small --config.model.preset=t5_v1_1_base --config.model.preset=t5_v1_1_large --config.model.preset=t5_v1_1_xl --config.model.preset=t5_v1_1_xxl --config.model.preset=bart_test --config.model.preset=bart_base --config.model.preset=bart_large --config.model.preset=mbart_large_50 --config.model.preset=pegasus_large --config.model.preset=opus_mt --config.model.preset=bert_test --config.model.preset=bert_base --config.model.preset=bert_large --config.model.preset=roberta_base --config.model.preset=roberta_large --config.model.preset=mamba2_test --config.model.preset=mamba2_130m --config.model.preset=mamba2_370m --config.model.preset=mamba2_780m --config.model.preset=mamba2_1.3b --config.model.preset=mamba2_2.7b --config.model.preset=xlm_roberta_base --config.model.preset=xlm_roberta_large --config.model.preset=distilbert_base --config.model.preset=modernbert_base --config.model.preset=modernbert_large" ;;
      *" --config.model.remat="*) known="--config.model.remat=none --config.model.remat=dots --config.model.remat=attention --config.model.remat=full" ;;
      *" --config.model.programs="*) known="--config.model.programs=one --config.model.programs=kinds" ;;
      *" --config.model.ring="*) known="--config.model.ring=True --config.model.ring=False" ;;
      *" --config.model.long_texts="*) known="--config.model.long_texts=True --config.model.long_texts=False" ;;
      *" --config.model.attention="*) known="--config.model.attention=auto --config.model.attention=xla --config.model.attention=cudnn --config.model.attention=splash" ;;
      *" --config.fp8.recipe="*) known="--config.fp8.recipe=tensorwise --config.fp8.recipe=delayed --config.fp8.recipe=rowwise" ;;
      *" --config.fp8.experts="*) known="--config.fp8.experts=True --config.fp8.experts=False" ;;
      *" --config.lora.rslora="*) known="--config.lora.rslora=True --config.lora.rslora=False" ;;
      *" --config.lora.dora="*) known="--config.lora.dora=True --config.lora.dora=False" ;;
      *" --config.lora.quantize="*) known="--config.lora.quantize=none --config.lora.quantize=int8 --config.lora.quantize=nf4 --config.lora.quantize=mxfp4 --config.lora.quantize=fp8_block" ;;
      *" --config.lora.frozen_dtype="*) known="--config.lora.frozen_dtype=auto --config.lora.frozen_dtype=fp32 --config.lora.frozen_dtype=bf16 --config.lora.frozen_dtype=fp16" ;;
      *" --config.optimizer.name="*) known="--config.optimizer.name=adam --config.optimizer.name=adamw --config.optimizer.name=adafactor --config.optimizer.name=lamb --config.optimizer.name=lion --config.optimizer.name=sgd --config.optimizer.name=muon" ;;
      *" --config.optimizer.schedule="*) known="--config.optimizer.schedule=constant --config.optimizer.schedule=linear --config.optimizer.schedule=cosine --config.optimizer.schedule=WarmupLR --config.optimizer.schedule=WarmupDecayLR --config.optimizer.schedule=WarmupCosineLR" ;;
      *" --config.optimizer.warmup="*) known="--config.optimizer.warmup=linear --config.optimizer.warmup=log" ;;
      *" --config.optimizer.weight_decay_on="*) known="--config.optimizer.weight_decay_on=matrices --config.optimizer.weight_decay_on=all" ;;
      *" --config.optimizer.moments="*) known="--config.optimizer.moments=fp32 --config.optimizer.moments=bf16 --config.optimizer.moments=int8" ;;
      *" --config.loss_scale.consecutive_hysteresis="*) known="--config.loss_scale.consecutive_hysteresis=True --config.loss_scale.consecutive_hysteresis=False" ;;
      *" --config.loss_scale.on_minimum="*) known="--config.loss_scale.on_minimum=raise --config.loss_scale.on_minimum=hold" ;;
      *" --config.data.task="*) known="--config.data.task=text --config.data.task=seq2seq --config.data.task=classification --config.data.task=chat --config.data.task=dpo --config.data.task=reward --config.data.task=embed --config.data.task=grpo" ;;
      *" --config.data.chat_template="*) known="--config.data.chat_template=auto --config.data.chat_template=own --config.data.chat_template=plain" ;;
      *" --config.data.learn="*) known="--config.data.learn=all --config.data.learn=last --config.data.learn=reasoning off" ;;
      *" --config.data.pack="*) known="--config.data.pack=True --config.data.pack=False" ;;
      *" --config.data.mix_by="*) known="--config.data.mix_by=tokens --config.data.mix_by=examples" ;;
      *" --config.data.on_bad="*) known="--config.data.on_bad=stop --config.data.on_bad=skip" ;;
      *" --config.dpo.loss="*) known="--config.dpo.loss=sigmoid --config.dpo.loss=ipo --config.dpo.loss=kto --config.dpo.loss=orpo --config.dpo.loss=simpo" ;;
      *" --config.grpo.variant="*) known="--config.grpo.variant=grpo --config.grpo.variant=dr_grpo --config.grpo.variant=dapo --config.grpo.variant=gspo --config.grpo.variant=rloo" ;;
      *" --config.grpo.replay="*) known="--config.grpo.replay=True --config.grpo.replay=False" ;;
      *" --config.grpo.exact="*) known="--config.grpo.exact=True --config.grpo.exact=False" ;;
      *" --config.distill.loss="*) known="--config.distill.loss=forward_kl --config.distill.loss=reverse_kl --config.distill.loss=jsd" ;;
      *" --config.embedding.pooling="*) known="--config.embedding.pooling=last --config.embedding.pooling=mean" ;;
      *" --config.checkpoint.at_end="*) known="--config.checkpoint.at_end=True --config.checkpoint.at_end=False" ;;
      *" --config.export.format="*) known="--config.export.format=none --config.export.format=huggingface --config.export.format=peft" ;;
      *" --config.export.dtype="*) known="--config.export.dtype=auto --config.export.dtype=fp32 --config.export.dtype=bf16 --config.export.dtype=fp16" ;;
      *" --"*=*) known="" ;;
      *" --config."*) known="--config.seed= --config.deterministic= --config.init_from= --config.steps= --config.epochs= --config.global_batch_size= --config.micro_batch_size= --config.grad_accum= --config.seq_len= --config.precision= --config.reduce_dtype= --config.accum_dtype= --config.log_every= --config.emulate_devices= --config.mesh.pipe= --config.mesh.replica= --config.mesh.data= --config.mesh.context= --config.mesh.model= --config.mesh.expert= --config.pipeline.schedule= --config.pipeline.chunks= --config.zero.stage= --config.zero.min_size= --config.zero.indivisible= --config.zero.overrides= --config.offload.optimizer= --config.offload.params= --config.offload.fraction= --config.offload.params_fraction= --config.offload.params_on_device= --config.offload.chunk_bytes= --config.offload.in_flight= --config.offload.by_block= --config.offload.late_norm= --config.offload.nvme_path= --config.offload.nvme_buffers= --config.wire.weights= --config.wire.gradients= --config.wire.second_copy= --config.wire.host_devices= --config.wire.error_feedback= --config.model.preset= --config.model.vocab_size= --config.model.num_layers= --config.model.remat= --config.model.recompute= --config.model.programs= --config.model.by_columns= --config.model.ring= --config.model.offload= --config.model.tile_tokens= --config.model.long_texts= --config.model.attention= --config.model.dropout= --config.experts.load= --config.experts.parts= --config.fp8.recipe= --config.fp8.filter= --config.fp8.first= --config.fp8.last= --config.fp8.history= --config.fp8.experts= --config.lora.r= --config.lora.alpha= --config.lora.dropout= --config.lora.target_modules= --config.lora.exclude_modules= --config.lora.target_parameters= --config.lora.rslora= --config.lora.dora= --config.lora.modules_to_save= --config.lora.init_from= --config.lora.quantize= --config.lora.frozen_dtype= --config.optimizer.name= --config.optimizer.learning_rate= --config.optimizer.schedule= --config.optimizer.warmup_steps= --config.optimizer.warmup= --config.optimizer.initial_fraction= --config.optimizer.final_fraction= --config.optimizer.b1= --config.optimizer.b2= --config.optimizer.eps= --config.optimizer.weight_decay= --config.optimizer.momentum= --config.optimizer.adamw_on= --config.optimizer.weight_decay_on= --config.optimizer.rates= --config.optimizer.clip_norm= --config.optimizer.router_bias_rate= --config.optimizer.moments= --config.loss_scale.static= --config.loss_scale.init_scale= --config.loss_scale.window= --config.loss_scale.hysteresis= --config.loss_scale.consecutive_hysteresis= --config.loss_scale.min_scale= --config.loss_scale.on_minimum= --config.data.name= --config.data.train_split= --config.data.eval_split= --config.data.text_key= --config.data.tokenizer= --config.data.dir= --config.data.train_file= --config.data.eval_file= --config.data.task= --config.data.prompt= --config.data.answer= --config.data.rejected= --config.data.labels= --config.data.messages= --config.data.chat_template= --config.data.learn= --config.data.answer_len= --config.data.pack= --config.data.sources= --config.data.mix_by= --config.data.on_bad= --config.dpo.beta= --config.dpo.loss= --config.dpo.label_smoothing= --config.dpo.desirable= --config.dpo.undesirable= --config.dpo.gamma= --config.grpo.reward= --config.grpo.group= --config.grpo.inner_steps= --config.grpo.variant= --config.grpo.clip= --config.grpo.clip_high= --config.grpo.kl= --config.grpo.environment= --config.grpo.turns= --config.grpo.time_limit= --config.grpo.replay= --config.grpo.exact= --config.distill.teacher= --config.distill.loss= --config.distill.share= --config.distill.temperature= --config.distill.own= --config.embedding.negative= --config.embedding.pooling= --config.embedding.temperature= --config.evaluate.every= --config.evaluate.batches= --config.evaluate.patience= --config.evaluate.answers= --config.checkpoint.every= --config.checkpoint.at_end= --config.checkpoint.keep_last= --config.checkpoint.keep_best= --config.sample.prompt= --config.sample.length= --config.sample.temperature= --config.export.format= --config.export.push_to= --config.export.dtype= --config.export.deltas_every= --config.export.deltas_to= --config.profile.start= --config.profile.steps= --config.metrics.to= --config.metrics.project= --config.metrics.name= --config.metrics.dir= --config.metrics.resume_id=" ;;
      train\ -*) known="--config --coordinator --num_processes --process_id --workdir" ;;
      launch\ -*) known="--help --hostfile --include --exclude --num_nodes --num_gpus --gpus_per_process --coordinator --python --ssh_options --log_dir --max_restarts --min_nodes --rejoin_seconds --grace_seconds --limits" ;;
      doctor\ -*) known="--help --hostfile --include --exclude --num_nodes --num_gpus --gpus_per_process --coordinator --python --ssh_options --workdir --min_gb_per_second --emulate_devices --json" ;;
      plan\ -*) known="--axes --cluster --config --disk_gbps --format --host_gbps --json --most_compiles --picture --price_per_gpu_hour --prompt --rates --search --serve --slots --target --topology" ;;
      data\ -*) known="--help --show --json --config" ;;
      generate\ -*) known="--prompt --help --adapter --ids --file --run --template --batch_size --out --max_new_tokens --temperature --top_k --top_p --seed --stage --dtype --emulate_devices --coordinator --num_processes --process_id" ;;
      serve\ -*) known="--help --host --port --name --adapter --key_file --format --dtype --weights --host_fraction --slots --max_len --max_inputs --chunk --prefill_tokens --tensor_parallel --replicas --queue --max_seconds --max_body --chat_template --warm_up --emulate_devices --coordinator --num_processes --process_id" ;;
      merge\ -*) known="--help --adapter --out --dtype" ;;
      migrate\ -*) known="--help --out --force --strict --json --deepspeed --keys" ;;
      import-deepspeed\ -*) known="--help --out --model_config --adapter --model" ;;
      disk\ -*) known="--help --size --chunk --threads --state --config --json" ;;
      calibrate\ -*) known="--help --out --force --limit_s --emulate_devices" ;;
      report\ -*) known="--help --json" ;;
      config\ -*) known="--help --out --force --yes --quick --init_from --model --lora_r --target --topology --network --tensor --context --seq_len --global_batch_size --grad_accum --clip_norm --precision --offload --offload_params --stage" ;;
      configs\ -*) known="--help" ;;
      completion\ -*) known="--help" ;;
      show\ -*) known="--help --json" ;;
      verify\ -*) known="--help --steps --only --save --against --keep --json" ;;
      verify-checkpoint\ -*) known="--help --step" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$known" -- "$word"))
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && type compopt >/dev/null 2>&1; then compopt -o nospace; fi
  COMPREPLY=("${COMPREPLY[@]#"$cut"}")
}
complete -o default -F _zerojax zerojax
