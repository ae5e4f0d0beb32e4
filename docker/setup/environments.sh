# An environment for each stamp, in a folder of its own: .venvs/NAME. `.venv` is a link, switched
# when the environment is whole, in one rename. So nothing that runs, here or on another node that
# shares the disk, loses what it runs in; and no lock is needed, which over a shared disk would
# have to be trusted:
# - every set-up builds in a folder that it alone made, at its final path (an environment cannot
#   be moved), and writes the stamp into it last: a folder without one is never used;
# - a set-up that finds a whole environment of its stamp, before or after it built, takes that;
# - on one host a second set-up for the same stamp waits for the first.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

# What an environment depends on; not where it lies.
stamp() {
    "$python" --version
    echo "$(readlink -f "$python"), device $DEVICE, mpi $mpi"
    echo "$(uname -m), $(getconf GNU_LIBC_VERSION)"
    # Settings of Horovod's build; other HOROVOD_* are for runs.
    env | grep -E '^(CXX|CXXFLAGS|LDFLAGS|HOROVOD_(WITH|GPU|CUDA|NCCL)[A-Z_]*)=.' | sort || true
    cat "$root"/requirements*.txt "$locks"/*.txt "$script" "$here"/setup/* | sha256sum
    headers
}

headers() {
    (cd "$compat" && find . -type f -name '*.h' | LC_ALL=C sort | xargs sha256sum)
}

# whole DIR: it has the stamp, is where it was built, and runs.
whole() {
    local setup=$1/.setup
    [ -e "$setup" ] && [ "$(sed '$d' "$setup")" = "$stamp" ] &&
        [ "$(sed -n '$s/^in //p' "$setup")" -ef "$1" ] &&
        [ -x "$1/bin/horovodrun" ] && "$1/bin/python" -c '' 2>/dev/null
}

# A whole environment of this stamp: that of .venv, be it elsewhere, else another.
find_environment() {
    local dir
    for dir in "$venv" "$environments"/*; do
        if whole "$dir"; then
            readlink -f "$dir"
            return
        fi
    done
    return 1
}

# ------------------------------------------------------------ who builds, or died doing so

# This boot of this machine, this space of process numbers, this process: nobody else's, ever.
identity() {
    echo "$(cat /proc/sys/kernel/random/boot_id) $(readlink /proc/self/ns/pid) $$ $(started $$)"
}

# started PID: when, in ticks since boot; nothing where it has ended.
started() {
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20
}

# builder DIR: of an environment that is not whole: its set-up's process number where that runs
# here; "dead" where it ran here; "unknown" where it runs or ran on another machine, or is another
# user's, whose processes /proc may hide.
builder() {
    local boot space pid start
    [ -O "$1/.building" ] || { echo unknown && return; }
    read -r boot space pid start 2>/dev/null <"$1/.building" || { echo unknown && return; }
    if [ "$boot $space" != "$(identity | cut -d ' ' -f 1,2)" ]; then
        echo unknown
    elif [ "$(started "$pid")" = "$start" ]; then
        echo "$pid"
    else
        echo dead
    fi
}

# While another set-up of this host, begun before, builds for the same stamp.
wait_for_others() {
    local dir pid said=''
    for dir in "$environments"/*; do
        [[ $dir < $new ]] || continue
        while [ ! -e "$dir/.setup" ] && [ "$(sed 1d "$dir/.building" 2>/dev/null)" = "$stamp" ] &&
            pid=$(builder "$dir") && [[ $pid =~ ^[0-9]+$ ]]; do
            [ -n "$said" ] || echo "waiting for another setup to end (process $pid)"
            said=1
            sleep 1
        done
    done
}

# What set-ups that died on this machine left half-built; nothing runs in it.
remove_dead() {
    local dir
    for dir in "$environments"/*; do
        if [ -e "$dir/.building" ] && [ ! -e "$dir/.setup" ] && [ "$(builder "$dir")" = dead ]; then
            rm -rf "$dir" || true # another set-up does so too
        fi
    done
}

# ------------------------------------------------------------------------- building one

# A folder with this set-up's name on it. Set-ups that begin later have later names.
claim_folder() {
    mkdir -p "$environments"
    programs_run_in "$environments" ||
        die "programs cannot run from $environments (mounted noexec, or not writable): make it a" \
            "link to a folder where they can"
    # To the nanosecond: containers may have one name and one process number.
    new=$environments/$(date +%Y%m%d-%H%M%S-%N)-$(uname -n | tr -c 'A-Za-z0-9.\n' -)-$$
    mkdir "$new"
    { identity && echo "$stamp"; } >"$new/.building"
}

make_venv() {
    check_disk "$environments" "$([ "$DEVICE" = gpu ] && echo 12000 || echo 3000)"
    log=$new/setup.log
    "$python" -m venv "$new" >>"$log" 2>&1 || failed "making $new"
    python=$new/bin/python
}

# The stamp, last and whole; unless another host was faster: then its environment is taken.
finish_venv() {
    local site other
    if other=$(find_environment); then
        rm -rf "$new" # without a stamp it was nobody's but ours
        new=$other
        return
    fi
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$here/setup/keep_environment.py" "$site"
    echo 'import keep_environment' >"$site/keep_environment.pth"
    printf '%s\nin %s\n' "$stamp" "$new" >"$new/.setup.new"
    mv "$new/.setup.new" "$new/.setup"
    rm "$new/.building"
}

# ------------------------------------------------------------------------------ the link

# Older set-ups made .venv itself a folder. Who runs in it, maybe on another node, cannot be seen.
check_venv() {
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || [ -e "$venv/setup.log" ] ||
        rmdir "$venv" 2>/dev/null ||
        die "$venv is there and is no virtual environment: move it away"
    [ -L "$venv" ] || [ ! -d "$venv" ] ||
        die "$venv is a folder and was made by an older set-up: when no job on any node runs in it," \
            "mkdir -p $(printf %q "$environments") && mv $(printf '%q %q' "$venv" "$environments/old")"
}

# lead_to DIR: .venv becomes a link to it, in one step for whoever looks.
lead_to() {
    local link
    link=$venv.$(basename "$1")
    check_venv # again: a build takes a while
    if [ "$1" -ef "$environments/$(basename "$1")" ]; then
        ln -sfn "$(basename "$environments")/$(basename "$1")" "$link"
    else
        ln -sfn "$1" "$link"
    fi
    mv -T "$link" "$venv"
    echo ".venv leads to $1 ($DEVICE)"
    tell_unused "$1"
}

# tell_unused DIR: what else there is.
tell_unused() {
    local dir
    local -a unused=()
    for dir in "$environments"/*; do
        # Of this machine's set-ups those that run are left out.
        [ "$dir" -ef "$1" ] || [ "$dir" -ef "$venv" ] || { [ ! -e "$dir/.setup" ] &&
            [[ $(builder "$dir") =~ ^[0-9]+$ ]]; } || unused+=("$(printf %q "$dir")")
    done
    [ ${#unused[@]} = 0 ] || echo "no longer led to, whole or half-built; when no job runs in" \
        "them and no other host builds them: rm -r ${unused[*]}"
}
