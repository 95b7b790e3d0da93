"""What bytes are for. This module is the vocabulary of roles: tables, JSON, specs and findings take their words from here.

A leaf of a train state has a role, which the stage's table acts on; so have the bytes that a compiled step holds and those that it sends.
"""

from collections.abc import Mapping

# Leaves of a train state.
PARAMS = "params"  # weights as the forward pass reads them
FROZEN = "frozen"  # weights that are not trained: no gradient, no optimizer state
OPT_STATE = "opt_state"  # what the optimizer keeps from step to step: master weights, moments, counts
OTHER = "other"  # none of these; of temporaries and collectives, none of the roles below

# Leaves of the optimizer state, and of a step's arguments.
MASTER = "master weights"  # float32 copies of 16-bit weights
MOMENTS = "moments"  # the rest of the optimizer state
REST = "batch and the rest"  # what is neither weights nor optimizer state

# What lives while a step runs.
GRADIENTS = "gradients"  # of weights; of collectives, their sums over devices
GATHERED = "gathered weights"  # replicated copies of sharded weights
COLLECTIVE_BUFFERS = "collective buffers"  # what other collectives read and write
ACTIVATIONS = "activations"  # outputs of the forward pass, recomputed ones too
ACTIVATION_GRADIENTS = "activation gradients"
LOSS = "loss"  # temporaries of the loss and the head
UPDATE = "optimizer"  # temporaries of clipping and of the update
PACKING = "packing"  # memory between temporaries that nothing uses
TEMPORARY = (GRADIENTS, GATHERED, COLLECTIVE_BUFFERS, ACTIVATIONS, ACTIVATION_GRADIENTS, LOSS, UPDATE, OTHER)

# Sums of roles, as rows of a plan.
TEMPORARIES = "activations and temporaries"  # all temporaries but gradients, gathered weights and collective buffers
HOST = "host memory"  # whatever lies in the host's memory

# What collectives send.
WEIGHTS_FORWARD = "weights forward"  # weights gathered for the forward pass
WEIGHTS_BACKWARD = "weights backward"  # weights gathered for the backward pass
UPDATED_WEIGHTS = "updated weights"  # weights gathered after the update
SCALARS = "scalars"  # losses, norms and statistics
SENT_OF_WEIGHTS = (WEIGHTS_FORWARD, WEIGHTS_BACKWARD, GRADIENTS, UPDATED_WEIGHTS)
SENT = (*SENT_OF_WEIGHTS, ACTIVATIONS, SCALARS, OTHER)

# Roles that are names of fields, in words.
WORDS: Mapping[str, str] = {FROZEN: "frozen params", OPT_STATE: "optimizer state"}
