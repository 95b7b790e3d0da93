"""From a dataset's name to sharded batches.

This room holds sources and mixtures of them, tokenizers, packing into windows, objectives that turn windows into rows, and the feed of a
run.
It knows no model and no stage.
To add a dataset that tensorflow-datasets does not have, write a builder such as `python_stdlib`. To add a training objective, add it to
`objectives`.
"""
