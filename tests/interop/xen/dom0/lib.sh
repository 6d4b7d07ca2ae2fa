# What a case uses, in dom0. A command that fails ends the case; the last line says why.

uptime_of() {
    cut -d' ' -f1 /proc/uptime
}

# step TEXT: for the log.
step() {
    echo "== $(uptime_of) $*"
}

# fail WHY: ends the case.
fail() {
    echo "$*" >/share/why
    exit 1
}

# note TEXT: a line in the report.
note() {
    echo "$*" >>/share/notes
}

# check WHAT COMMAND...: the command must succeed.
check() {
    what=$1
    shift
    step "$what: $*"
    "$@" || fail "$what"
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    tries=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.1
    done
}

# domu_create NAME [VIF] [KERNEL_ARGUMENTS]: makes a domain and waits until its agent answers. VIF as in xl.cfg; by default none.
domu_create() {
    step "create $1"
    {
        echo "name='$1'"
        echo "type='${TYPE:-pv}'"
        echo "kernel='/boot/vmlinux'"
        echo "ramdisk='/boot/domu'"
        echo "extra='console=hvc0 quiet loglevel=4 net.ifnames=0 ${3:-}'"
        echo "memory=${MEMORY:-192}"
        echo "vcpus=${VCPUS:-1}"
        echo "vif=[${2:+'$2'}]"
        echo "on_crash='destroy'"
        echo "on_reboot='destroy'"
    } >"/tmp/$1.cfg"
    xl create -q "/tmp/$1.cfg" || fail "xl create $1"
    wait_for 60 xenstore-exists "/local/domain/$(domu_id "$1")/data/ready" || fail "$1 did not come up"
    step "$1 is up"
}

domu_id() {
    xl domid "$1"
}

# domu NAME SECONDS COMMAND...: runs it in the domain's shell, prints the end of what it printed, returns its exit code.
domu() {
    node=/local/domain/$(domu_id "$1")/data
    limit=$2
    shift 2
    number=$(($(xenstore-read "$node/number") + 1))
    xenstore-write "$node/command" "$*" "$node/number" "$number"
    wait_for "$limit" domu_answered "$node" "$number" || { echo "no answer within $limit s: $*"; return 124; }
    xenstore-read -R "$node/output"
    return "$(xenstore-read "$node/code")"
}

domu_answered() {
    [ "$(xenstore-read "$1/answered")" = "$2" ]
}

# domu_start NAME COMMAND...: as above, in the background of the domain; its output is /tmp/background there.
domu_start() {
    name=$1
    shift
    domu "$name" 10 "($*) >/tmp/background 2>&1 </dev/null & echo \$! >/tmp/background.pid"
}

# domu_servers NAME: what traffic is sent to: 5201 is iperf3, 5210 `ringferry traffic`.
domu_servers() {
    domu "$1" 10 "(iperf3 -s & exec ringferry traffic server) >/tmp/servers 2>&1 </dev/null &"
}

# domu_netfront NAME [ARGUMENTS...]: our front end in a domain that has none, with 10.9.0.2 on its tap; waits until it answers.
domu_netfront() {
    name=$1
    shift
    domu_start "$name" "exec ringferry netfront --tap xn0 --address 10.9.0.2/24 --json $*"
    check "first ping" wait_for 40 ping -n -q -c 1 -W 1 10.9.0.2 || fail "$(domu "$name" 10 'tail -n 1 /tmp/background')"
}

# domu_netfront_end NAME: closes it; prints what it counted. It must have let go of everything, and so must its back end.
domu_netfront_end() {
    domu "$1" 20 'p=$(cat /tmp/background.pid); kill $p; while [ -d /proc/$p ]; do sleep 0.1; done; cat /tmp/background' &&
        domu "$1" 10 'grep -q "left_mapped.: 0" /tmp/background' || fail "our netfront does not end as it should"
    [ "$(grants_in_use "$(domu_id "$1")")" = 0 ] || fail "$(grants_in_use "$(domu_id "$1")") pages of $1 are still mapped"
}

# domu_gone NAME: nothing keeps the destroyed domain alive: no page of it is mapped.
domu_gone() {
    check "nothing keeps $1 alive" wait_for 10 sh -c "! xl list | grep -q -e '^$1 ' -e null"
}

domu_destroy() {
    step "destroy $1"
    xl destroy "$1" || fail "xl destroy $1"
}

# vif_create CLASS DOMAIN: an interface, number 0, as xl would make it, of a class that neither xl nor the kernel knows.
vif_create() {
    back=/local/domain/0/backend/$1/$2/0
    front=/local/domain/$2/device/$1/0
    for node in "$back" "$front"; do
        xenstore-write "$node/handle" 0 "$node/mac" 00:16:3e:00:00:01 "$node/state" 1
    done
    xenstore-write "$front/backend" "$back" "$front/backend-id" 0
    xenstore-chmod -r "$front" "n$2" r0
    xenstore-write "$back/frontend-id" "$2" "$back/online" 1 "$back/frontend" "$front"
    xenstore-chmod -r "$back" n0 "r$2"
}

# vif_remove CLASS DOMAIN: takes it away again.
vif_remove() {
    xenstore-rm "/local/domain/0/backend/$1/$2"
    xenstore-rm "/local/domain/$2/device/$1/0"
    wait_for 10 sh -c "! ringferry ctl --control /tmp/netback.sock stats xen$2.0" || fail "the port xen$2.0 stays"
}

# netback_start [KEYS [ARGUMENTS...]]: our netback for all guests, with a tap on its other side that has 10.9.0.1; KEYS are of the
# port, as ",queues=2". Its process is $netback, its log /share/netback.log. The tap outlives it.
netback_start() {
    if ! [ -e /sys/class/net/rf0 ]; then
        modprobe tun
        case $* in *--workers*) queues=multi_queue ;; *) queues='' ;; esac
        ip tuntap add rf0 mode tap $queues
        ip addr add 10.9.0.1/24 dev rf0
        ip link set rf0 up
    fi
    rm -f /tmp/netback.ready
    step "ringferry run $*"
    keys=${1:-}
    [ $# = 0 ] || shift
    ringferry run --port "xen-vif:xen$keys" --port tap:rf0,existing=yes --control /tmp/netback.sock "$@" --ready-fd 3 \
        3>/tmp/netback.ready >>/share/netback.log 2>&1 &
    netback=$!
    wait_for 20 grep -q READY /tmp/netback.ready || fail "our netback does not start: $(tail -n 1 /share/netback.log)"
}

# netback_end SIGNAL: ends it, and looks whether it left pages mapped of the domains whose numbers follow.
netback_end() {
    step "netback: SIG$1"
    kill "-$1" "$netback"
    if [ "$1" = KILL ]; then
        wait "$netback" || true
    else
        wait "$netback" || fail "our netback ended with $?"
    fi
    shift
    for id; do
        [ "$(grants_in_use "$id")" = 0 ] || fail "our netback is gone, and $(grants_in_use "$id") pages of domain $id are still mapped"
    done
}

# counter PORT NAME: what our netback has counted; nothing if it does not know that.
counter() {
    ringferry ctl --control /tmp/netback.sock stats "$1" --queues | sed -n "s/^ *$2: *//p"
}

# traffic ADDRESS MODE...: two seconds of each between here and `ringferry traffic server` there. Every byte is checked there.
traffic() {
    to=$1
    shift
    for how; do
        check "$how, every byte checked" timeout 30 ringferry traffic client --to "$to" --wait 10 --seconds 2 --mode "$how" \
            ${RATE:+--rate $RATE}
    done
}

# grants_in_use DOMAIN: how many of its pages others have mapped, by Xen's own count, without those that every domain has: the
# store's and the console's.
grants_in_use() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    xl dmesg | awk -v domain="d$1" '
        /grant-table for remote/ { of = $0; sub(/.*remote */, "", of); sub(/[^d0-9].*/, "", of); known += of == domain }
        /^\(XEN\) \[0x/ && of == domain && $2 != "[0x000]" && $2 != "[0x001]" { count++ }
        END { print known ? count + 0 : "nobody knows how many" }'
}
