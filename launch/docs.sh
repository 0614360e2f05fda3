#!/usr/bin/env bash
# Makes the documentation a site: bash launch/docs.sh [OUT], by default runs/site. A warning, such as a broken link, is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh docs
out=${1:-runs/site}
.venv/bin/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs "$out"
printf 'docs: open %s/index.html, or serve it: .venv/bin/python -m http.server --directory %s\n' "$out" "$out" >&2
