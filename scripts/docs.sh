#!/usr/bin/env bash
# Builds the API pages from the docstrings into site/, with pdoc. Open site/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
JAX_PLATFORMS=cpu python -W error::UserWarning:pdoc -m pdoc --docformat google --output-directory site zerojax
echo "site/index.html"
