"""Runs that learn answers: fine-tuning.

`rounds` is what happens between two evaluations: it reports losses, generated `answers`, and the memory of each of the `phases`.
`reference` is what pairs of answers add, `rollouts` what rewarded answers do. Their losses are `trainer.preferences` and
`trainer.rewarded`, and `trainer.examples` opens their data; what a single step does is no part of this.
"""
