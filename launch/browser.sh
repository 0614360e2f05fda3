#!/usr/bin/env bash
# Installs Debian's chromium, with which tests/watch and docs/images/watch.py open pages: bash launch/browser.sh
# Does nothing where there is one, and only says so where it cannot: those tests are then skipped.
set -euo pipefail
say() { printf 'browser: %s\n' "$*" >&2; }

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if ! grep -qx 'ID=debian' /etc/os-release 2>/dev/null; then
    say 'this is not Debian; install chromium yourself to run the browser tests'
elif [ "$(id -u)" != 0 ]; then
    say 'installing chromium needs root; the browser tests will be skipped'
elif ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; } >&2; then
    say 'apt-get could not install chromium; the browser tests will be skipped'
fi
