//! Two virtio-net drivers in one thread, one that sends and one that receives, around any vhost-user
//! switch: the same two ends for ringferry and for its rivals.
//!
//! ```sh
//! ringferry run --port vhost-user:/tmp/a.sock --port vhost-user:/tmp/b.sock --control /tmp/c.sock &
//! cargo run --release -p ringferry --example two_ends -- /tmp/a.sock /tmp/b.sock 64 3
//! ```
//!
//! Prints one line: frame size, frames received per second, bits per second, frames sent, lost and out of
//! order. Each frame carries its number, which the receiver checks.
#![forbid(unsafe_code)]

use std::error::Error;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Queue, Receiveq, RxMode, Transmitq};

/// Entries of each queue: what virtio_user has by default.
const QUEUE: u16 = 256;
const BURST: usize = 32;
/// Frames sent and neither received nor given up, and bytes of them: keeps loss, which measures nothing,
/// out of the picture. The receiver's buffers hold 1 MiB.
const WINDOW: u64 = 192;
const WINDOW_BYTES: u64 = 768 * 1024;
/// Where the frame's number is: behind the Ethernet, IPv4 and TCP headers.
const NUMBER: usize = 54;

struct End {
    _connection: Connection,
    _events: [EventFd; 2],
    kicks: [EventFd; 2],
    receiveq: Receiveq,
    transmitq: Transmitq,
}

fn plug(path: &str) -> Result<End, Box<dyn Error>> {
    let wanted = Wanted {
        features: Features::DEVICE.bits(),
        required: Features::VERSION_1.bits(),
        protocol: Wanted::NET_PROTOCOL,
    };
    let mut connection = connect_device(Stream::connect(path)?, &wanted)?;
    let features = Features::from_bits_retain(connection.negotiated().features);
    let mode = RxMode::of(features, 1500);
    let mut arena = Arena::new(Receiveq::arena_bytes(QUEUE, mode) + Transmitq::arena_bytes(QUEUE))?;
    let (rx, receiveq) = Receiveq::new(&mut arena, QUEUE, features, mode)?;
    let (tx, transmitq) = Transmitq::new(&mut arena, QUEUE, features)?;
    let kicks = [EventFd::new()?, EventFd::new()?];
    let calls = [EventFd::new()?, EventFd::new()?];
    let plan = |queue: Queue, at: usize| RingPlan {
        size: queue.size,
        base: None,
        desc: queue.desc,
        avail: queue.avail,
        used: queue.used,
        kick: Some(kicks[at].as_fd()),
        call: Some(calls[at].as_fd()),
        err: None,
        enabled: true,
    };
    connection.start(&[(arena.region(), arena.fd())], &[plan(rx, 0), plan(tx, 1)])?;
    let mut end = End { _connection: connection, _events: calls, kicks, receiveq, transmitq };
    end.refill();
    Ok(end)
}

impl End {
    fn refill(&mut self) {
        if self.receiveq.refill() {
            let _ = self.kicks[0].signal();
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [a, b, size, seconds] = &args[..] else {
        return Err("usage: two_ends SOCKET-A SOCKET-B FRAME-BYTES SECONDS".into());
    };
    let size: usize = size.parse()?;
    let seconds: f64 = seconds.parse()?;
    let mut sender = plug(a)?;
    let mut receiver = plug(b)?;

    // A TCP frame between two fixed stations; larger than an MTU it is one that asks for segmentation.
    let mut frame = vec![0u8; size.max(64)];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
    frame[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6]);
    let total = u16::try_from(frame.len() - 14).unwrap_or(0);
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    frame[46] = 5 << 4;
    let header = if frame.len() > 1518 {
        Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        }
    } else {
        Header::default()
    };
    let bytes = header.to_bytes();

    // The receiver says where it is, so that the switch need not flood.
    let mut hello = vec![0u8; 64];
    hello[..12].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 2]);
    receiver.transmitq.send_frame(&Header::default(), &hello);
    if receiver.transmitq.publish() {
        receiver.kicks[1].signal()?;
    }

    let window = WINDOW.min(WINDOW_BYTES / frame.len() as u64);
    let (mut sent, mut received, mut lost, mut disorder) = (0u64, 0u64, 0u64, 0u64);
    let mut next = 0u64;
    let mut measured_from = (Instant::now(), 0u64);
    let warm_up = Duration::from_millis(300);
    let start = Instant::now();
    let end = warm_up + Duration::from_secs_f64(seconds);
    let mut progress = Instant::now();
    // Every slot holds the frame already; only header and number are written per packet.
    let mut filled = [false; QUEUE as usize];
    let mut warm = false;
    let elapsed = loop {
        for _ in 0..64 {
            sender.transmitq.reclaim();
            let mut burst = 0;
            while burst < BURST && sent - received - lost < window {
                let Some(slot) = sender.transmitq.slot() else { break };
                let to = sender.transmitq.bytes(&slot);
                to.copy_from(&bytes);
                let at = slot.index();
                if !std::mem::replace(&mut filled[at], true) {
                    to.skip(Header::LEN).copy_from(&frame);
                }
                to.skip(Header::LEN + NUMBER).copy_from(&sent.to_le_bytes());
                sender.transmitq.send(slot, Header::LEN + frame.len());
                sent += 1;
                burst += 1;
            }
            if sender.transmitq.publish() {
                sender.kicks[1].signal()?;
            }
            let got = receiver.receiveq.receive(BURST, |packet| {
                if packet.len != frame.len() {
                    return;
                }
                let mut number = [0; 8];
                packet.pieces[0].skip(Header::LEN + NUMBER).copy_to(&mut number);
                let number = u64::from_le_bytes(number);
                received += 1;
                if number < next {
                    disorder += 1;
                } else {
                    lost += number - next;
                    next = number + 1;
                }
            });
            if got > 0 {
                receiver.refill();
                progress = Instant::now();
            }
        }
        let now = start.elapsed();
        if !warm && now >= warm_up {
            warm = true;
            measured_from = (Instant::now(), received);
        }
        if now >= end {
            break measured_from.0.elapsed().as_secs_f64();
        }
        if progress.elapsed() > Duration::from_millis(200) {
            // Everything on its way is lost: the switch has started, or dropped it.
            lost += sent - received - lost;
            next = sent;
            progress = Instant::now();
        }
    };
    let rate = (received - measured_from.1) as f64 / elapsed;
    println!(
        "{} bytes: {:.4} Mpps {:.3} Gbit/s sent {sent} lost {lost} disordered {disorder}",
        frame.len(),
        rate / 1e6,
        rate * frame.len() as f64 * 8.0 / 1e9
    );
    Ok(())
}
