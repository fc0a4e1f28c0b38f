# Sourced by the scripts beside it: where things are, and how to say what happens.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export ROOT

PG_MAJOR=${PG_MAJOR:-15}
PGRX_VERSION=$(sed -n 's/^pgrx = "=\(.*\)"$/\1/p' "$ROOT/Cargo.toml")
PG_LIB=/usr/lib/postgresql/$PG_MAJOR
PG_SHARE=/usr/share/postgresql/$PG_MAJOR

# Private servers run as user postgres where we are root, and a checkout under
# a closed home directory is out of its reach: so what they need lives here, in
# a place of its own for each user and checkout.
RUN_DIR=${AWA_RUN_DIR:-/var/tmp/awa-$(id -u)-$(printf %s "$ROOT" | sha256sum | cut -c1-8)}
export AWA_RUN_DIR=$RUN_DIR

[ -d "$HOME/.cargo/bin" ] && PATH=$HOME/.cargo/bin:$PATH
# Backtraces of the library would end up in the DETAIL of its errors.
unset RUST_BACKTRACE

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif have sudo; then
        sudo "$@"
    else
        die "this needs root: run it as root, or install sudo: $*"
    fi
}

# The build that tests use. With the tests of the domain, although not all need them:
# their dependencies decide features of ours, and all would be built once more.
TEST_FEATURES=(--features "debug_points pg_test")
TEST_BUILD=(--locked "${TEST_FEATURES[@]}" --lib --test domain)

# The folder of RUN_DIR, which must be ours: /var/tmp is everybody's.
make_run_dir() {
    mkdir -p -m 0755 "$RUN_DIR"
    [ -O "$RUN_DIR" ] && [ ! -L "$RUN_DIR" ] || die "$RUN_DIR belongs to somebody else"
}
