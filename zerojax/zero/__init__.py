"""ZeRO: which roles are sharded at which stage, and the train step that follows from it.

This room holds the table of stages, the rule that picks a dim, placements, the gather of a weight where it is used, and the train step.
It has no config, no model, no file format and no reader of compiled programs.
A stage is a row of `stages.STAGES`. Optional parts of a step are identities in `step.make_train_step` unless asked for.
"""
