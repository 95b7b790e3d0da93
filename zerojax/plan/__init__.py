"""What a train step will need and send, before it runs: `python -m zerojax.plan`.

Here live the plan of a step, its ledger of collectives, findings, the bound on its time, devices to compile for, and the search.
Nothing is allocated and nothing runs.
No settings of the trainer: `trainer/plans.py` plans a config.
A target is a line of `targets.TARGETS`; a finding is a function of `findings` and a line of `findings.RULES`.
"""
