"""Programs of others that show a run's metrics: Weights & Biases and MLflow, by their own Python clients, where they are installed.

`trainer.trackers` holds their table and gives each a thread of its own, so that one that hangs or fails never stops a run. A client is a
module with an `open_run`. Another one is such a module and a line in the table.
"""
