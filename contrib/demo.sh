#!/bin/sh
# Installs what is missing on Debian or Ubuntu, builds, and runs the demonstration.
#   contrib/demo.sh [--once]
set -eu
# shellcheck source=contrib/lib.sh
. "$(dirname -- "$0")/lib.sh"

fuse
# shellcheck disable=SC2119
rust
cd "$root"
cargo build --release --quiet
exec "$binary" demo "$@"
