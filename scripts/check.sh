#!/usr/bin/env bash
# Checks a change: format, lint, types, import rules, fast tests, the README and the API pages. It takes two cores without other work
# some quarter of an hour.
# `python -m pytest` runs the full test suite. Run in an environment with `pip install -e ".[dev]"`.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*" && "$@"; }

step ruff format --check .
step ruff check .
step mypy
step python -m pytest -n 3 -m "not slow and not long"
step scripts/docs.sh
echo "all checks passed"
