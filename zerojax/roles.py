"""Roles of bytes. This module is the vocabulary of roles that tables, JSON, specs and findings use.

A leaf of a train state has a role, and the table of stages acts on roles. The bytes that a compiled step holds or sends have roles too.
"""

import re
from collections.abc import Mapping

# Leaves of a train state.
PARAMS = "params"  # weights as the forward pass reads them
FROZEN = "frozen"  # untrained weights: no gradient, no optimizer state
OPT_STATE = "opt_state"  # of the optimizer, from step to step: master weights, moments, counts
OTHER = "other"  # no other role

# Leaves of the optimizer state, and of a step's arguments.
MASTER = "master weights"  # float32 copies of 16-bit weights
MOMENTS = "moments"  # the rest of the optimizer state
REST = "batch and the rest"  # neither weights nor optimizer state

# Temporaries of a step.
GRADIENTS = "gradients"  # of weights; for collectives, their sums over devices
GATHERED = "gathered weights"  # replicated copies of sharded weights
COLLECTIVE_BUFFERS = "collective buffers"  # inputs and outputs of other collectives
ACTIVATIONS = "activations"  # outputs of the forward pass, recomputed ones too
ACTIVATION_GRADIENTS = "activation gradients"
LOSS = "loss"  # temporaries of the loss and the head
UPDATE = "optimizer"  # temporaries of clipping and of the update
PACKING = "packing"  # unused memory between temporaries
TEMPORARY = (GRADIENTS, GATHERED, COLLECTIVE_BUFFERS, ACTIVATIONS, ACTIVATION_GRADIENTS, LOSS, UPDATE, OTHER)

# Sums of roles, as rows of a plan.
TEMPORARIES = "activations and temporaries"  # all temporaries but gradients, gathered weights and collective buffers
HOST = "host memory"  # arrays in host memory
DISK = "disk"  # arrays in files

# Bytes that collectives send.
WEIGHTS_FORWARD = "weights forward"  # weights gathered for the forward pass
WEIGHTS_BACKWARD = "weights backward"  # weights gathered for the backward pass
UPDATED_WEIGHTS = "updated weights"  # weights gathered after the update
MATRICES = "matrices"  # of an update that needs whole matrices, and their results
SCALARS = "scalars"  # losses, norms and statistics
BY_COLUMNS = "by_columns"  # the scope of operations that send activations in place of a weight (`ops.columns`)
TENSOR_PARALLEL = "tensor_parallel"  # the scope of operations that send activations where weights are sharded as used
CONTEXT_PARALLEL = "context_parallel"  # the scope of attention over tokens that are sharded (`ops.context_attention`)
# The scope of all-to-alls of tokens to their experts and back (`ops.expert_parallel`)
EXPERT_PARALLEL = "expert_parallel"
# The scope of what takes tokens for which these have no room; a plan counts no loop of them
FURTHER_ROUNDS = "further_rounds"
ROOM = "room"  # "room_1.5": the scope of products of a room for 1.5 times the rows that a balanced router sends
PACKED_WEIGHT = "packed_weight"  # the scope of collectives of weights as blocks of 8 bits (`zero.wires.packed`)
PACKED_GRADIENT = "packed_gradient"  # of their gradients
# Of collectives of matrices, to the devices that update them, and of updates back (`optim.owners`)
TO_OWNERS = "to_owners"
SECOND_COPY = "second_copy"  # of gathers whose result is kept for the backward pass
SENT_OF_WEIGHTS = (WEIGHTS_FORWARD, WEIGHTS_BACKWARD, GRADIENTS, UPDATED_WEIGHTS)
SENT = (*SENT_OF_WEIGHTS, MATRICES, ACTIVATIONS, SCALARS, OTHER)

# Words for roles that are names of fields.
WORDS: Mapping[str, str] = {FROZEN: "frozen params", OPT_STATE: "optimizer state"}


def room(scopes: str) -> float:
    """Returns the rows that products in some scopes have room for, over those that a balanced router sends; 1 outside of `ROOM`."""
    found = re.search(rf"\b{ROOM}_(\d+(\.\d+)?)", scopes)
    return float(found[1]) if found else 1.0
