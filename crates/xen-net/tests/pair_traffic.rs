//! Packets between our two halves, at every mix of their features: the payload is compared, and in
//! the end nothing is granted or mapped.

mod pair_support;

use pair_support::wire::{Frame, Sharing, Wire, raw, tcp};
use pair_support::{BACK, FRONT, ID, Provider, front_config, nodes, small_pair};
use ringferry_nic::map::MapError;
use ringferry_nic::tx::SendError;
use ringferry_packet::buffer::Chain;
use ringferry_packet::vnet::{GSO_UDP_L4, Header};
use ringferry_xen::store::path;
use ringferry_xen_net::netback::Refused;
use ringferry_xen_net::netfront::PairConfig;
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_net::xenbus::{BackConfig, FrontConfig, State};
use ringferry_xen_sim::fake::Op;

const PROVIDERS: [Provider; 2] = [Provider::Fake, Provider::Process];

fn wire(provider: Provider, sharing: Sharing) -> Wire {
    Wire::new(provider, sharing, front_config(), BackConfig::default())
}

/// Sends frames both ways and compares.
#[track_caller]
fn exchange(wire: &mut Wire, frames: &[Frame]) {
    for frame in frames {
        assert!(wire.send(0, frame), "{} bytes", frame.1.len());
        assert!(wire.taken(0) == [frame.clone()], "sent: {:?}, {} bytes", frame.0, frame.1.len());
        wire.pair(0).reclaim();
        wire.give(0, std::slice::from_ref(frame)).unwrap();
        assert!(wire.received(0) == [frame.clone()], "received: {:?}, {} bytes", frame.0, frame.1.len());
    }
}

#[test]
fn frames_of_all_sizes_cross_in_every_mode() {
    for provider in PROVIDERS {
        for sharing in Sharing::ALL {
            let mut wire = wire(provider, sharing);
            for round in 0..3 {
                let sizes = [14, 60, 63, 64, 65, 1514, 4095, 4096, 4097, 8192, 9014, 32768, 65534, 65535];
                let frames: Vec<_> = sizes.into_iter().map(|len| raw(len, len as u64 + round)).collect();
                exchange(&mut wire, &frames);
            }
            wire.end();
        }
    }
}

#[test]
fn offloads_survive_the_way_in_every_mode() {
    for provider in PROVIDERS {
        for sharing in Sharing::ALL {
            let mut wire = wire(provider, sharing);
            for v6 in [false, true] {
                let frames: Vec<_> =
                    [(80, 0), (1514, 0), (1600, 500), (9000, 1448), (65535, 1448), (65535, 8000)]
                        .into_iter()
                        .map(|(len, gso_size)| tcp(v6, len, gso_size, len as u64))
                        .collect();
                exchange(&mut wire, &frames);
            }
            wire.end();
        }
    }
}

#[test]
fn what_was_not_negotiated_is_not_sent() {
    let nothing = Accepts::default();
    let sg = Accepts { sg: true, ..nothing };
    let tcp4 = Accepts { sg: true, csum4: true, gso4: true, ..nothing };
    for (accepts, fits, unfit) in [
        (nothing, vec![raw(4096, 1)], vec![tcp(false, 100, 0, 1), tcp(false, 1600, 500, 1)]),
        (sg, vec![raw(4096, 1), raw(65535, 1)], vec![tcp(false, 100, 0, 1), tcp(true, 1600, 500, 1)]),
        (tcp4, vec![tcp(false, 9000, 1448, 1), tcp(false, 99, 0, 1)], vec![tcp(true, 9000, 1448, 1)]),
        (Accepts::ALL, vec![tcp(true, 9000, 1448, 1)], vec![udp_train()]),
    ] {
        let back = BackConfig { accepts, ..BackConfig::default() };
        let mut wire = Wire::new(Provider::Fake, Sharing::Persistent, front_config(), back);
        for frame in &fits {
            assert!(wire.send(0, frame));
            assert!(wire.taken(0) == [frame.clone()]);
        }
        for (header, frame) in &unfit {
            let pair = wire.pair(0);
            let mut chain = pair.pools.chain_of(frame).unwrap();
            chain.header = *header;
            let unsent = pair.transmit.send(chain, &mut pair.pools).unwrap_err();
            assert!(!unsent.reason.is_retryable(), "{header:?}");
            pair.transmit.give_up(unsent, &mut pair.pools);
        }
        assert_eq!(wire.pair(0).transmit.driver().counters().unfit, unfit.len() as u64);
        // The queue is none the worse.
        assert!(wire.send(0, &fits[0]));
        assert_eq!(wire.taken(0).len(), 1);
        wire.end();
    }
}

fn udp_train() -> Frame {
    let (header, frame) = tcp(false, 9000, 1448, 1);
    (Header { gso_type: GSO_UDP_L4, ..header }, frame)
}

#[test]
fn a_front_end_without_scatter_gather_gets_one_page_or_nothing() {
    let accepts = Accepts { sg: false, ..Accepts::ALL };
    for sharing in Sharing::ALL {
        let front = FrontConfig { accepts, ..front_config() };
        let back = BackConfig { accepts, ..BackConfig::default() };
        let mut wire = Wire::new(Provider::Fake, sharing, front, back);
        exchange(&mut wire, &[raw(4096, 1), raw(60, 2), tcp(true, 1514, 0, 3)]);
        assert_eq!(wire.give(0, &[raw(4097, 1)]), Err(Refused::TooBig));
        let pair = wire.pair(0);
        let chain = pair.pools.chain_of(&raw(4097, 1).1).unwrap();
        let unsent = pair.transmit.send(chain, &mut pair.pools).unwrap_err();
        assert_eq!(unsent.reason, SendError::Map(MapError::TooLong));
        pair.transmit.give_up(unsent, &mut pair.pools);
        wire.end();
    }
}

#[test]
fn persistent_and_static_grants_cost_no_call_once_they_are_warm() {
    for provider in PROVIDERS {
        for sharing in [Sharing::Persistent, Sharing::Static] {
            let mut wire = wire(provider, sharing);
            let frames: Vec<_> = (0..40).map(|i| raw([60, 1514, 20_000][i % 3], i as u64)).collect();
            let rounds = |wire: &mut Wire| (0..20).for_each(|_| exchange(wire, &frames));
            if sharing == Sharing::Persistent {
                rounds(&mut wire);
            }
            let before = wire.queues[0].queue.counters();
            rounds(&mut wire);
            let after = wire.queues[0].queue.counters();
            assert_eq!(
                (after.misses, after.copies, after.mapped),
                (before.misses, before.copies, before.mapped)
            );
            assert!(after.hits > before.hits + 1600, "{sharing:?}: {after:?}");
            wire.end();
        }
    }
}

/// The store may tell of a state when it has been seen already. To the front end it is then another back end in the same place,
/// perhaps: it is asked again, and refuses what it has.
#[test]
fn a_back_end_that_is_given_its_static_grants_again_keeps_them() {
    let mut wire = wire(Provider::Fake, Sharing::Static);
    let kept =
        |wire: &Wire| (wire.both.front.as_ref().unwrap().static_grants(), wire.queues[0].queue.mapped());
    let before = kept(&wire);
    assert!(before.0 > 0);
    let state = path::join(&nodes(ID).0, "state");
    for _ in 0..2 {
        wire.machine.write(&state, State::Connected.number().to_string());
        wire.answer_all();
        assert_eq!(kept(&wire), before);
    }
    exchange(&mut wire, &[raw(1514, 1)]);
    wire.end();
}

#[test]
fn rings_wrap_and_stay_in_order_with_bursts_both_ways() {
    for sharing in Sharing::ALL {
        let pair = PairConfig { small: 256, frames: 256, ..small_pair() };
        let front = FrontConfig { pair, ..front_config() };
        let mut wire = Wire::new(Provider::Fake, sharing, front, BackConfig::default());
        for burst in 0..12u64 {
            let frames: Vec<_> =
                (0..200u64).map(|i| raw([60, 130, 1514][i as usize % 3], burst * 1000 + i)).collect();
            for frame in &frames {
                assert!(wire.pair(0).send_frame(&frame.0, &frame.1));
            }
            wire.pair(0).transmit.flush();
            assert!(wire.taken(0) == frames);
            assert_eq!(wire.pair(0).reclaim(), 200);
            wire.give(0, &frames).unwrap();
            assert!(wire.received(0) == frames);
        }
        let stats = wire.pair(0).receive.stats();
        assert_eq!((stats.packets, stats.rx_length_errors, stats.unknown), (2400, 0, 0));
        assert_eq!(wire.pair(0).transmit.stats().unknown, 0);
        wire.end();
    }
}

#[test]
fn a_full_ring_takes_no_more_and_loses_nothing() {
    let mut wire = wire(Provider::Fake, Sharing::Persistent);
    // Four large buffers of sixteen slots each, then small ones until the ring is full.
    let mut sent = Vec::new();
    for i in 0.. {
        let frame = if i < 4 { raw(65535, i) } else { raw(60, i) };
        if !wire.send(0, &frame) {
            break;
        }
        sent.push(frame);
    }
    assert!(sent.len() > 60);
    assert!(wire.taken(0) == sent);
    assert_eq!(wire.pair(0).reclaim(), sent.len());
    // As many pages as are posted, and not one more.
    let frame = raw(4096, 9);
    let mut given = 0;
    while wire.give(0, std::slice::from_ref(&frame)).is_ok() {
        given += 1;
    }
    assert_eq!(given, 256);
    assert_eq!(wire.received(0).len(), 256);
    wire.end();
}

#[test]
fn packets_in_any_number_of_pieces_fit_their_slots() {
    let pair = PairConfig { small: 256, frames: 128, ..small_pair() };
    let front = FrontConfig { pair, ..front_config() };
    for provider in PROVIDERS {
        for sharing in Sharing::ALL {
            let mut wire = Wire::new(provider, sharing, front.clone(), BackConfig::default());
            // Exactly as many as there are slots, one more, and many more; in small buffers and in those for frames.
            for (pieces, each) in
                [(1, 190), (17, 150), (18, 180), (19, 180), (96, 190), (18, 1400), (19, 1400), (44, 1480)]
            {
                for gso_size in [0, 100] {
                    let (header, frame) = tcp(false, pieces * each, gso_size, pieces as u64);
                    let pair = wire.pair(0);
                    let mut chain = Chain::default();
                    chain.header = header;
                    for piece in frame.chunks(each) {
                        let mut buf = pair.pools.alloc(each).unwrap();
                        assert_eq!(buf.append(piece), each);
                        chain.push_back(buf);
                    }
                    assert!(pair.send(chain), "{pieces} pieces");
                    pair.transmit.flush();
                    assert!(wire.taken(0) == [(header, frame)], "{pieces} pieces of {each}");
                    assert_eq!(wire.pair(0).reclaim(), 1);
                }
            }
            assert_eq!(wire.pair(0).transmit.driver().counters(), Default::default());
            wire.end();
        }
    }
}

#[test]
fn a_received_packet_is_sent_on_from_the_page_it_lies_in() {
    for sharing in Sharing::ALL {
        let mut wire = wire(Provider::Fake, sharing);
        let frame = raw(20_000, 4);
        for _ in 0..50 {
            wire.give(0, std::slice::from_ref(&frame)).unwrap();
            let pair = wire.pair(0);
            let mut chains = Vec::new();
            pair.receive.receive(1, &mut pair.pools, |chain, _| chains.push(chain));
            assert!(pair.send(chains.pop().unwrap()));
            pair.transmit.flush();
            assert!(wire.taken(0) == [frame.clone()]);
            let pair = wire.pair(0);
            let (receive, pools) = (&mut pair.receive, &mut pair.pools);
            pair.transmit.reclaim_with(|chain| receive.recycle_chain(chain, pools));
            pair.refill();
        }
        let copied = wire.pair(0).transmit.stats().map.copied_bytes;
        assert_eq!(copied, 0);
        wire.end();
    }
}

#[test]
fn a_back_end_that_is_killed_loses_only_what_it_had_taken() {
    for provider in PROVIDERS {
        for sharing in [Sharing::Copy, Sharing::Persistent, Sharing::Static] {
            let mut wire = wire(provider, sharing);
            exchange(&mut wire, &[raw(60, 1), tcp(false, 30_000, 1448, 2)]);
            let waiting: Vec<_> = (0..10).map(|i| raw(1000, i)).collect();
            for frame in &waiting {
                assert!(wire.send(0, frame));
            }
            // Taken, and never answered.
            wire.queues[0].queue.poll(5, &mut wire.multicast);
            wire.queues.clear();
            wire.kill_back();
            wire.start_back();
            assert!(wire.taken(0) == waiting);
            assert_eq!(wire.pair(0).reclaim(), 10);
            exchange(&mut wire, &[raw(60, 3), tcp(true, 30_000, 1448, 4)]);
            assert_eq!(wire.both.connected, 1);
            wire.end();
        }
    }
}

#[test]
fn queues_do_not_mix() {
    let front = FrontConfig { queues: 3, ..front_config() };
    for provider in PROVIDERS {
        for sharing in Sharing::ALL {
            let mut wire = Wire::new(provider, sharing, front.clone(), BackConfig::default());
            for round in 0..30 {
                for queue in 0..3 {
                    let frame = raw(700, 10 * round + queue as u64);
                    assert!(wire.send(queue, &frame));
                    assert!(wire.taken(queue) == [frame.clone()]);
                    wire.pair(queue).reclaim();
                    wire.give(queue, std::slice::from_ref(&frame)).unwrap();
                }
                for queue in 0..3 {
                    assert!(wire.received(queue) == [raw(700, 10 * round + queue as u64)]);
                }
            }
            wire.end();
        }
    }
}

#[test]
fn pages_that_cannot_be_reached_cost_their_packets_and_nothing_else() {
    for sharing in [Sharing::Copy, Sharing::Map, Sharing::Persistent] {
        let mut wire = wire(Provider::Fake, sharing);
        let op = if sharing == Sharing::Map { Op::Map } else { Op::Copy };
        let mut arrived = 0;
        for i in 0..20 {
            if i % 4 == 0 {
                wire.machine.fake.fail(BACK, op, 1);
            }
            wire.send(0, &raw(9000, i));
            arrived += wire.taken(0).len();
            wire.pair(0).reclaim();
            wire.give(0, &[raw(9000, i)]).unwrap();
            for (_, frame) in wire.received(0) {
                assert!(frame == raw(9000, i).1);
            }
        }
        assert!(arrived < 20 || sharing == Sharing::Map, "{sharing:?}");
        assert_eq!(wire.pair(0).transmit.in_flight(), 0);
        assert_eq!(wire.pair(0).receive.posted(), 256);
        wire.end();
    }
}

/// A front end that sends events all the time (XSA-332), and a back end that does (XSA-391).
#[test]
fn xsa_332_xsa_391_a_storm_of_events_keeps_nobody() {
    let mut wire = wire(Provider::Fake, Sharing::Static);
    for domain in [FRONT, BACK] {
        wire.machine.fake.storm(domain, 1000);
        for i in 0..20 {
            exchange(&mut wire, &[raw(60, i)]);
            wire.both.step();
        }
    }
    wire.end();
}
