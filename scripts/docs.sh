#!/usr/bin/env bash
# Builds the API pages from the docstrings into site/, with pdoc, which finds the modules of pallas_kernels itself. Open site/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
modules=$(find zerojax -name "*.py" ! -name "__init__.py" | sort | sed 's|\.py$||; s|/|.|g')
# shellcheck disable=SC2086  # several words
JAX_PLATFORMS=cpu python -m pdoc --docformat google --output-directory site zerojax pallas_kernels $modules
echo "built site/index.html"
