#!/usr/bin/env bash
# Do what a newcomer does: clone the repository, `make demo`, `make test`; here a part of the tests.
# HOME is empty, pip has no cache, and of this environment only pip's settings are kept, which say
# where packages come from. `make fresh-check` runs this; it takes what two set-ups take.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(python3 -c 'import sys; print(sys.executable)')
settings=$(python3 -m pip config debug 2>/dev/null | sed -n 's/^  \(.*\), exists: True$/\1/p' | tail -1)

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/home" "$place/tmp"
kept=(HOME="$place/home" TMPDIR="$place/tmp" LANG=C.UTF-8 PIP_NO_CACHE_DIR=1)
kept+=(PATH="$(dirname "$python"):/usr/bin:/bin")
[ -z "$settings" ] || kept+=(PIP_CONFIG_FILE="$settings")
while IFS= read -r one; do kept+=("$one"); done < <(env | grep -E '^(PIP_|SSL_CERT|https?_proxy=|no_proxy=)' | grep -v '^PIP_NO_CACHE_DIR=' || true)

timed() {
    local begin=$SECONDS
    (cd "$place/clone" && env -i "${kept[@]}" "$@")
    echo "== $((SECONDS - begin)) s: $*"
}

git clone -q "$root" "$place/clone"
timed make demo
timed make test ARGS="--collect-only -q" | tail -3
timed make test ARGS="-q tests/test_activations.py tests/test_model.py tests/networks/test_networks.py"
[ -z "$(git -C "$place/clone" status --porcelain)" ] || { git -C "$place/clone" status; exit 1; }
echo "== the clone is as clean as before"
