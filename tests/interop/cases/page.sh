# The page of a running switch in a stock Chromium without a display.
#
#   namespace a: tap rf0 - switch ◄ ringferry page ◄ chromium
#   namespace b: tap rf0 - ringferry guest - vm0.sock ┘ (the switch's)

case_add page-chromium 300 page_chromium "Chromium shows the ports with their rates, a port in full with why it is slow, and when the switch has gone; foreign names get nothing" page_fetch

page_fetch() {
    ! command -v chromium >/dev/null || return 0
    echo "installing Chromium" >&2
    apt_update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >"$WORK/apt.log" 2>&1 ||
        die "apt-get install chromium failed, see $WORK/apt.log"
}

page_chromium() {
    netns_add a b
    rf_switch switch a "vhost-user:$RUN/vm0.sock" tap:rf0
    ns_up a rf0 1
    rf_start page a page --control "$RUN/switch.control" --listen 127.0.0.1:9483 --captures
    rf_start vm0 b guest --socket "$RUN/vm0.sock" --tap rf0 --address 10.9.0.2/24
    in_ns b ping -c 1 -W 5 10.9.0.1
    spawn ping ip netns exec "${PREFIX}b" ping -q -i 0.05 -s 1000 10.9.0.1

    browse overview "http://127.0.0.1:9483/"
    check "both ports are up" grep -q '2 ports, 2 up' "$LOG/overview.html"
    check "the picture has a link for vm0" grep -q '<a data-port="vm0" href="#vm0"' "$LOG/overview.html"
    check "packets of vm0 have a rate" rate_of vm0
    check "the worker is shown" grep -q 'worker 0: [0-9]* % busy' "$LOG/overview.html"
    check "nothing is wrong" grep -q 'id="trouble"[^>]*hidden' "$LOG/overview.html"
    check "no port is open" grep -q '<aside id="detail" hidden' "$LOG/overview.html"

    browse port "http://127.0.0.1:9483/#vm0"
    check "the port is open" grep -q '<h2 id="detail-name">vm0</h2>' "$LOG/port.html"
    check "its rings are shown" grep -q 'receiveq 0: [0-9]* of [0-9]* buffers posted' "$LOG/port.html"
    check "why was asked" grep -q 'measured over the last [0-9]* s' "$LOG/port.html"
    check "a capture is offered" grep -q 'href="capture?port=vm0"' "$LOG/port.html"
    check "the policy forbids nothing that the page does" page_is_silent
    browse_with picture "http://127.0.0.1:9483/#vm0" --screenshot="$LOG/page.png" --window-size=1000,1200
    check "a picture was made" [ "$(stat -c %s "$LOG/page.png")" -gt 10000 ]

    browse_with foreign "http://switch.example:9483/" --dump-dom --host-resolver-rules='MAP switch.example 127.0.0.1'
    check "a foreign name gets no page" grep -q 'this page is read by its address' "$LOG/foreign.html"

    in_ns a busybox wget -q -O "$LOG/capture.pcapng" "http://127.0.0.1:9483/capture?port=vm0&seconds=1"
    check "a capture is a pcapng file" [ "$(od -An -tx4 -N4 "$LOG/capture.pcapng" | tr -d ' ')" = 0a0d0d0a ]
    check "with the pings in it" [ "$(stat -c %s "$LOG/capture.pcapng")" -gt 5000 ]

    stop ping 5
    rf_stop vm0
    rf_stop switch
    browse gone "http://127.0.0.1:9483/"
    check "the page says that the switch has gone" grep -q 'no ringferry is running' "$LOG/gone.html"
    rf_stop page
}

# browse NAME ADDRESS: what the page has become after some seconds of its own time, in NAME.html.
browse() {
    browse_with "$1" "$2" --dump-dom
}

# browse_with NAME ADDRESS OPTION...: root has no sandbox for the browser. What it says of the page goes to NAME.log.
browse_with() {
    local name=$1 address=$2
    shift 2
    echo "== chromium $* $address"
    in_ns a timeout 60 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --user-data-dir="$RUN/chromium" \
        --enable-logging=stderr --virtual-time-budget=6000 "$@" "$address" >"$LOG/$name.html" 2>"$LOG/$name.log" || fail "chromium failed, see $name.log"
}

# rate_of PORT: whether its row says that packets come from it.
rate_of() {
    tr -d '\n' <"$LOG/overview.html" | grep -o "<tr data-port=\"$1\">.*" | sed 's/<\/tr>.*//' | grep -q '<td class="n">[1-9]'
}

# page_is_silent: no script has failed, and nothing was refused.
page_is_silent() {
    ! grep -h 'CONSOLE' "$LOG/overview.log" "$LOG/port.log"
}
