"""From a dataset's name to batches placed on devices.

Here live sources, tokenizers, packing into windows, objectives that turn windows into rows, and the feed of a run.
No model and no stage.
A dataset that tensorflow-datasets does not know is a builder such as `python_stdlib`; what is learnt from text is an objective in
`objectives`.
"""
