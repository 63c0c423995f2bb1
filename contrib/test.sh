#!/bin/sh
# Installs what the tests need on Debian or Ubuntu, builds, and runs all of them.
#   contrib/test.sh [arguments for pytest]
set -eu
# shellcheck source=contrib/lib.sh
. "$(dirname -- "$0")/lib.sh"

fuse
tool fusermount3 fuse3 # the tests mount as an ordinary user, too
tool strace strace     # they stop commands at system calls
tool fio fio           # a writer and checker of patterns
tool mkfs.ext4 e2fsprogs
rust rustfmt clippy
venv
ollama
cd "$root"

failed=
step() {
    say "$*"
    "$@" || failed="$failed
  $*"
}

cargo build --release
step cargo fmt --check
step cargo clippy --all-targets -- -D warnings
step env RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet
step cargo test
step env WMOUNT="$binary" OLLAMA="$ollama" timeout 1800 .venv/bin/python -m pytest -q tests/clients "$@"

[ -z "$failed" ] || die "failed:$failed"
say "all passed"
