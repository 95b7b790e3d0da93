"""ZeRO: which roles are sharded at which stage, and the train step that follows from it.

At the root are the public calls: the table of stages and the rule that picks a dim (`stages`), a sharded state (`shard_state`), the train
step (`step`), bytes (`state_bytes`) and a comparison of sums (`compare`). Below, a folder an idea, each imports those that stand before it:
`weights`, `host`, `sharded_batch`, `blocks`, `wires`, `fp8`, `update`, `gradients`, `step_programs`, `offload`, `pipeline`.
It has no config, no model, no file format and no reader of compiled programs.
A stage is a row of `stages.STAGES`. Optional parts of a step are identities in `step.make_train_step` unless asked for.
"""
