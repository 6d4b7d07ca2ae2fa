# about: `lab grants` in dom0: what a packet costs in calls, copies and mappings, which emulation does not change
# limit: 400
check "measure" ringferry lab grants --option provider=xen --option queues=1 --runs 1 --seconds 0.05 --no-plot \
    --filter '^direction=.* size=1496 queues=1 mode=(persistent|map|copy)$' --json /share/grants.json
[ "$(grants_in_use 0)" = 0 ] || fail "$(grants_in_use 0) pages of dom0 are still mapped"
# One line for each run of a row, of which a block has two: direction, mode, and per packet calls, copies, bytes copied, pages mapped and unmapped; pages kept.
tr -d ' \n' </share/grants.json | sed 's/{"name":"/\n&/g' | awk '
    function extra(name, run, values) {
        if (!match($0, "\"" name "\":\\[[^]]*")) return "none"
        return run <= split(substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4), values, ",") ? values[run] : "none"
    }
    function label(name) { return match($0, "\"" name "\":\"[^\"]*") ? substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4) : "none" }
    /"name":"direction=/ && !/"name":"[^"]*again=/ {
        for (run = 1; run <= 2; run++)
            print label("direction"), label("mode"), extra("calls/packet", run), extra("copies/packet", run), extra("copiedbytes/packet", run),
                extra("maps/packet", run), extra("unmaps/packet", run), extra("KiBmapped", run)
    }' >/tmp/rows
cat /tmp/rows
awk '
    { rows++; good = 0 }
    # Nothing but the processor, which copies once.
    $2 == "persistent" { good = $3 < 0.01 && $4 < 0.01 && $6 < 0.01 && $8 >= 256 }
    # A piece for each packet, sixteen to a call of the hypervisor at best.
    $2 == "copy" { good = $4 > 0.99 && $4 < 1.2 && $5 > 1480 && $5 < 1600 && $3 >= 1 / 16 && $3 <= 1 && $6 == 0 && $8 == 0 }
    # Two frames may lie in one page. What is mapped is unmapped again, and a burst takes a few calls, not one for each page.
    $2 == "map" { good = $4 < 0.01 && $6 > 0.45 && $6 < 1.1 && $7 > 0.9 * $6 && $7 < 1.1 * $6 && $3 > 0.05 && $3 < 0.5 && $8 == 0 }
    !good { bad = 1; print "not plausible: " $0 }
    END { exit bad || rows != 12 }' /tmp/rows || fail "$(awk 'END { print NR }' /tmp/rows) runs, of which not all are plausible: see case.log"
while read -r direction mode calls copies bytes maps unmaps kept; do
    note "$direction $mode: $calls calls, $copies copies of $bytes bytes, $maps pages mapped and $unmaps unmapped for a packet; $kept KiB kept"
done </tmp/rows
