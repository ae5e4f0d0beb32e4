# Horovod: a wheel that was built before where there is one, else built; proved before it is kept.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

# Everything that a built wheel depends on: two machines that print the same may share it.
facts() {
    wheel_is_for
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
    no_compiler >/dev/null || echo "compiler $(${CXX:-c++} --version | head -n 1)"
    echo "libc $(getconf GNU_LIBC_VERSION)"
    echo "instructions $(grep -ow -e avx -e fma -e f16c /proc/cpuinfo | sort -u | xargs)"
    if [ "$DEVICE" = gpu ]; then
        no_nvcc || echo "cuda $("$cuda/bin/nvcc" --version | tail -n 1)"
        echo "nccl $(nccl_version)"
    fi
    headers
    declare -f build build_flags | sha256sum
    env | grep -E '^(HOROVOD_|CXX=|CXXFLAGS=|LDFLAGS=)' | grep -v '^HOROVOD_WHEELS=' | sort || true
}

wheel_is_for() {
    echo "horovod $horovod for $DEVICE on $(uname -m)"
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

# ---------------------------------------------------------------------------- kept wheels

kept_wheels() {
    printf '%s\n' "$cache"/*/ ${wheelhouse:+"$wheelhouse"/built/*/}
}

# Is it worth while to install TensorFlow and look closer, where nothing can be compiled?
check_compiler_or_wheels() {
    local folder
    while read -r folder; do
        if [ "$(head -n 1 "$folder/facts.txt" 2>/dev/null)" = "$(wheel_is_for)" ]; then return; fi
    done < <(kept_wheels)
    check_compiler
}

# The folder of a wheel with these facts. Where there is no compiler, any may have built it: the
# proof decides.
find_wheel() {
    local folder any='^$'
    ! no_compiler >/dev/null || any+='|^compiler '
    ! no_nvcc || any+='|^cuda '
    while read -r folder; do
        if compgen -G "${folder}horovod-*.whl" >/dev/null &&
            cmp -s <(grep -vE "$any" "$folder/facts.txt") <(echo "$facts" | grep -vE "$any"); then
            echo "${folder%/}"
            return
        fi
    done < <(kept_wheels)
    return 1
}

# Whole or not at all, whoever else builds at the same time. A cache that cannot be written to
# costs the next build its time, no more.
keep_wheel() {
    local to=$cache/$key new=$cache/.$key.$$
    if mkdir -p "$cache" && cp -r "$work/wheel" "$new" && echo "$facts" >"$new/facts.txt"; then
        [ "$bad" != "$to" ] || rm -rf "$to" # it failed the proof that the new one passed
        mv -T "$new" "$to" && return
    fi
    rm -rf "$new"
}

# ------------------------------------------------------------------------------ the build

# build_flags INCLUDE: exports what Horovod's build reads; INCLUDE has TensorFlow's headers.
build_flags() {
    local include=$1 nccl
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    export CXXFLAGS="${CXXFLAGS:-} -I$work/compat -include tf_compat.h \
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
}

# Horovod's CMake files split paths at spaces: the environment by a link without one. Open MPI's
# compiler would find its own real path and tell that; CMake looks for it beside mpiexec.
avoid_spaces() {
    local name
    ln -sfn "$1" "$work/env"
    python=$work/env/bin/python
    mkdir -p "$work/bin"
    if [ "$mpi" = wheel ]; then
        for name in mpicc mpicxx mpiexec; do
            printf '#!/bin/bash\nOPAL_PREFIX=%q exec -a %s %q "$@"\n' "$work/env" "$name" \
                "$work/env/bin/opal_wrapper" >"$work/bin/$name"
            chmod +x "$work/bin/$name"
        done
    fi
    # shellcheck disable=SC2031
    export PATH="$work/bin:$work/env/bin:$PATH"
}

build() {
    local prefix
    export TMPDIR=$work
    ln -sfn "$compat" "$work/compat"
    prefix=$("$python" -c 'import sys; print(sys.prefix)')
    if [[ $prefix == *' '* ]]; then
        avoid_spaces "$prefix"
        prefix=$work/env
    fi
    # Open MPI's compiler would have the wheel look for libraries by $work/env too, a path in /tmp
    # that is anybody's once the build has ended.
    [ "$mpi" != wheel ] || export OMPI_LDFLAGS="-L$prefix/lib"
    build_flags "$("$python" -c 'import tensorflow as tf; print(tf.sysconfig.get_include())')"
    if ! command -v cmake >/dev/null; then
        entries cmake "$locks/$DEVICE.txt" >"$work/cmake.txt"
        "$python" -m pip install "${source[@]}" --require-hashes --target "$work/cmake" \
            -r "$work/cmake.txt"
        export HOROVOD_CMAKE="$work/cmake/cmake/data/bin/cmake"
    fi

    MAKEFLAGS="-j$("$python" "$here/setup/limits.py")"
    export MAKEFLAGS # a calling make must not hand us its own
    unset MAKELEVEL MFLAGS

    # No isolation: it would hide TensorFlow. No cache of pip's: it does not know TensorFlow's
    # version and would hand back a wheel that was built against another.
    entries horovod "$locks/$DEVICE.txt" >"$work/horovod.txt"
    "$python" -m pip wheel "${source[@]}" --verbose --use-pep517 --no-deps --no-build-isolation \
        --no-cache-dir --no-binary horovod --wheel-dir "$work/wheel" --require-hashes \
        -r "$work/horovod.txt"
}

install_wheel() {
    "$python" -m pip install --no-deps --no-index --force-reinstall "$1"/horovod-*.whl
}

# Two ranks add up their numbers, over Gloo and over MPI; on CPUs, so that it runs anywhere.
prove() {
    local via
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    for via in gloo mpi; do
        CUDA_VISIBLE_DEVICES='' timeout -k 5 120 horovodrun -np 2 "--$via" --disable-cache \
            --binding-args='--bind-to none --map-by slot' \
            "$python" "$here/setup/allreduce.py" "$via" "$DEVICE" "$work/built" </dev/null || return
    done
}

find_facts() {
    facts=$(facts 2>>"$log") || failed "looking at TensorFlow, MPI and the compiler"
    key=$(echo "$facts" | sha256sum | cut -c1-16)
}

install_horovod() {
    local proof="Two ranks add up over Gloo, then over MPI" kept
    bad=''
    if kept=$(find_wheel); then
        attempt "Horovod $horovod, built before" install_wheel "$kept"
        [ "$status" != 0 ] || attempt "$proof" prove
        [ "$status" != 0 ] || return 0
        echo "the wheel in $kept does not work here"
        bad=$kept
    fi
    check_compiler
    check_disk "$work" 1000
    step "Horovod $horovod, building: some minutes" build
    step "Horovod $horovod, installing" install_wheel "$work/wheel"
    step "$proof" prove
    keep_wheel >>"$log" 2>&1
}
