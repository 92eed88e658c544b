#!/usr/bin/env bash
# Model-checks protocol.pml: the protocol as it is has to hold in every size, and every broken variant has to be found.
# One line per run; ends with 1 when a run is not as expected. --quick leaves out the two long runs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
quick=${1:-}
if [ -n "$quick" ] && [ "$quick" != --quick ]; then
    echo "unknown option $quick: there is only --quick" >&2
    exit 2
fi

for tool in spin gcc; do
    if ! command -v "$tool" >/dev/null; then
        echo "$tool is missing. On Debian and Ubuntu: sudo apt-get install spin gcc; elsewhere see https://spinroot.com" >&2
        exit 2
    fi
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
printf '%-9s %-52s %10s %6s %6s  %s\n' expected run states depth sec verdict

in_words() {
    case $1 in
        'invalid end state') echo "deadlock" ;;
        *'sum=='*) echo "a microbatch is missing or in twice" ;;
        *'tag['*) echo "different rounds in one reduction" ;;
        *'call['*) echo "ranks in different calls" ;;
        *'session_alive!='*) echo "a no although nobody was lost" ;;
        *'decision['*) echo "different decisions" ;;
        *'commits['*) echo "different commits" ;;
        *'saved'*) echo "gone on without the save" ;;
        *'working'*) echo "two replicas save at a time" ;;
        *'wgen<'*) echo "repairs without end" ;;
        *) echo "$1" ;;
    esac
}

# check holds|found NAME [--loops] DEFINES...
check() {
    local expected=$1 name=$2 safety=-DSAFETY search=() verdict
    shift 2
    if [ "$1" = --loops ]; then safety=-DNP search=(-l) && shift; fi
    rm -rf "$work"/* && cd "$work" || exit 2
    if ! spin -a "$@" "$here/protocol.pml" >spin.log 2>&1 ||
        ! gcc -w -O2 "$safety" -DCOLLAPSE -DVECTORSZ=1024 -DMEMLIM=6000 -o pan pan.c >gcc.log 2>&1; then
        cat spin.log gcc.log >&2
        exit 2
    fi
    ./pan -m1000000 -w24 "${search[@]}" >log 2>&1
    local states depth seconds
    states=$(awk '/states, stored/ {print $1; exit}' log)
    depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' log)
    seconds=$(sed -n 's/.*elapsed time \([0-9.]*\).*/\1/p' log)
    if grep -q '^pan:1:' log; then
        verdict="found: $(in_words "$(sed -n 's/^pan:1: \(.*\) (at depth.*/\1/p' log)")"
    elif grep -q 'errors: 0' log && ! grep -Eq 'Search not completed|max search depth too small|out of memory' log; then
        verdict=holds
    else
        verdict="not completed: $(grep -E '^pan|error' log | head -1)"
    fi
    case $verdict in
        "$expected"*) ;;
        *) verdict="NOT AS EXPECTED, $verdict" bad=1 ;;
    esac
    printf '%-9s %-52s %10s %6s %6s  %s\n' "$expected" "$name" "${states:-?}" "${depth:-?}" "${seconds:-?}" "$verdict"
}

small="-DR=3 -DS=1 -DG=4 -DIT=2 -DF=1"
pairs="-DR=2 -DS=2 -DG=3 -DF=1"

# shellcheck disable=SC2086  # lists of defines
{
    check holds "3 replicas x 1, no failure" -DR=3 -DS=1 -DG=4 -DIT=2 -DF=0
    check holds "3 replicas x 1, 1 failure" $small
    check holds "3 replicas x 1, 1 failure, 2 buckets" $small -DNB=2
    check holds "3 replicas x 1, 1 failure, ranks leave one by one" $small -DCLOSING
    check holds "3 replicas x 1, 1 failure: no endless run" --loops $small
    check holds "2 replicas x 2, 1 failure, 1 iteration" $pairs -DIT=1
    if [ "$quick" != --quick ]; then
        check holds "3 replicas x 1, 2 failures" -DR=3 -DS=1 -DG=4 -DIT=2 -DF=2
        check holds "2 replicas x 2, 1 failure, 2 iterations" $pairs -DIT=2
    fi
    check holds "one guard of two: a stale operation counts as done" $small -DGUARD_GONE_OFF
    check holds "one guard of two: a stale yes counts" $small -DGUARD_VOTE_OFF
    check found "both guards off" $small -DGUARD_GONE_OFF -DGUARD_VOTE_OFF
    check found "stale operations are carried out" $small -DBUG_STALE_OPERATIONS
    check found "plan from what the engine knows" $small -DBUG_PLAN_FROM_ENGINE
    check found "leader from what the engine knows" $small -DBUG_LEADER_FROM_ENGINE
    check found "commit without the agreement" $small -DBUG_COMMIT_WITHOUT_AGREEMENT
    check found "no running bit in the agreement" $small -DBUG_NO_RUNNING_BIT
    check found "repair at once, not after the next agreement" $small -DBUG_REPAIR_AT_ONCE
    check found "no revocation" $small -DBUG_NO_REVOKE
    check found "gradients reduced in place" $small -DBUG_IN_PLACE
    check found "the leader's work is not repeated" $small -DBUG_NO_TAKEOVER
    check found "an orphan stays" $pairs -DIT=1 -DBUG_ORPHAN_STAYS
    check found "MPI: an agreement that is not uniform" $small -DMPI_AGREE_NOT_UNIFORM
    check found "MPI: a shrink that is not uniform" $small -DMPI_SHRINK_NOT_UNIFORM
}
exit $bad
