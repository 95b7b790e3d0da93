"""Runs that learn answers: fine-tuning.

`examples` opens their data. `rounds` is what happens between two evaluations: it reports losses, generated `answers`, and the memory of
each of the `phases`.
`preferences` and `reference` are what pairs of answers add, `rewarded` and `rollouts` what rewarded answers do. What else a single step
does is no part of this.
To add a setting of a task, add it to `examples`.
"""
