#!/bin/sh
# Fuzzes the parsers with libFuzzer on stable Rust, each target for a given time (60 s, all targets).
#   contrib/fuzz.sh [SECONDS] [TARGET...]
#   contrib/fuzz.sh cmin [TARGET...]       adds the inputs that reach most to tests/fuzz/corpus/, 32 of each target at most
# What is found is kept in target/fuzz/corpus/; inputs that fail are minimised into tests/fuzz/regressions/TARGET/.
set -eu
# shellcheck source=contrib/lib.sh
. "$(dirname -- "$0")/lib.sh"

task=60
case ${1:-} in
    cmin | [0-9]*)
        task=$1
        shift
        ;;
esac

# shellcheck disable=SC2119
rust
tool g++ g++ # libFuzzer is C++
fuzz=$root/tests/fuzz
build=${CARGO_TARGET_DIR:-$root/target}/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
[ -n "$host" ] || die "rustc -vV names no host"

say "building"
# What cargo-fuzz passes too, without the sanitizers that only nightly Rust has.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares" \
    cargo build --quiet --release --manifest-path "$fuzz/Cargo.toml" --target "$host" --target-dir "$build" \
    --bin fuzz || die "the targets could not be built"
program=$build/$host/release/fuzz

[ $# -gt 0 ] || set -- $(ls "$fuzz/corpus")
for target in "$@"; do
    [ -d "$fuzz/corpus/$target" ] || die "there is no target $target: $(ls "$fuzz/corpus" | tr '\n' ' ')"
done

# Stores that are imported into stay in memory, and are gone with this script.
scratch=$(TMPDIR=$([ -d /dev/shm ] && [ -w /dev/shm ] && echo /dev/shm || echo /tmp) mktemp -d -t wmount-fuzz.XXXXXX)
trap 'rm -rf "$scratch"' EXIT INT TERM
failed=
for target in "$@"; do
    found=$build/corpus/$target
    mkdir -p "$found" "$build/failures/$target" "$scratch/tmp"
    run() { FUZZ_TARGET=$target TMPDIR=$scratch/tmp nice -n 19 "$program" "$@"; }
    if [ "$task" = cmin ]; then
        mkdir "$scratch/merged"
        run -merge=1 -set_cover_merge=1 -use_counters=0 -max_len=8192 -merge_control_file="$scratch/control" \
            "$scratch/merged" "$fuzz/corpus/$target" "$found" 2>"$build/$target.log" ||
            die "$target could not be minimised: see $build/$target.log"
        # The first lines of the control file are the number of inputs, that of the first ones, and their names; a line
        # FT has the number of an input and the edges that it reaches.
        awk -v most=32 -v seeds="$fuzz/corpus/$target/" '
            NR == 1 { count = $1; next }
            NR == 2 { next }
            NR <= count + 2 { name[NR - 3] = $0; next }
            $1 == "FT" { edges[$2] = $0 }
            function gain(input, take,   parts, n, i, sum) {
                n = split(edges[input], parts, " ")
                for (i = 3; i <= n; i++) if (!(parts[i] in seen)) { sum++; if (take) seen[parts[i]] = 1 }
                return sum + 0
            }
            END {
                for (i in name) if (index(name[i], seeds) == 1) gain(i, 1)
                while (chosen++ < most) {
                    best = ""; largest = 0
                    for (i in name) { g = gain(i, 0); if (g > largest) { largest = g; best = i } }
                    if (best == "") break
                    gain(best, 1)
                    print name[best]
                }
            }' "$scratch/control" | while read -r input; do cp "$input" "$fuzz/corpus/$target/"; done
        rm -r "$scratch/merged" "$scratch/control"
        say "$target: $(find "$fuzz/corpus/$target" -type f | wc -l) inputs"
        continue
    fi
    say "$target for $task s"
    before=$(ls "$build/failures/$target")
    # An input that takes more than ten seconds hangs; memory is held against the input by the target itself.
    run -max_total_time="$task" -max_len=8192 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/failures/$target/" "$found" "$fuzz/corpus/$target" 2>"$build/$target.log" || true
    grep -E 'INITED|DONE' "$build/$target.log" | sed 's/^/   /'
    for input in "$build/failures/$target"/*; do
        name=$(basename "$input")
        case "$before" in *"$name"*) continue ;; esac
        [ -f "$input" ] || continue
        failed="$failed
  $target: $(grep -m 1 -E 'panicked at|ERROR' -A 1 "$build/$target.log" | tr '\n' ' ')"
        mkdir -p "$fuzz/regressions/$target"
        run -minimize_crash=1 -max_total_time=30 -exact_artifact_path="$fuzz/regressions/$target/$name" "$input" \
            >/dev/null 2>&1 || true
        [ -f "$fuzz/regressions/$target/$name" ] || cp "$input" "$fuzz/regressions/$target/$name"
        say "$target fails: tests/fuzz/regressions/$target/$name"
    done
    rm -rf "$scratch/tmp"
done
[ -z "$failed" ] || die "failed:$failed"
