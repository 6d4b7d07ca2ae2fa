# What every case uses: saying why it failed, notes for the report, waiting with a deadline, child processes by name.
#
# A case runs in a process of its own (lib/case) and in a process group of its own, which the runner kills as a whole afterwards:
# nothing a case starts can outlive it. Globals of a case: CASE, LOG (its log folder), RUN (short folder for sockets), PREFIX
# (of its network namespaces).

declare -A PID=()

# fail WHY: ends the case. The runner prints WHY. It is a file, as a failure may happen in a subshell; the first one counts.
fail() {
    blame "$*"
    exit 1
}

# blame WHY: a process that should live and does not is the likely cause of whatever was noticed.
blame() {
    [ ! -s "$LOG/why" ] || return 0
    local name dead=''
    for name in "${!PID[@]}"; do
        ! not_running "${PID[$name]}" || dead+="; $name has ended: $(tail -n 1 "$LOG/$name.log")"
    done
    echo "$*$dead" | tr '\n' ' ' >"$LOG/why"
    # While it is as it was.
    for name in "$RUN"/*.control; do
        [ ! -S "$name" ] || timeout 10 "$RINGFERRY" ctl --control "$name" show >"$LOG/$(basename "$name" .control).show" 2>&1 || true
    done
}

# note TEXT: a measured value worth a line in the report; never a reason to fail.
note() {
    echo "$*" >>"$LOG/notes"
}

# check WHAT COMMAND...: the command must succeed; what it said is in case.log.
check() {
    local what=$1
    shift
    echo "== $what: $*"
    "$@" || fail "$what"
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt "$deadline" ] || return 1
        sleep 0.05
    done
}

# spawn NAME COMMAND...: in the background, output to NAME.log, input from STDIN if set, process id in PID[NAME]. Dies with the case.
spawn() {
    local name=$1
    shift
    echo "-- $(date +%T.%N | cut -c1-12) $*" >>"$LOG/$name.log"
    setpriv --pdeathsig KILL "$@" >>"$LOG/$name.log" 2>&1 <"${STDIN:-/dev/null}" &
    PID[$name]=$!
}

# said NAME: what it printed since it was started last; those of one name share a log.
said() {
    local begin
    begin=$(grep -n '^-- [0-9][0-9]:' "$LOG/$1.log" | tail -n 1)
    tail -n "+${begin%%:*}" "$LOG/$1.log"
}

# False for a process that ended and was not waited for yet.
alive() {
    [ -n "${PID[$1]:-}" ] && ! not_running "${PID[$1]}"
}

# stop NAME [SECONDS]: SIGTERM, and the process must end in time. Sets STATUS to its exit code.
stop() {
    local name=$1 pid=${PID[$1]}
    kill -TERM "$pid" 2>/dev/null || true
    wait_for "${2:-5}" not_running "$pid" || { kill_hard "$name"; fail "$name did not end within ${2:-5} s of SIGTERM"; }
    STATUS=0
    wait "$pid" 2>/dev/null || STATUS=$?
    unset "PID[$name]"
}

# kill_hard NAME: SIGKILL, as a crash would.
kill_hard() {
    local pid=${PID[$1]}
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    unset "PID[$1]"
}

# True for a zombie too: it is the shell's child and waits to be reaped.
not_running() {
    local state
    state=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 0
    [ "${state%% *}" = Z ]
}

now_ms() {
    local now=${EPOCHREALTIME/[.,]/}
    echo $((now / 1000))
}
