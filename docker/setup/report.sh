# What set-up says: one line a step, everything else into a log; one sentence for an error.
# shellcheck shell=bash disable=SC2154,SC2034 # variables of one file are those of all

die() {
    echo "error: $*" >&2
    exit 1
}

# Why a step failed, in one line where the cause is known, else the end of its log.
failed() {
    local why
    why=$(tail -n "+$section" "$log")
    if [[ $why == *'Disk quota exceeded'* ]]; then
        die "your quota of the disk is used up: free some space (quota -s), or set TMPDIR to" \
            "another disk; log: $log"
    elif [[ $why == *'No space left on device'* ]]; then
        die "the disk is full: free some space (df -h), or set TMPDIR to a larger one; log: $log"
    elif [[ $why == *'DO NOT MATCH THE HASHES'* ]]; then
        die "a downloaded package is not the one that $locks names: look at the index or mirror" \
            "(PIP_INDEX_URL), or make lock; log: $log"
    elif [ -n "$wheelhouse" ] && [[ $why == *'No matching distribution'* ]]; then
        die "WHEELHOUSE=$wheelhouse lacks a package for this Python and device: fill it with the" \
            "same PYTHON and DEVICE by make wheelhouse; log: $log"
    elif [[ $why =~ NewConnectionError|ConnectTimeout|NameResolution|ProxyError|'Max retries' ]]; then
        die "the Python package index cannot be reached: check the network, HTTPS_PROXY or" \
            "PIP_INDEX_URL, or set up from a folder (make wheelhouse); log: $log"
    fi
    tail -n 15 "$log" >&2
    die "$1 failed; the lines above end its log: $log"
}

# attempt LABEL COMMAND...: one line on the screen, everything else into the log. Sets `status`
# and returns 0: what is called in front of || or after `if` would run on after an error.
attempt() {
    local label=$1 start=$SECONDS
    shift
    printf '%s ... ' "$label"
    printf '\n== %s\n' "$label" >>"$log"
    section=$(wc -l <"$log")
    set +e
    (set -e && "$@") >>"$log" 2>&1
    status=$?
    set -e
    if [ "$status" = 0 ]; then echo "$((SECONDS - start)) s"; else echo failed; fi
}

# step LABEL COMMAND...: the same for what must not fail.
step() {
    attempt "$@"
    [ "$status" = 0 ] || failed "$1"
}
