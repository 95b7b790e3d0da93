"""The memory, the collectives and the least time of a train step, before it runs: `python -m zerojax.plan`.

This room holds the plan of a step: its ledger of collectives, its findings, the bound on its time, compile targets and the search.
It allocates nothing and runs nothing.
It knows no trainer settings: `trainer/plans.py` plans a config.
To add a target, add an entry to `targets.TARGETS`. To add a finding, add a function to `findings` and list it in `findings.RULES`.
"""
