# Live migration of a guest, by QEMU's own protocol (QMP).
#
# The guest has a name for each QEMU that it is in, all with the same digits (a2, b2: so one MAC address), and one shared folder,
# which it unmounts while it is migrated: QEMU migrates no guest that has one mounted. What it does meanwhile is a command of the
# agent's (`vm_away`), and the host tells it to come back through the network (`away_over`).

declare -A QMP=()

# vm_qmp NAME: the words for QEMU's control socket, for VM_OPTIONS of vm_start; made of two pipes, as bash has no sockets.
vm_qmp() {
    mkfifo "$RUN/$1.qmp.in" "$RUN/$1.qmp.out"
    echo "-chardev pipe,id=qmp,path=$RUN/$1.qmp -mon chardev=qmp,mode=control"
}

# qmp_open NAME: once QEMU runs.
qmp_open() {
    local in out
    exec {in}<>"$RUN/$1.qmp.in" {out}<>"$RUN/$1.qmp.out"
    QMP[$1]="$in $out"
    qmp "$1" '{"execute":"qmp_capabilities"}' >/dev/null
}

# qmp NAME JSON: prints what QEMU returns; fails if that is an error, which it prints.
qmp() {
    local in out line
    read -r in out <<<"${QMP[$1]}"
    echo "$2" >&"$in"
    while read -r -t 30 -u "$out" line; do
        case $line in
        '{"return"'*) jq -c .return <<<"$line" && return ;;
        '{"error"'*) jq -r .error.desc <<<"$line" && return 1 ;;
        esac
    done
    echo "$1 does not answer $2"
    return 1
}

# memory_of PROCESS: the file that is the guest's memory, where the process, a folder of /proc, is its QEMU.
memory_of() {
    local fd
    for fd in "$1/fd"/*; do
        [[ $(readlink "$fd") != /memfd:memory-backend-memfd* ]] || { echo "$fd"; return; }
    done
    return 1
}

# vm_twin NAME OTHER SOCKET [DEVICE_OPTIONS]: starts a QEMU that waits for the guest, as OTHER, and does not run it by itself.
vm_twin() {
    local name=$1 other=$2 socket=$3
    [ "$name" = "$other" ] || ln -sfn "$name.share" "$LOG/$other.share"
    rm -f "$RUN/$other".qmp.*
    VM_OPTIONS="$(vm_qmp "$other") -incoming unix:$RUN/$other.incoming -S" vm_start "$other" "$socket" ,reconnect=1 "${4:-}"
    wait_for 20 test -S "$RUN/$other.incoming" || fail "$other does not wait for the guest"
    qmp_open "$other"
}

migration_is() {
    local status
    status=$(qmp "$1" '{"execute":"query-migrate"}' | jq -r .status)
    [ "$status" = "$2" ] || { [ "$status" != failed ] || fail "migration of $1 has failed"; return 1; }
}

# vm_migrate NAME OTHER: moves the guest, compares the memory of both ends, and lets it run at the other.
vm_migrate() {
    local name=$1 other=$2
    qmp "$name" "{\"execute\":\"migrate\",\"arguments\":{\"uri\":\"unix:$RUN/$other.incoming\"}}" || fail "$name cannot be migrated"
    vm_arrive "$name" "$other"
}

# vm_arrive NAME OTHER: the rest of vm_migrate, once the migration is under way.
vm_arrive() {
    local name=$1 other=$2 info
    wait_for 60 migration_is "$name" completed || fail "$name does not get to $other: $(qmp "$name" '{"execute":"query-migrate"}')"
    wait_for 10 migration_is "$other" completed || fail "$other has not got all of $name"
    # Neither end runs now.
    memory_compare "$(memory_of "/proc/${PID[$name]}")" "$(memory_of "/proc/${PID[$other]}")"
    qmp "$other" '{"execute":"cont"}' || fail "$other does not run"
    info=$(qmp "$name" '{"execute":"query-migrate"}')
    echo "migrated $name to $other: $(jq -c '{"total-time", downtime, rounds: .ram["dirty-sync-count"]}' <<<"$info")"
    vm_leave "$name"
}

# What memory_flood fills its packets with.
FLOOD=ringferrypattern

# memory_flood NAMESPACE ADDRESS MAC: sends datagrams that memory_compare knows again, until the case ends. The address is nobody's, so
# the guest with that MAC drops them, and its processor touches no more of them than the first 128 bytes, which it copies.
memory_flood() {
    local head body
    printf -v head '%300s' ''
    printf -v body "$FLOOD%.0s" {1..60}
    in_ns "$1" ip neigh replace "$2" lladdr "$3" dev br0
    spawn flood ip netns exec "$PREFIX$1" bash -c "exec 3>/dev/udp/$2/9; while :; do printf %s '$head$body' >&3; sleep 0.002; done"
}

# memory_compare FROM TO: every packet that the switch wrote is there at the other end. Both are files, and neither end runs.
#
# Pages that the emulated processor writes most, such as kernel stacks and counters, do differ now and then, the more so on a busy host:
# QEMU notes a write just when the migration forgets it. Under libvirt, with two processors, it is 15 to 350 pages in every second
# migration, the kernel's clock among them, and one guest in ten panics then. So a page counts if packets in it are missing at the other end; any other is
# copied, as the guest would not survive without it.
memory_compare() {
    local from=$1 to=$2 page others=0
    for page in $({ cmp -l "$from" "$to" || true; } | awk '{ pages[int(($1 - 1) / 4096)] } END { for (page in pages) print page }'); do
        [ "$(page_packets "$from" "$page")" -le "$(page_packets "$to" "$page")" ] ||
            fail "page $page of the guest's memory holds a packet that was not migrated"
        dd if="$from" of="$to" bs=4096 skip="$page" seek="$page" count=1 conv=notrunc status=none
        others=$((others + 1))
    done
    [ "$others" = 0 ] || echo "$others pages that the emulated processor wrote were not migrated by QEMU"
}

page_packets() {
    dd if="$1" bs=4096 skip="$2" count=1 status=none | { grep -ao "$FLOOD" || true; } | wc -l
}

# vm_leave NAME: ends a QEMU whose guest is elsewhere.
vm_leave() {
    local in out
    kill_hard "$1"
    read -r in out <<<"${QMP[$1]}"
    exec {in}>&- {out}>&-
    rm -f "$RUN/$1.incoming"
    unset "QMP[$1]"
}

# vm_away NAME COMMAND...: the guest does this without its share; prints the number of the answer.
vm_away() {
    local name=$1 n
    shift
    n=$(guest_ask "$name" true)
    guest_answered_soon "$name" "$n"
    echo "$*" >"$LOG/$name.share/$n.new"
    mv "$LOG/$name.share/$n.new" "$LOG/$name.share/$n-.away"
    wait_for 10 test -f "$LOG/$name.share/$n-.taken" || fail "the guest's agent does not leave"
    echo "$n-"
}

guest_answered_soon() {
    wait_for 10 guest_answered "$1" "$2" || fail "$1 does not answer"
}

# away_serve NAMESPACE: where the guest looks whether it may come back.
away_serve() {
    mkdir -p "$RUN/www"
    spawn "httpd-$1" ip netns exec "$PREFIX$1" busybox httpd -f -p 7009 -h "$RUN/www"
}

# away_over NAME NUMBER: calls it back, and checks how it went; what it printed is NAME.away in the log folder.
away_over() {
    local name=$1 number=$2 code
    echo over >"$RUN/www/over"
    wait_for 60 test -f "$LOG/$name.share/$number.rc" || fail "the guest does not come back (see $name.console)"
    cp "$LOG/$name.share/$number.out" "$LOG/$name.away"
    read -r code <"$LOG/$name.share/$number.rc"
    [ "$code" = 0 ] || fail "what the guest did meanwhile failed: $(tail -n 1 "$LOG/$name.away")"
}
