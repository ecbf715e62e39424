#!/usr/bin/env bash
# Makes sure that a Chromium is installed for `make test-browser`: the distribution's, or Playwright's.
set -euo pipefail

if command -v chromium || command -v chromium-browser || command -v google-chrome; then
    exit 0
fi
echo "no Chromium found: installing one" >&2
as_root=$([[ $(id -u) == 0 ]] || echo "sudo -n")
if command -v apt-get >/dev/null && $as_root apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium; then
    command -v chromium && exit 0
fi
exec "$(dirname "$0")/../.venv/bin/playwright" install chromium
