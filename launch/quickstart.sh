#!/usr/bin/env bash
# Sets everything up and trains a small model here, on the CPU. Arguments are key=value overrides of the configuration.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
.venv/bin/megasync fetch digits
exec .venv/bin/megasync train configs/quickstart.yaml "$@"
