# Checks of the machine. What is missing is one sentence; everything else is in a log.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

die() { echo "error: $*" >&2 && exit 1; }

# begin FOLDER LOG: a folder that is removed at the end, and where the rest is written.
begin() {
    work=$1 log=$2
    mkdir -p "$work"
    trap 'rm -rf "$work"' EXIT
}

# step LABEL COMMAND...: one line on the screen, the rest into the log. If it fails: the log's end,
# and what to do if that is known.
step() {
    local start=$SECONDS status why todo="the lines above end its log"
    local missing="a package is missing: make wheelhouse fills a folder for one PYTHON and DEVICE"
    printf '%s ... ' "$1"
    set +e # in front of || or after `if` a command would run on after an error
    (set -e && "${@:2}") >>"$log" 2>&1 9>&- # nothing that is started may keep the lock
    status=$?
    set -e
    [ "$status" != 0 ] || { echo "$((SECONDS - start)) s" && return; }
    why=$(tail -n 15 "$log")
    case "$2 $why" in
    *'quota exceeded'* | *'No space left'*) todo="the disk is full: free some space (df -h, quota -s)" ;;
    *'ash mismatch'* | *'DO NOT MATCH'*) todo="a package is not that of uv.lock: see PIP_INDEX_URL" ;;
    *'invalid peer certificate'* | *CERTIFICATE_VERIFY_FAILED*)
        todo="the index's certificate is not trusted: name the file of your certificates in PIP_CERT" ;;
    'try_wheel '*) ;; # its connections are those of two ranks on this host
    *'Failed to fetch'* | *onnection* | *'timed out'* | *'No matching distribution'*)
        # pip without retries does not say that there is no connection.
        todo="no network? see HTTPS_PROXY, PIP_INDEX_URL; or use a folder: make wheelhouse"
        [ -z "${WHEELHOUSE:-}" ] || todo=$missing ;;
    *'No solution found'*) # with an index uv says itself why (a date, another C library)
        [ -z "${WHEELHOUSE:-}" ] || todo=$missing ;;
    esac
    printf 'failed\n%s\n' "$why" >&2
    die "$1 failed: $todo; log: $log"
}

# Programs of another environment do not count: its MPI and its CMake are not those of the new one.
check_python() {
    local version absolute folder path=''
    read -r version absolute < <("$python" -c 'import sys
absolute = sys.executable if sys.argv[1] == "--requirements" else sys._base_executable
print("%d.%d" % sys.version_info[:2], absolute)' "$mode" 2>/dev/null) || true
    [[ $version =~ ^3\.1[123]$ ]] || die "PYTHON=$python ${version:+is }${version:-does not run}: install or" \
        "name a Python 3.11 to 3.13, as in PYTHON=/path/to/python3.11"
    python=$absolute # a name alone would be looked for in a shorter PATH
    while read -rd : folder; do
        [ -e "$folder/../pyvenv.cfg" ] || path+=${path:+:}$folder
    done <<<"$PATH:"
    PATH=$path
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV # a cluster's modules would shine through
}

# What the user asked for, else what this machine has, else what .venv is for already: a login node
# must not replace the GPU nodes' environment. nvidia-smi may hang where a GPU does.
find_device() {
    cuda=${CUDA_HOME:-/usr/local/cuda}
    if [ -z "${DEVICE:-}" ]; then
        DEVICE=cpu
        if [ -e /proc/driver/nvidia/version ] || timeout 20 nvidia-smi -L >/dev/null 2>&1 ||
            [[ $(readlink "$venv") == */gpu-* ]]; then DEVICE=gpu; fi
    fi
    [[ $DEVICE =~ ^(cpu|gpu)$ ]] || die "DEVICE is '$DEVICE': cpu or gpu"
    [ "$DEVICE $(uname -m)" != 'gpu aarch64' ] || die "PyPI has no TensorFlow for GPUs on ARM: DEVICE=cpu"
}

# g++ 14 refuses a header that Horovod 0.28.1 brings: its flatbuffers assigns to a constant, in code
# that nobody calls. An older compiler beside it, as Debian 13 has it, is taken.
find_compiler() {
    local version older
    if [ -n "${CXX:-}" ] || ! c++ --version 2>/dev/null | grep 'Free Software' >/dev/null; then
        return 0
    fi
    version=$(c++ -dumpversion)
    [ "${version%%.*}" -ge 14 ] || return 0
    for older in 13 12 11; do
        if command -v g++-$older >/dev/null; then
            export CC=gcc-$older CXX=g++-$older
            return 0
        fi
    done
    die "g++ $version does not compile Horovod, which needs 13 or older: apt-get install g++-13" \
        "(or set CC and CXX to another compiler)"
}

# check_machine FOLDER: before anything is downloaded into it.
check_machine() {
    local tool cxx=${CXX:-c++} major name free needed=3000 build="needed to build Horovod"
    for tool in "${cxx%% *}" make; do # it may have words, as in CXX="ccache g++"
        command -v "$tool" >/dev/null || die "no $tool, $build: apt-get install build-essential" \
            "(dnf install gcc-c++ make; on a cluster: module load gcc)"
    done
    "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        die "no Python.h for $python, $build: apt-get install python3-dev (dnf: python3-devel)"
    if [ "$DEVICE" = gpu ]; then
        needed=12000
        major=$(sed -nE 's/^name = "nvidia-cuda-runtime-cu([0-9]+)"/\1/p' "$lock" | head -n 1)
        "$cuda/bin/nvcc" --version 2>/dev/null | grep -q "release $major\." || die "no nvcc of CUDA" \
            "$major, $build for GPUs: install that toolkit and set CUDA_HOME, or choose DEVICE=cpu"
    fi
    free=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$needed" ] || die "$1 has $free MB free and $needed MB are needed: free some space"
    name=$(uname -n) # Gloo crashes, without a word, where it cannot listen at that
    "$python" -c 'import socket, sys
for line in sys.argv[1].splitlines():
    try:
        family, _, _, _, address = socket.getaddrinfo(line.split()[0], 0)[0]
        socket.socket(family).bind(address)
        sys.exit()
    except OSError:
        pass
sys.exit(1)' "$(getent ahosts "$name")" || die "this host's own name, $name, has no address of it:" \
        "let its line in /etc/hosts be '127.0.0.1 $name'"
}
