# Sourced by the scripts beside it. Leaves $root and $venv set, with the package, its engine and its test tools in $venv.
# Costs one hash when nothing changed. SGLANG_PERSIST_ENGINE=VERSION asks for another engine, in a .venv-VERSION of its own.

# Without compiled modules the engine starts in minutes instead of seconds: they are compiled once, when it is installed,
# because whoever starts a server from this environment may forbid Python to write them.
unset PYTHONDONTWRITEBYTECODE
export UV_COMPILE_BYTECODE=1 UV_COMPILE_BYTECODE_TIMEOUT=0

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
engine="${SGLANG_PERSIST_ENGINE:-}"
if [[ -n "$engine" && ! "$engine" =~ ^[0-9][0-9a-z.]*$ ]]; then
    echo "SGLANG_PERSIST_ENGINE=$engine: not a version of sglang" >&2
    exit 2
fi
venv="$root/.venv${engine:+-$engine}"

_find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python >= 3.11 with its venv and ensurepip modules was found (Debian and Ubuntu: python3 and python3-venv)" >&2
    return 1
}

# The first line tells a moved repository (the paths inside the environment are absolute), the second a changed pyproject.
_stamp() { printf '%s\n%s\n' "$root" "$(sha256sum <"$root/pyproject.toml")"; }

_set_up() {
    local python uv="$root/.cache/uv/bin/uv"
    if [[ ! -x "$uv" ]]; then
        python="$(_find_python)"
        "$python" -m venv "$root/.cache/uv"
        "$root/.cache/uv/bin/python" -m pip install --quiet uv
    fi
    if [[ ! -x "$venv/bin/python" || "$(head -n 1 "$venv/.stamp" 2>/dev/null)" != "$root" ]]; then
        python="${python:-$(_find_python)}"
        "$uv" venv --quiet --clear --python "$(command -v "$python")" "$venv"
        echo "$root" >"$venv/.stamp"
    fi
    (cd "$root" && "$uv" pip install --python "$venv/bin/python" -e '.[dev]')
    if [[ -n "$engine" ]]; then
        # Without its dependency list: 0.5.22 pins a package that no index serves; those of the pinned engine do.
        "$uv" pip install --python "$venv/bin/python" --no-deps --reinstall-package sglang "sglang==$engine"
    fi
    _stamp >"$venv/.stamp"
}

if [[ ! -x "$venv/bin/python" || "$(cat "$venv/.stamp" 2>/dev/null)" != "$(_stamp)" ]]; then
    mkdir -p "$root/.cache"
    # One set-up at a time; standard output belongs to the command that follows.
    (
        flock 9
        [[ -x "$venv/bin/python" && "$(cat "$venv/.stamp" 2>/dev/null)" == "$(_stamp)" ]] || _set_up
    ) 9>"$root/.cache/setup.lock" >&2
fi
