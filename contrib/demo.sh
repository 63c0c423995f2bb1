#!/bin/sh
# Installs what is missing on Debian or Ubuntu, builds, and runs the demonstration.
#   contrib/demo.sh [--once]
set -eu
. "$(dirname -- "$0")/lib.sh"

fuse
rust
cd "$root"
cargo build --release --quiet
exec "$binary" demo "$@"
