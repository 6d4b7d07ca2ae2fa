//! The back end against domains that are Linux processes: pages are really mapped and copied by the
//! kernel.

use ringferry_packet::vnet::Header;
use ringferry_xen::grant::Access;
use ringferry_xen::netif::wire::{MAX_PACKET, OKAY};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen_net::netback::Mode;
use ringferry_xen_sim::Broker;
use ringferry_xen_sim::fake::Fake;

use crate::front::{Front, GUEST, HOST, MODES, deliver, frame};

#[test]
fn frames_go_both_ways_in_every_mode_and_nothing_stays_mapped() {
    for mode in MODES {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker");
        let broker = Broker::bind(&path).unwrap();
        let join = |id| ProcessDomain::connect(&path, Some(id)).unwrap();
        let (guest, host) = (Box::new(join(GUEST)), Box::new(join(HOST)));
        let mut front = Front::between(Fake::new(), guest, host, 96, Access::Write);
        let mut queue = front.queue(mode);
        for (i, len) in [60, 1514, 4097, MAX_PACKET].into_iter().cycle().take(160).enumerate() {
            let sent = frame(len, i as u8);
            front.send_frame(&sent);
            assert!(front.forward(&mut queue) == [(Header::default(), sent.clone())], "{mode:?} {len}");
            assert!(front.statuses().iter().all(|status| *status == OKAY));
            front.post(len.div_ceil(4096));
            queue.expect(1);
            deliver(&mut queue, Header::default(), &sent, 3000).unwrap();
            queue.flush();
            let received = front.received();
            assert!(received.len() == 1 && received[0].bytes == sent, "{mode:?} {len}");
        }
        if mode == Mode::Persistent {
            assert!(queue.counters().hits > 4 * queue.counters().misses, "{:?}", queue.counters());
        }
        front.finish(queue);
        assert_eq!((broker.granted_pages(), broker.mapped_pages()), (0, 0), "{mode:?}");
    }
}
