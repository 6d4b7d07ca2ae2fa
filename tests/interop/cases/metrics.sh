# Counters of a running switch in a stock Prometheus, which asks for OpenMetrics and stores what it parses.
#
#   namespace a: tap rf0 - switch ◄ ringferry metrics ◄ prometheus, with contrib's alerts
#   namespace b: tap rf0 - ringferry guest - vm0.sock ┘ (the switch's)

case_add metrics-prometheus 90 metrics_prometheus "a stock Prometheus scrapes a switch, also while it is replaced, and an alert is raised for a port that is down" prometheus_fetch

# Unpacked, as the package would start a Prometheus for the whole machine.
prometheus_fetch() {
    local tree=$WORK/prometheus
    [ ! -x "$tree/usr/bin/prometheus" ] || return 0
    echo "fetching Prometheus" >&2
    apt_update
    rm -rf "$tree"
    mkdir -p "$tree"
    (cd "$tree" && apt-get -qq -o APT::Sandbox::User=root download prometheus) || die "apt-get download prometheus failed"
    dpkg-deb --fsys-tarfile "$tree"/prometheus_*.deb | tar -x -C "$tree" ./usr/bin
    rm "$tree"/prometheus_*.deb
}

metrics_prometheus() {
    local before
    netns_add a b
    rf_switch switch a "vhost-user:$RUN/vm0.sock" tap:rf0
    ns_up a rf0 1
    rf_start metrics a metrics --control "$RUN/switch.control" --listen 127.0.0.1:9482 --queues
    cat >"$RUN/prometheus.yml" <<YAML
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$(realpath "$HERE/../../contrib/prometheus/ringferry.rules.yml")"]
scrape_configs: [{job_name: ringferry, static_configs: [{targets: ["127.0.0.1:9482"]}]}]
YAML
    spawn prometheus ip netns exec "${PREFIX}a" "$WORK/prometheus/usr/bin/prometheus" --config.file="$RUN/prometheus.yml" --storage.tsdb.path="$RUN/prometheus" \
        --web.listen-address=127.0.0.1:9090
    wait_for 30 stored 'up{job="ringferry"} == 1' || fail "no scrape succeeds"
    wait_for 10 stored 'ALERTS{alertname="RingferryPortDown", port="vm0"}' || fail "no alert for a port without a guest"
    rf_start vm0 b guest --socket "$RUN/vm0.sock" --tap rf0 --address 10.9.0.2/24
    traffic_server ns:a
    traffic_check ns:b 10.9.0.1 1 tcp-both
    wait_for 10 stored 'ringferry_port_up{port="vm0"} == 1' || fail "the port is not up in Prometheus"
    wait_for 10 stored 'ringferry_port_rx_packets_total{port="vm0"} > 100' || fail "the guest's packets are not in Prometheus"
    check "queue pairs, too" stored 'ringferry_queue_rx_packets_total{port="vm0", pair="0"} > 100'
    before=$(rf_ctl switch show --json | jq '.ports[] | select(.name == "vm0") | .counters.rx_packets')
    rf_replace switch a
    traffic_check ns:b 10.9.0.1 1 tcp-both
    wait_for 10 stored "ringferry_port_rx_packets_total{port=\"vm0\"} > $before" || fail "the packets since the replacement are not in Prometheus"
    check "no counter began anew" stored 'resets(ringferry_port_rx_packets_total{port="vm0"}[1m]) == 0'
    rf_stop metrics
    rf_stop vm0
    rf_stop switch
    stop prometheus 10
}

# stored EXPRESSION: whether it has a result.
stored() {
    in_ns a "$WORK/prometheus/usr/bin/promtool" query instant http://127.0.0.1:9090 "$1" | grep -q '=>'
}
