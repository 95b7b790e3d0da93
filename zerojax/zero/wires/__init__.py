"""Wires: forms in which a weight is sent that differ from `gather.Plain`, a module each.

A module holds a class of wire and a function that puts it on weights of a partition. It knows no model, no loss and no order of blocks.
`packed` sends int8 and int4 (blocks: `ops.packed`, kernels: `pallas_kernels.wire`), `fp8` fp8; `columns` and `experts` send no
weight. Their options are those of `trainer.settings`, their findings those of `plan.findings`.
What a wire answers is `placement.Wire`; another form is another module here, which `step.make_train_step` puts on a partition if asked for.
"""
