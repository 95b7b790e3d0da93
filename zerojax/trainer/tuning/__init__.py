"""Runs that learn answers: fine-tuning.

`examples` opens their data.
What a single step does is no part of this.
To add a setting of a task, add it to `examples`.
"""
