"""Weights: how each leaf of a state is sharded, as values, and the collectives of one weight.

This room holds the partition of a state, the placement of a weight, its all-gather and its reduce-scatter. It knows no loss, no block and
no stage: `zero.stages` fills the values in. Another form in which a weight is sent is a `placement.Wire` in `wires`.
"""
