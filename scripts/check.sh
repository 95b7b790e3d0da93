#!/usr/bin/env bash
# Checks a change in a few minutes: format, lint, types, the import floors, the fast tests, the README and the API pages.
# The whole test suite is `python -m pytest`. Run in an environment with `pip install -e ".[dev]"`.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*" && "$@"; }

step ruff format --check .
step ruff check .
step mypy
step python -m pytest -m "not slow"
step scripts/docs.sh
echo "all checks passed"
