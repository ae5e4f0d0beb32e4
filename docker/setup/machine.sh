# What is there: Python, compilers, room, GPUs, MPI; and what set-up says where it is not.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

check_python() {
    command -v "$python" >/dev/null || die "no $python: install Python 3.10 to 3.13, or name" \
        "one: PYTHON=/path/to/python3.11"
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        die "$python does not run: name a Python 3.10 to 3.13: PYTHON=/path/to/python3.11"
    case $version in
    3.10 | 3.11 | 3.12 | 3.13) ;;
    *) die "$python is Python $version, TensorFlow wants 3.10 to 3.13: name one, PYTHON=/path/to/python3.11" ;;
    esac
    case $mode in --venv | --stamp | --lock | --wheelhouse) ;; *) return ;; esac
    # Not the virtual environment that may be active, but the one it was made with.
    python=$("$python" -c 'import sys; print(sys._base_executable)')
    "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python cannot make virtual" \
        "environments: apt-get install python$version-venv"
}

# Programs of another environment do not count: its MPI and its CMake are not those of the new one.
leave_environments() {
    local folder path=''
    local -a folders
    IFS=: read -ra folders <<<"$PATH"
    for folder in "${folders[@]}"; do
        # shellcheck disable=SC2030
        [ -e "$folder/../pyvenv.cfg" ] || path+=${path:+:}$folder
    done
    export PATH=$path
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV # a cluster's modules would shine through
}

no_compiler() {
    local tool cxx=${CXX:-c++}
    for tool in "${cxx%% *}" make; do # it may have words, as in CXX="ccache g++"
        command -v "$tool" >/dev/null || { echo "$tool" && return; }
    done
    return 1
}

no_nvcc() {
    [ "$DEVICE" = gpu ] && [ ! -x "$cuda/bin/nvcc" ]
}

check_compiler() {
    local tool
    if tool=$(no_compiler); then
        die "no $tool, needed to build Horovod: apt-get install build-essential (dnf install" \
            "gcc-c++ make; on a cluster: module load gcc), or bring a wheel: HOROVOD_WHEELS"
    elif no_nvcc; then
        die "no nvcc, needed to build Horovod for GPUs: install the CUDA toolkit and set" \
            "CUDA_HOME, or choose DEVICE=cpu"
    fi
}

# Gloo crashes, without a word, where it finds no address for the host's own name.
check_name() {
    local name
    name=$(uname -n)
    ! command -v getent >/dev/null || getent hosts "$name" >/dev/null ||
        die "this host's own name, $name, has no address: add a line '127.0.0.1 $name' to /etc/hosts"
}

# check_disk DIR MEGABYTES
check_disk() {
    local dir=$1 free
    until [ -d "$dir" ]; do dir=$(dirname "$dir"); done
    free=$(df -Pm "$dir" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$2" ] ||
        die "$1 has $free MB free and $2 MB are needed: free some space, or set TMPDIR or move elsewhere"
}

programs_run_in() {
    local file
    file=$(mktemp "$1/.XXXXXX") || return
    printf '#!/bin/sh\n' >"$file"
    chmod +x "$file"
    "$file" 2>/dev/null
    local status=$?
    rm -f "$file"
    return "$status"
}

# A folder for temporary files from which programs may run (CMake; /tmp is often mounted noexec)
# and without a space in its path (Horovod's CMake files split there).
make_work() {
    local parent
    for parent in "${TMPDIR:-/tmp}" "$cache" "$root"; do
        if [[ $parent == *' '* ]] || ! mkdir -p "$parent" 2>/dev/null; then continue; fi
        work=$(mktemp -d "$parent/.horovod-XXXXXX" 2>/dev/null) || continue
        if programs_run_in "$work"; then return; fi
        rm -rf "$work"
    done
    die "programs cannot run from ${TMPDIR:-/tmp}, $cache or $root (mounted noexec, not writable," \
        "or a space in the path): set TMPDIR to a folder where they can"
}

# ------------------------------------------------------------------------------ GPUs

# nvidia-smi may hang where a GPU or its driver does.
sees_gpu() {
    [ -e /proc/driver/nvidia/version ] || timeout 20 nvidia-smi -L >/dev/null 2>&1
}

# What was asked for, else what this machine has, else, so that a login node does not take the GPU
# nodes' environment away, what .venv is for already.
find_device() {
    told='' # said when something is built
    if [ -z "${DEVICE:-}" ]; then
        DEVICE=cpu
        if sees_gpu; then
            DEVICE=gpu
        elif [ -n "$venv" ] && grep -qs ', device gpu, ' "$venv/.setup"; then
            DEVICE=gpu told="no GPU is seen here: .venv stays one for GPUs; for CPUs: DEVICE=cpu"
        else
            told="no GPU is seen here: set up for CPUs; for GPU nodes: make setup DEVICE=gpu"
        fi
    fi
    case $DEVICE in cpu | gpu) ;; *) die "DEVICE is '$DEVICE': cpu or gpu" ;; esac
    export DEVICE

    cuda=${CUDA_HOME:-}
    if [ -z "$cuda" ] && command -v nvcc >/dev/null; then
        cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    fi
    [ -e "$cuda/include/cuda_runtime.h" ] || cuda=/usr/local/cuda
}

driver() {
    {
        timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader ||
            grep NVRM /proc/driver/nvidia/version
    } 2>/dev/null | grep -oE '[0-9]{3}\.[0-9.]+' | head -n 1
}

# check_cuda MAJOR: TensorFlow's CUDA against the compiler's and the driver's.
check_cuda() {
    local major=$1 nvcc least='' driver
    nvcc=$("$cuda/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    [ "${nvcc:-$major}" = "$major" ] || die "TensorFlow $(pinned tensorflow) uses CUDA $major and" \
        "$cuda/bin/nvcc is of CUDA $nvcc: set CUDA_HOME to a toolkit of CUDA $major (module load" \
        "cuda/$major...), or choose DEVICE=cpu"
    # CUDA Toolkit Release Notes, "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor
    # Version Compatibility", Linux.
    case $major in 12) least=525.60.13 ;; 13) least=580.65.06 ;; esac
    driver=$(driver) || return 0 # none here, as on a login node
    [ "$(printf '%s\n' "$least" "$driver" | sort -V | head -n 1)" = "$least" ] ||
        die "TensorFlow $(pinned tensorflow) uses CUDA $major, which needs an NVIDIA driver of" \
            "$least or newer, and this one is $driver: update it, or choose DEVICE=cpu"
}

check_architecture() {
    case $(uname -m) in x86_64 | aarch64) ;; *) die "no TensorFlow for $(uname -m) on PyPI" ;; esac
    [ "$DEVICE" = cpu ] || [ "$(uname -m)" = x86_64 ] || die "there is no TensorFlow with CUDA for" \
        "$(uname -m) on PyPI: choose DEVICE=cpu, or run docker/install-horovod.sh without a flag" \
        "beside a TensorFlow with CUDA that you have"
}

# Before anything is installed, from what the lock will install.
check_cuda_of_lock() {
    local major
    [ "$DEVICE" = gpu ] || return 0
    major=$(sed -n 's/^nvidia-cuda-runtime\(-cu[0-9]*\)\?==\([0-9]*\)\..*/\2/p' "$locks/gpu.txt")
    check_cuda "${major:?no nvidia-cuda-runtime in $locks/gpu.txt}"
}

# Of the TensorFlow that somebody else installed.
check_cuda_of_tensorflow() {
    local version
    version=$("$python" -c 'import tensorflow as tf
print(tf.sysconfig.get_build_info().get("cuda_version", "none"))' 2>>"$log") ||
        failed "looking at TensorFlow"
    [ "$version" != none ] || die "the TensorFlow of $python is a build for CPUs: DEVICE=cpu, or" \
        "install another"
    check_cuda "${version%%.*}"
}

# ------------------------------------------------------------------------------- MPI

# The system's MPI, where its launcher is Open MPI's: horovodrun does not get on with MPICH.
# find_mpi BIN: BIN, of the environment itself, does not count.
find_mpi() {
    # shellcheck disable=SC2031
    local path=":$PATH:"
    path=${path//":$1:"/:}
    # shellcheck disable=SC2030,SC2031
    mpi=$(PATH=$path && command -v mpicxx >/dev/null && mpirun --version | grep 'Open MPI') \
        2>/dev/null || mpi=wheel
}
