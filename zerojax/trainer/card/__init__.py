"""The run card: WORKDIR/run.json, which tells what a run was, how it went and how it ended. docs/run_card.md names every field."""
