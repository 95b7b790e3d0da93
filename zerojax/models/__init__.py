"""Model families.

This room holds networks in plain Flax and, for each, a `Family` that the trainer, the plan and the export use.
It holds no mesh and no rematerialisation. How a family's weights are sharded over `model` is a table beside it (`parallel`).
A family may compute the token of one row by `pallas_kernels` (`Family.one_row`).
A decoder that is a relative of Llama, as Gemma, Qwen and Phi are, is a row of `llama.model_types`, and its shapes rows of
`llama.published`. To add another family, add a folder and a line to `families`.
Experts are `experts` here and `ops.experts`; others know their weights by name: `parallel.WEIGHTS`, `optim.muon.FORMS`,
`lora.linen`, `trainer.plans`, `trainer.serving`.
To add a preset, add a line to the family's own table.
"""
