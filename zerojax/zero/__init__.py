"""The idea of ZeRO: which role is sharded at which stage, and a train step that keeps to it.

Here live the table of stages and the rule that picks a dim, placement, the gather where a weight is used, and the train step.
No config, no model, no file format and no reading of compiled programs.
A stage is a row of `stages.STAGES`; what a step does more is an identity in `step.make_train_step` until it is asked for.
"""
