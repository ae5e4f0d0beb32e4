#!/usr/bin/env bash
# Stock Horovod against the TensorFlow that is there: Gloo and MPI, with DEVICE=gpu also NCCL
# and CUDA. What newer TensorFlow moved or dropped, the headers in compat/ give back.
#
#   install-horovod.sh                  Horovod only, into the environment of PYTHON
#   install-horovod.sh --requirements   first the packages of the lock, TensorFlow among them
#   install-horovod.sh --venv .venv     first an environment, .venvs/NAME, made with PYTHON, and the
#                                       tools for development; then .venv leads to it. Does nothing
#                                       when .venv is up to date
#   install-horovod.sh --wheelhouse DIR everything that --venv would download, into DIR
#   install-horovod.sh --lock           locks/*.txt anew from requirements*.txt
#   install-horovod.sh --key            show what a built wheel is valid for, and stop
#   install-horovod.sh --stamp .venv    show what makes .venv up to date, and stop
#
# Environment:
#   PYTHON          interpreter                     python3
#   DEVICE          cpu or gpu                      gpu where there is an NVIDIA driver
#   WHEELHOUSE      folder to install from, without a network
#   HOROVOD_WHEELS  folder of built wheels          ~/.cache/horovod-wheels
#   CUDA_HOME       toolkit with nvcc (gpu)         where nvcc is, else /usr/local/cuda
#   HOROVOD_*       passed on to Horovod's build
#
# MPI is the system's Open MPI where there is an mpicxx, else the one from requirements.txt; an
# environment that has its own already keeps it.
# shellcheck disable=SC2034,SC2154 # variables of one file are those of all
set -euo pipefail

script=$(readlink -f "${BASH_SOURCE[0]}")
here=$(dirname "$script")
root=$(dirname "$here")
[ -e "$root/requirements.txt" ] || root=$PWD # copied into an image without what is around it
compat=$here/compat
locks=$here/locks
python=${PYTHON:-python3}
cache=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/horovod-wheels}
mode='' venv='' log='' section=1 work='' wheelhouse=''
for part in report machine packages horovod environments; do
    # shellcheck source=/dev/null
    . "$here/setup/$part.sh"
done

begin() {
    trap 'rm -rf "$work"' EXIT
    trap 'echo "interrupted" >&2; exit 130' INT TERM
    make_work
    log=$work/setup.log
}

# Into the environment of $python.
install() {
    local bin
    bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
    if [ -z "$venv" ]; then
        find_mpi "$bin"
        [ ! -x "$bin/mpicxx" ] || mpi=wheel
    fi
    # shellcheck disable=SC2031
    export PATH="$bin:$PATH"
    settle_pip
    [ -z "$told" ] || echo "$told"
    echo "Python $("$python" -c 'import platform; print(platform.python_version())')," \
        "$DEVICE, MPI: ${mpi/#wheel/from requirements.txt}; log: $log"
    if [ "$mode" = --requirements ] || [ -n "$venv" ]; then
        step "TensorFlow $(pinned tensorflow) and the other requirements" install_requirements
    elif [ "$DEVICE" = gpu ]; then
        check_cuda_of_tensorflow
    fi
    find_facts
    install_horovod
    cat "$work/built"
}

set_up_environment() {
    local new
    if whole "$venv"; then return; fi
    check_venv
    if new=$(find_environment); then
        [ -z "$told" ] || echo "$told"
        lead_to "$new"
        return
    fi
    check_lock "$DEVICE" dev
    check_cuda_of_lock
    check_compiler_or_wheels
    check_name
    begin
    claim_folder
    remove_dead
    wait_for_others
    if ! find_environment >/dev/null; then
        make_venv
        install
    fi
    finish_venv
    lead_to "$new"
}

case ${1:-} in
'' | --requirements | --key | --lock) mode=${1:-} ;;
--venv | --stamp)
    # Not where .venv leads to, but itself.
    mode=$1 venv=$(readlink -m "$(dirname "${2:?$1 wants a folder}")")/$(basename "$2")
    environments=${venv}s
    ;;
--wheelhouse) mode=$1 wheels=$(readlink -m "${2:?$1 wants a folder}") ;;
*) die "unknown option $1; the head of $0 says what there is" ;;
esac
horovod=$(pinned horovod)
[ -n "$horovod" ] || die "no horovod==... in $root/requirements.txt"
if [ -n "${WHEELHOUSE:-}" ] && [ "$mode" != --wheelhouse ]; then
    wheelhouse=$(readlink -m "$WHEELHOUSE")
    [ -d "$wheelhouse" ] || die "WHEELHOUSE=$WHEELHOUSE is no folder: make wheelhouse makes one"
fi

find_device
check_python
case $mode in --venv | --requirements | --wheelhouse) check_architecture ;; esac
case $mode in
--venv | --stamp)
    leave_environments
    find_mpi ''
    stamp=$(stamp)
    if [ "$mode" = --stamp ]; then echo "$stamp"; else set_up_environment; fi
    ;;
--key)
    begin
    bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
    find_mpi "$bin"
    [ ! -x "$bin/mpicxx" ] || mpi=wheel
    # shellcheck disable=SC2031
    export PATH="$bin:$PATH"
    find_facts
    echo "$facts"
    echo "key $key"
    ;;
--lock)
    begin
    log=$(mktemp --suffix=-horovod.log)
    make_tools
    settle_pip
    step "locks/cpu.txt, gpu.txt and dev.txt" make_lock
    rm "$log"
    ;;
--wheelhouse)
    check_lock "$DEVICE" dev
    check_disk "$wheels" "$([ "$DEVICE" = gpu ] && echo 6000 || echo 1500)"
    begin
    log=$(mktemp --suffix=-horovod.log)
    [ -z "$told" ] || echo "$told"
    make_tools
    settle_pip
    step "downloading into $wheels" fill_wheelhouse
    rm "$log"
    echo "for $DEVICE and $("$python" --version) on $(uname -m); set up from it, without a network:" \
        "make setup WHEELHOUSE=$(printf %q "$wheels")"
    ;;
*)
    check_lock "$DEVICE"
    [ -z "$mode" ] || check_cuda_of_lock
    check_compiler_or_wheels
    check_name
    begin
    log=$(mktemp --suffix=-horovod.log)
    install
    ;;
esac
