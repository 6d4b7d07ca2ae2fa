//! Whatever is asked or answered arrives as it was sent, and is one line.

use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use ringferry_control::channels::{Channels, QueueSteering, Stats, Steering};
use ringferry_control::explain::{Checksums, Cost, Explanation, Protocol, Segments, Traffic, Way};
use ringferry_control::snapshot::{
    CaptureSnapshot, FdbEntry, FdbLost, FdbRestless, FdbSnapshot, FrontEnd, GrantSnapshot, Negotiated,
    PairSnapshot, PortSnapshot, PortState, QueueRole, QueueSnapshot, Rates, SessionEnd, Snapshot,
    StallSnapshot, VifFeatures, WorkerLoad, WorkerSnapshot, XdpFeatures,
};
use ringferry_control::wire::{LateFrames, Lateness, Wire, WireChange, WireDirection, Wires};
use ringferry_control::{
    Answer, GuestSnapshot, Holds, Kept, PortAction, PortChange, PortRules, Reload, ReloadStep, Request,
    Response, RulesByKey, SettingChange, SettingsChange, WireStep,
};
use ringferry_packet::ether::Mac;
use ringferry_packet::flow::HashTypes;
use ringferry_packet::vnet::Offloads;
use ringferry_sys::tap::Offloads as TapOffloads;
use ringferry_virtio_net::Features;

/// Any text: line ends, quotes and what lies outside of ASCII among it.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9._-]{0,8}", any::<String>()]
}

fn counts() -> impl Strategy<Value = BTreeMap<String, u64>> {
    btree_map(text(), any::<u64>(), 0..4)
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        option::of(any::<usize>()).prop_map(|addresses| Request::Show { addresses }),
        Just(Request::Dump),
        (text(), any::<Option<u16>>()).prop_map(|(port, combined)| Request::Channels { port, combined }),
        text().prop_map(|port| Request::Steering { port }),
        (text(), any::<u16>(), any::<u16>(), any::<bool>())
            .prop_map(|(port, queue, worker, runtime)| Request::Assign { port, queue, worker, runtime }),
        (text(), any::<bool>()).prop_map(|(port, queues)| Request::Stats { port, queues }),
        text().prop_map(|port| Request::Explain { port }),
        (text(), any::<bool>()).prop_map(|(port, runtime)| Request::Add { port, runtime }),
        (text(), any::<bool>(), any::<Option<u16>>(), any::<bool>()).prop_map(
            |(port, if_exists, drain, runtime)| Request::Remove { port, if_exists, drain, runtime }
        ),
        any::<bool>().prop_map(|dry_run| Request::Reload { dry_run }),
        any::<u32>().prop_map(|format| Request::Replace { format }),
        option::of(text()).prop_map(|wire| Request::Wires { wire }),
        (text(), vec(text(), 0..4), option::of(text()), any::<bool>())
            .prop_map(|(wire, settings, from, runtime)| Request::SetWire { wire, settings, from, runtime }),
        (text(), option::of(text()), any::<bool>()).prop_map(|(wire, from, runtime)| Request::ResetWire {
            wire,
            from,
            runtime
        }),
        ([text(), text()], option::of(text()), vec(text(), 0..4), any::<bool>())
            .prop_map(|(ports, name, settings, runtime)| Request::AddWire { ports, name, settings, runtime }),
        (text(), any::<bool>()).prop_map(|(wire, runtime)| Request::RemoveWire { wire, runtime }),
        text().prop_map(|port| Request::Rules { port }),
        Just(Request::Firewalls),
        (text(), option::of(0..100usize))
            .prop_map(|(port, conversations)| Request::Firewall { port, conversations }),
        (text(), vec(text(), 0..4), any::<bool>()).prop_map(|(port, settings, runtime)| Request::Set {
            port,
            settings,
            runtime
        }),
        (text(), vec(text(), 0..4), any::<bool>()).prop_map(|(port, keys, runtime)| Request::Unset {
            port,
            keys,
            runtime
        }),
    ]
}

fn rules() -> impl Strategy<Value = RulesByKey> {
    let value = prop_oneof![
        any::<bool>().prop_map(serde_json::Value::from),
        any::<u32>().prop_map(serde_json::Value::from),
        text().prop_map(serde_json::Value::from),
        vec(text(), 0..3).prop_map(serde_json::Value::from),
    ];
    btree_map(text(), value, 0..4)
}

fn negotiated() -> impl Strategy<Value = Negotiated> {
    prop_oneof![
        any::<u64>().prop_map(|bits| Negotiated::VhostUser(Features::from_bits_retain(bits))),
        any::<u32>().prop_map(|bits| Negotiated::Tap(TapOffloads::from_bits_truncate(bits))),
        any::<u8>().prop_map(|bits| Negotiated::XenVif(VifFeatures::from_bits_truncate(bits))),
        any::<u8>().prop_map(|bits| Negotiated::Xdp(XdpFeatures::from_bits_truncate(bits))),
        ("[a-z]{3,5}-later", vec(text(), 0..3))
            .prop_map(|(kind, features)| Negotiated::Later { kind, features }),
    ]
}

fn queue() -> impl Strategy<Value = QueueSnapshot> {
    let grants = any::<[u64; 10]>().prop_map(
        |[
            hits,
            misses,
            mapped,
            evicted,
            failed,
            copies,
            copied_bytes,
            learned_pages,
            static_pages,
            max_pages,
        ]| {
            GrantSnapshot {
                hits,
                misses,
                mapped,
                evicted,
                failed,
                copies,
                copied_bytes,
                learned_pages,
                static_pages,
                max_pages,
            }
        },
    );
    (any::<[u16; 4]>(), any::<[bool; 2]>(), option::of(text()), option::of(grants)).prop_map(
        |([index, size, last_avail, last_used], [enabled, started], broken, grants)| QueueSnapshot {
            index,
            role: QueueRole::of(index),
            size,
            enabled,
            started,
            broken,
            last_avail,
            last_used,
            available: enabled.then_some(last_used),
            stalled: started.then_some(StallSnapshot { entries: size, seconds: last_used.into() }),
            grants,
        },
    )
}

fn port() -> impl Strategy<Value = PortSnapshot> {
    let state = prop::sample::select(vec![
        PortState::Up,
        PortState::Listening,
        PortState::Connecting,
        PortState::Down,
        PortState::NoMemory,
        PortState::Broken,
    ]);
    (
        text(),
        negotiated(),
        state,
        option::of(text()),
        text(),
        any::<u16>(),
        option::of(any::<[u8; 6]>().prop_map(Mac)),
        vec(queue(), 0..3),
        counts(),
        counts(),
        rules(),
    )
        .prop_map(|(name, negotiated, state, fault, peer, mtu, mac, queues, counters, drops, rules)| {
            let eighth = |(name, count): (&String, &u64)| (name.clone(), (*count % 9_000_000) as f64 / 8.0);
            let rates = vec![Rates {
                window: 10,
                seconds: 10.25,
                counters: counters.iter().map(eighth).collect(),
                drops: drops.iter().map(eighth).collect(),
            }];
            let pairs =
                vec![PairSnapshot { pair: mtu, worker: 3, counters: counters.clone(), rates: rates.clone() }];
            PortSnapshot {
                name,
                negotiated,
                state,
                fault,
                peer,
                mtu,
                mac,
                queues,
                counters,
                drops,
                rules,
                pairs,
                another_waits: mtu.is_multiple_of(2),
                ended: mtu
                    .is_multiple_of(3)
                    .then(|| SessionEnd { why: "it lies".to_owned(), seconds: mtu.into() }),
                stopped_seconds: mtu.is_multiple_of(5).then_some(mtu.into()),
                front_end: mtu.is_multiple_of(7).then(|| FrontEnd {
                    pid: mtu.is_multiple_of(2).then_some(mtu.into()),
                    user: mtu.into(),
                    heard: mtu.is_multiple_of(3),
                    mapped_bytes: mtu.into(),
                }),
                rates,
            }
        })
}

fn snapshot() -> impl Strategy<Value = Snapshot> {
    let entry = (any::<u16>(), any::<[u8; 6]>(), text(), any::<u32>(), any::<bool>()).prop_map(
        |(vlan, mac, port, age_seconds, fixed)| FdbEntry { vlan, mac: Mac(mac), port, age_seconds, fixed },
    );
    let fdb = (any::<usize>(), vec(entry, 0..4), counts()).prop_map(|(capacity, entries, counters)| {
        let moved = |entry: &FdbEntry| FdbRestless {
            vlan: entry.vlan,
            mac: entry.mac,
            ports: vec![entry.port.clone()],
            moves: entry.age_seconds,
            seconds: entry.vlan.into(),
        };
        let lost = |entry: &FdbEntry| FdbLost {
            vlan: entry.vlan,
            mac: entry.mac,
            from: entry.port.clone(),
            to: entry.port.clone(),
            seconds: entry.age_seconds,
        };
        FdbSnapshot {
            restless: entries.iter().map(moved).collect(),
            lost: entries.iter().map(lost).collect(),
            capacity,
            behind: counters.clone(),
            entries,
            counters,
        }
    });
    // In quarters, which a binary number holds exactly.
    let worker =
        (any::<[u64; 4]>(), 0..400u16).prop_map(|([polls, busy_polls, sleeps, wakeups], quarters)| {
            let busy_percent = f64::from(quarters) / 4.0;
            let load = WorkerLoad {
                window: 1,
                seconds: 1.5,
                busy_percent,
                polling_percent: 0.25,
                run_delay_percent: busy_percent,
                wakeups: 2.5,
                ports: [("vm0".to_owned(), busy_percent)].into(),
                ..WorkerLoad::default()
            };
            let (bursts, rounds) = (vec![polls, 0], vec![sleeps]);
            let (busy_nanoseconds, polling_nanoseconds) = (polls, wakeups);
            WorkerSnapshot {
                polls,
                busy_polls,
                sleeps,
                wakeups,
                sleep_nanoseconds: wakeups.is_multiple_of(2).then_some(wakeups),
                busy_percent,
                busy_nanoseconds,
                polling_nanoseconds,
                run_delay_nanoseconds: sleeps,
                bursts,
                rounds,
                load: vec![load],
            }
        });
    (any::<[u32; 2]>(), any::<u64>(), vec(port(), 0..3), fdb, vec(worker, 0..3)).prop_map(
        |([version, pid], uptime_seconds, ports, fdb, workers)| Snapshot {
            version,
            pid,
            uptime_seconds,
            clock_nanoseconds: uptime_seconds.rotate_left(7),
            ports,
            fdb,
            workers,
            program: pid.to_string(),
            process_seconds: pid.is_multiple_of(2).then_some(uptime_seconds),
            captures: vec![CaptureSnapshot { number: pid, pid: Some(version), ..CaptureSnapshot::default() }],
            mirrors: Vec::new(),
            wires: Vec::new(),
            troubles: vec![String::new()],
        },
    )
}

fn channels() -> impl Strategy<Value = Channels> {
    (text(), any::<[u16; 3]>()).prop_map(|(port, [max_combined, combined, started])| Channels {
        port,
        max_combined,
        combined,
        started,
    })
}

fn steering() -> impl Strategy<Value = Steering> {
    let queue = (any::<u16>(), any::<bool>(), any::<Option<usize>>(), any::<Option<u16>>())
        .prop_map(|(queue, enabled, cpu, worker)| QueueSteering { queue, enabled, cpu, worker });
    let kept = (any::<bool>(), text()).prop_map(|(persistent, note)| Kept { persistent, note });
    (text(), text(), any::<u32>(), vec(queue, 0..3), option::of(kept)).prop_map(
        |(port, by, bits, queues, kept)| Steering {
            port,
            by,
            hash_types: HashTypes::from_bits_truncate(bits),
            queues,
            kept,
        },
    )
}

fn stats() -> impl Strategy<Value = Stats> {
    (text(), counts()).prop_map(|(port, counters)| Stats { port, counters })
}

fn explanation() -> impl Strategy<Value = Explanation> {
    let traffic = (
        prop::sample::select(vec![Protocol::Tcp4, Protocol::Tcp6, Protocol::Udp]),
        prop::sample::select(vec![Segments::Unsegmented, Segments::Cut, Segments::Merged, Segments::Single]),
        prop::sample::select(vec![
            Checksums::LeftOut,
            Checksums::Computed,
            Checksums::Verified,
            Checksums::Untouched,
        ]),
        prop::sample::select(vec![Cost::Nothing, Cost::Headers, Cost::Packets, Cost::Bytes]),
        text(),
    )
        .prop_map(|(kind, segments, checksums, cost, text)| Traffic {
            kind,
            segments,
            checksums,
            cost,
            text,
        });
    let way = (text(), text(), vec(traffic, 0..3), vec(text(), 0..2), vec(text(), 0..2))
        .prop_map(|(from, to, traffic, notes, hints)| Way { from, to, traffic, notes, hints });
    (text(), any::<[u8; 2]>(), any::<u16>(), vec(way, 0..3)).prop_map(|(port, [takes, sends], mtu, ways)| {
        Explanation {
            port,
            takes: Offloads::from_bits_truncate(takes),
            sends: Offloads::from_bits_truncate(sends),
            mtu,
            ways,
        }
    })
}

fn wire() -> impl Strategy<Value = Wire> {
    let bucket = (any::<Option<u64>>(), any::<u64>())
        .prop_map(|(at_most_microseconds, frames)| LateFrames { at_most_microseconds, frames });
    let late = (vec(bucket, 0..3), any::<u64>())
        .prop_map(|(buckets, max_microseconds)| Lateness { buckets, max_microseconds });
    let state = option::of(prop::sample::select(PortState::ALL.to_vec()));
    let way = ([text(), text()], any::<bool>(), state, rules(), any::<[u64; 8]>(), late).prop_map(
        |([from, to], joined, to_state, impairments, counts, late)| {
            let [passed, lost, no_room, duplicated, reordered, corrupted, waiting, waiting_bytes] = counts;
            WireDirection {
                from,
                to,
                joined,
                to_state,
                impairments,
                passed,
                lost,
                no_room,
                duplicated,
                reordered,
                corrupted,
                waiting,
                waiting_bytes,
                late,
            }
        },
    );
    (text(), any::<u64>(), any::<bool>(), vec(way, 0..3))
        .prop_map(|(name, seed, seed_is_set, directions)| Wire { name, seed, seed_is_set, directions })
}

fn port_action() -> impl Strategy<Value = PortAction> {
    prop::sample::select(vec![
        PortAction::Added,
        PortAction::Removed,
        PortAction::Changed,
        PortAction::Replaced,
        PortAction::Nothing,
    ])
}

fn answer() -> impl Strategy<Value = Answer> {
    let guest = (
        (any::<[u32; 2]>(), any::<u64>(), text(), text()),
        (any::<bool>(), any::<u64>(), channels(), steering(), stats()),
    )
        .prop_map(
            |(([version, pid], uptime_seconds, port, peer), (up, features, channels, steering, stats))| {
                GuestSnapshot {
                    version,
                    pid,
                    uptime_seconds,
                    port,
                    peer,
                    up,
                    features: Features::from_bits_retain(features),
                    channels,
                    steering,
                    stats,
                }
            },
        );
    let holds = prop::sample::select(vec![Holds::AtOnce, Holds::NextConnection, Holds::Kept]);
    let setting = (text(), option::of(any::<u16>()), holds).prop_map(|(key, value, holds)| SettingChange {
        key,
        value: value.map(Into::into),
        holds,
    });
    let notes = || vec(text(), 0..3);
    let change = (text(), rules(), vec(setting, 0..3), any::<bool>(), text(), notes()).prop_map(
        |(port, rules, settings, persistent, note, notes)| SettingsChange {
            port,
            rules,
            settings,
            persistent,
            note,
            notes,
        },
    );
    let port_change = (text(), port_action(), any::<bool>(), text(), notes())
        .prop_map(|(port, done, persistent, note, notes)| PortChange { port, done, persistent, note, notes });
    let step = (text(), port_action(), text(), option::of(text()))
        .prop_map(|(port, action, what, error)| ReloadStep { port, action, what, error });
    let wire_step =
        (text(), port_action(), text()).prop_map(|(wire, action, what)| WireStep { wire, action, what });
    let steps = (vec(step, 0..3), vec(wire_step, 0..3));
    let reload = (text(), any::<bool>(), steps, [notes(), notes(), notes(), notes()]).prop_map(
        |(file, dry_run, (steps, wires), [restart, faults, beside, notes])| Reload {
            file,
            dry_run,
            steps,
            wires,
            restart,
            faults,
            beside,
            notes,
        },
    );
    prop_oneof![
        snapshot().prop_map(|snapshot| Answer::Show(Box::new(snapshot))),
        guest.prop_map(|guest| Answer::Guest(Box::new(guest))),
        text().prop_map(Answer::Dump),
        channels().prop_map(Answer::Channels),
        steering().prop_map(Answer::Steering),
        stats().prop_map(Answer::Stats),
        explanation().prop_map(Answer::Explain),
        (text(), rules()).prop_map(|(port, rules)| Answer::Rules(PortRules { port, rules })),
        change.prop_map(Answer::SettingsChanged),
        port_change.prop_map(Answer::PortChanged),
        reload.prop_map(Answer::Reloaded),
        vec(wire(), 0..3).prop_map(|wires| Answer::Wires(Wires { wires })),
        (wire(), any::<bool>(), any::<bool>(), text()).prop_map(|(wire, removed, persistent, note)| {
            Answer::WireChanged(Box::new(WireChange { wire, removed, persistent, note }))
        }),
        any::<(u32, u32)>().prop_map(|(format, pid)| Answer::Replacing { format, pid }),
    ]
}

proptest! {
    #[test]
    fn requests_arrive_as_they_were_sent(request in request()) {
        let line = serde_json::to_string(&request).unwrap();
        prop_assert!(!line.contains('\n'), "{line}");
        prop_assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request);
    }

    #[test]
    fn answers_arrive_as_they_were_sent(answer in answer()) {
        let response = Response::Ok(answer);
        let line = serde_json::to_string(&response).unwrap();
        prop_assert!(!line.contains('\n'), "{line}");
        prop_assert_eq!(serde_json::from_str::<Response>(&line).unwrap(), response);
    }

    #[test]
    fn refusals_arrive_as_they_were_sent(why in text()) {
        let line = serde_json::to_string(&Response::Error(why.clone())).unwrap();
        prop_assert!(!line.contains('\n'), "{line}");
        prop_assert_eq!(serde_json::from_str::<Response>(&line).unwrap(), Response::Error(why));
    }
}
