# Horovod: a cached wheel if there is one, else built; tested before it is cached.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

site_packages() {
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# What a build depends on besides installed packages; other HOROVOD_* are for runs.
build_settings() {
    local -x LC_ALL=C LANGUAGE='' # compilers speak, and sort sorts, as the locale has it
    echo "$(pins horovod), $DEVICE, $(uname -m), $(getconf GNU_LIBC_VERSION)"
    ${CXX:-c++} --version 2>/dev/null || true
    [ "$DEVICE" = cpu ] || "$cuda/bin/nvcc" --version 2>/dev/null || true
    env | grep -E '^(CC|CFLAGS|CXX|CXXFLAGS|LDFLAGS|CMAKE_ARGS|HOROVOD_(WITH|GPU|CUDA|NCCL|BUILD|CMAKE|MPICXX|ALLOW|CPU_OPERATIONS)[A-Z_]*)=.' | sort || true
    # Code for this very processor runs on no other kind.
    case "${CFLAGS:-} ${CXXFLAGS:-} ${HOROVOD_BUILD_ARCH_FLAGS:-}" in *native*)
        grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || true
        ;;
    esac
    declare -f build && find "$here/compat" -name '*.h' | sort | xargs -d '\n' cat
}

# All that a built wheel depends on: machines that print the same can share it.
wheel_settings() {
    local -x LC_ALL=C LANGUAGE=''
    build_settings
    "$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'
    (cd "$(site_packages)" && compgen -G 'tensorflow*.dist-info' && compgen -G 'nvidia_nccl*.dist-info') || true
    echo "$mpi, $(mpirun --version), $([ "$mpi" = wheel ] || readlink -f "$(command -v mpicxx)")"
    grep -ow -e avx -e fma -e f16c /proc/cpuinfo | sort -u || true # ARM has none of them
}

build() {
    local site
    site=$(site_packages)
    ln -sfn "$here/compat" "$work/compat"
    export TMPDIR=$work # programs run from there (CMake's), which /tmp often forbids
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    export CXXFLAGS="${CXXFLAGS:-} -I$work/compat -include tf_compat.h \
-I$site/tensorflow/include/external/highwayhash -I$site/tensorflow/include/external/farmhash_archive/src"
    # Relative, so that the wheel works wherever it is installed: Open MPI in the environment's lib,
    # NCCL beside Horovod.
    # shellcheck disable=SC2016
    export LDFLAGS="${LDFLAGS:-}"' -Wl,-rpath,$ORIGIN/../../../.. -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib'
    export CMAKE_POLICY_VERSION_MINIMUM=3.5 # CMake 4 would refuse Horovod's dependencies
    # Horovod compiles Gloo twice, once in the C++ of older TensorFlows, and symbols for debuggers:
    # a third of the time. CMake reads this file beside its command line, and again at its end.
    cat >"$work/less.cmake" <<CMAKE
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG" CACHE STRING "")
if(TARGET gloo)
  set_target_properties(gloo PROPERTIES EXCLUDE_FROM_ALL ON)
elseif(NOT at_end AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
  set(at_end ON)
  cmake_language(DEFER CALL include "$work/less.cmake")
endif()
CMAKE
    export CMAKE_TOOLCHAIN_FILE=$work/less.cmake
    # Without this, Open MPI's compiler puts this environment's absolute path first.
    [ "$mpi" != wheel ] || export OMPI_LDFLAGS="-L${python%/bin/*}/lib"
    if [ "$DEVICE" = gpu ]; then
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_CUDA_HOME="$cuda"
        export PATH="$cuda/bin:$PATH" HOROVOD_NCCL_HOME="$site/nvidia/nccl"
        ln -sf libnccl.so.2 "$site/nvidia/nccl/lib/libnccl.so" # the name that the linker asks for
    fi
    # One compiler a core, at most one for each 2 GB of this machine or container.
    MAKEFLAGS=-j$({
        nproc && awk '/^MemAvailable/ { print int($2 / 2e6) + 1 }' /proc/meminfo
        awk '/^[0-9]/ { print int($1 / 2e9) + 1 }' /sys/fs/cgroup/memory.max 2>/dev/null || true
    } | sort -n | head -n 1)
    export MAKEFLAGS # not those of a calling make
    unset MAKELEVEL MFLAGS
    # No isolation, which would hide TensorFlow. No pip cache, which ignores TensorFlow's version.
    pins horovod >"$work/horovod.txt"
    "$pip" --python "$python" wheel "${source[@]}" --verbose --use-pep517 --no-build-isolation \
        --no-cache-dir --no-deps --no-binary horovod -w "$work/wheel" --require-hashes -r "$work/horovod.txt"
}

# try_wheel FOLDER: installs it; two ranks add up their numbers, on CPUs, so that it runs anywhere.
try_wheel() {
    local via
    "$uv" pip install --python "$python" --no-deps --offline --reinstall "$1"/horovod-*.whl
    # TensorFlow 2.21 looks for cuSOLVER in all folders of nvidia/ but cuSOLVER's, and sees no GPU.
    [ "$DEVICE" = cpu ] ||
        ln -sfn ../../cusolver/lib/libcusolver.so.11 "$(site_packages)/nvidia/cusparse/lib/libcusolver.so.11"
    # Else each rank compiles TensorFlow anew, 6 s of a core, wherever Python may not write beside it.
    "$python" -m compileall -q -j 0 --invalidation-mode checked-hash \
        "$(site_packages)" "$(find_engine)/src" || true
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CUDA_VISIBLE_DEVICES=''
    for via in gloo mpi; do
        timeout -k 5 600 horovodrun -np 2 "--$via" --disable-cache \
            --binding-args='--bind-to none --map-by slot' \
            "$python" "$here/setup/allreduce.py" "$via" "$DEVICE" </dev/null
    done
}

# The operation by which batch norms exchange their statistics, for this TensorFlow and this MPI.
compile_exchange() {
    local tensorflow target
    tensorflow=$(site_packages)/tensorflow
    target=$("$python" -c 'import sys; print(sys.prefix)')/lib/hvdkit-exchange.so
    rm -f "$target"
    TMPDIR=$work OMPI_CXX=${CXX:-c++} mpicxx -std=c++17 -O2 -DNDEBUG -fPIC -shared -w -isystem "$tensorflow/include" \
        "$(find_engine)/src/hvdkit/ranks/exchange.cc" "$tensorflow/libtensorflow_framework.so.2" -o "$target.new" || return
    mv "$target.new" "$target"
}

# With the operation, on a core that Horovod's build leaves free much of the time.
install_horovod() {
    local compiler
    (compile_exchange) >"$work/exchange.log" 2>&1 9>&- &
    compiler=$!
    install_horovod_alone
    wait "$compiler" && return
    cat "$work/exchange.log" >>"$log"
    echo "note: $(find_engine)/src/hvdkit/ranks/exchange.cc does not compile: Horovod carries batch norm's" \
        "exchanges (--bn_sync=full), which takes longer; log: $log"
}

install_horovod_alone() {
    local proof="two ranks add up over Gloo, then over MPI" kept
    kept=$cache/$(wheel_settings | sha256sum | cut -c1-16)
    if [ -n "$cache" ] && [ -e "$kept" ]; then
        step "Horovod of $kept (without it, it is built anew): $proof" try_wheel "$kept"
        return
    fi
    # Horovod's setup.py gives CMake options of make, which no other generator takes.
    CMAKE_GENERATOR="Unix Makefiles" step "Horovod, building: some minutes" build
    step "Horovod: $proof" try_wheel "$work/wheel"
    # Atomically; if it cannot be written, the next set-up builds again.
    [ -z "$cache" ] || { mkdir -p "$cache" && cp -r "$work/wheel" "$kept.$$" && mv -T "$kept.$$" "$kept"; } 2>>"$log" || true
}
