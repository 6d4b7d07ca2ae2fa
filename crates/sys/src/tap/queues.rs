//! The queues of a multi-queue tap: attaching, detaching, and the kernel's choice of a queue.
//!
//! Each queue is a [`Tap`], attached when it is opened. By default the kernel sends the packets of a flow to the
//! queue to which the flow's packets in the other direction were last written (*automatic flow steering*), and those
//! of unknown flows by their hash. A detached queue gets none; writing to it still works. Packets that are queued in
//! a queue when it is detached are lost silently, so a queue that is to be detached is first excluded by
//! [`Tap::steer_to_first`], then read until it is empty, then detached by [`Tap::set_attached`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::{Tap, TapError, os_error};
use crate::ifreq;

/// Command of bpf(2) to load a program: `BPF_PROG_LOAD`.
const PROG_LOAD: libc::c_int = 5;
/// Type of the steering program: `BPF_PROG_TYPE_SOCKET_FILTER`.
const SOCKET_FILTER: u32 = 1;
/// Offset of the flow hash in the program's context: `offsetof(struct __sk_buff, hash)`.
const HASH: u64 = 68;

/// The members of `union bpf_attr` that are needed to load a program; the kernel takes the others as zero.
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
}

impl Tap {
    /// Attaches this queue to the device as the last of its queues, or detaches it. A new queue is attached. If only
    /// the last queue is ever detached, the numbers of the others do not change.
    ///
    /// # Errors
    /// [`TapError::Os`], if it is attached or detached already, or the tap has only one queue.
    pub fn set_attached(&self, attached: bool) -> Result<(), TapError> {
        let mut request = ifreq::zeroed();
        let flag = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        // SAFETY: TUNSETQUEUE takes an ifreq with flags.
        unsafe { ifreq::ioctl(self, libc::TUNSETQUEUE, &mut request) }
            .map_err(|e| os_error(&self.name, "attaching or detaching a queue (TUNSETQUEUE)", e))
    }

    /// Makes the kernel send packets to the first `queues` queues of the device only, by their hash (to the first
    /// queue if they have none), through an eBPF program. `None` restores automatic flow steering to all queues. The
    /// change is complete when this returns: no packet will get into the other queues any more.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_BPF or CAP_SYS_ADMIN; other errors, if the kernel lacks a feature. Nothing has
    /// changed then.
    pub fn steer_to_first(&self, queues: Option<u16>) -> io::Result<()> {
        let program = queues.map(by_hash).transpose()?;
        let mut fd: libc::c_int = program.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: TUNSETSTEERINGEBPF takes the address of a descriptor; the kernel holds the program by itself.
        unsafe { ifreq::ioctl(self.as_fd(), libc::TUNSETSTEERINGEBPF, &mut fd) }?;
        if queues.is_some() {
            // A packet may be on its way to a queue chosen before the change. MEMBARRIER_CMD_GLOBAL waits for an RCU
            // grace period, after which all such packets have arrived.
            const GLOBAL: libc::c_int = 1;
            // SAFETY: takes numbers only.
            unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
        }
        Ok(())
    }
}

/// Loads an eBPF program that selects one of the first `queues` queues by a packet's hash.
fn by_hash(queues: u16) -> io::Result<OwnedFd> {
    /// Encodes an instruction: code, destination and source register, offset, operand.
    const fn instruction(code: u8, registers: u8, offset: u64, operand: u64) -> u64 {
        code as u64 | (registers as u64) << 8 | offset << 16 | operand << 32
    }
    // The two register fields are swapped on big-endian machines.
    const LOAD_R0_FROM_R1: u8 = if cfg!(target_endian = "little") { 0x10 } else { 0x01 };
    let insns = [
        instruction(0x61, LOAD_R0_FROM_R1, HASH, 0), // r0 = packet->hash
        instruction(0x94, 0, 0, u64::from(queues.max(1))), // r0 %= queues
        instruction(0x95, 0, 0, 0),                  // return r0
    ];
    #[cfg(target_endian = "big")]
    let insns = insns.map(|insn| {
        let [code, registers, o0, o1, ..] = insn.to_le_bytes();
        let operand = ((insn >> 32) as u32).to_be_bytes();
        let [p0, p1, p2, p3] = operand;
        u64::from_be_bytes([code, registers, o1, o0, p0, p1, p2, p3])
    });
    let load = ProgLoad {
        prog_type: SOCKET_FILTER,
        insn_cnt: insns.len() as u32,
        insns: insns.as_ptr().addr() as u64,
        license: c"".as_ptr().addr() as u64,
    };
    // SAFETY: BPF_PROG_LOAD reads so many bytes of the structure, and the instructions and the text that it points to,
    // which live until the call returns.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_LOAD,
            std::ptr::from_ref(&load),
            size_of::<ProgLoad>() as libc::c_uint,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, UdpSocket};

    use super::*;
    use crate::netif;
    use crate::tap::{HEADER_LEN, MAX_READ, TapConfig};
    use crate::testing::{in_new_net, may};

    /// `count` queues of a tap that is up, and whose neighbour 10.0.0.2 is known.
    fn queues(count: usize) -> Vec<Tap> {
        let config = TapConfig { multi_queue: true, ..TapConfig::new("t0") };
        let taps: Vec<_> = (0..count).map(|_| Tap::open(&config).unwrap()).collect();
        netif::quiet_ipv6("t0");
        netif::add_address("t0", IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 24).unwrap();
        netif::set_up("t0", true).unwrap();
        taps
    }

    /// Broadcasts, which need no neighbour, from so many sockets: as many flows.
    fn send(flows: usize) {
        for _ in 0..flows {
            let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
            socket.set_broadcast(true).unwrap();
            // Only packets of a connected socket have a hash from the start.
            socket.connect("10.0.0.255:9").unwrap();
            socket.send(b"x").unwrap();
        }
    }

    /// Packets that wait in each queue.
    fn waiting(taps: &[Tap]) -> Vec<usize> {
        let mut buffer = vec![0; MAX_READ];
        taps.iter().map(|tap| std::iter::from_fn(|| tap.read(&mut buffer).ok()).count()).collect()
    }

    #[test]
    fn a_detached_queue_gets_nothing_and_can_still_be_written_to() {
        in_new_net(|| {
            let taps = queues(3);
            send(60);
            assert!(waiting(&taps).iter().all(|count| *count > 0));
            taps[2].set_attached(false).unwrap();
            taps[1].set_attached(false).unwrap();
            send(60);
            assert_eq!(waiting(&taps), [60, 0, 0]);
            taps[2].write(&[0; HEADER_LEN + 60]).unwrap();
            assert!(taps[2].set_attached(false).is_err(), "it is detached already");
            taps[1].set_attached(true).unwrap();
            assert!(taps[1].set_attached(true).is_err(), "it is attached already");
            send(60);
            let counts = waiting(&taps);
            assert!(counts[0] > 0 && counts[1] > 0 && counts[2] == 0, "{counts:?}");
        });
    }

    #[test]
    fn the_only_queue_of_a_tap_is_neither_attached_nor_detached() {
        in_new_net(|| {
            let tap = Tap::open(&TapConfig::new("t0")).unwrap();
            assert!(tap.set_attached(false).is_err() && tap.set_attached(true).is_err());
        });
    }

    #[test]
    fn packets_go_to_the_first_queues_only_until_they_may_go_to_all_again() {
        in_new_net(|| {
            let taps = queues(3);
            if let Err(error) = taps[0].steer_to_first(Some(1)) {
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
                may("needs the permission to load programs into the kernel", false);
                return;
            }
            send(60);
            assert_eq!(waiting(&taps), [60, 0, 0]);
            taps[0].steer_to_first(Some(2)).unwrap();
            send(60);
            let counts = waiting(&taps);
            assert!(counts[0] > 0 && counts[1] > 0 && counts[2] == 0, "{counts:?}");
            taps[0].steer_to_first(None).unwrap();
            send(60);
            assert!(waiting(&taps).iter().all(|count| *count > 0));
        });
    }
}
