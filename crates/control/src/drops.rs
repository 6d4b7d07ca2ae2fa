//! Why packets are dropped, and what to do about it.
//!
//! One table has all there is to say about a reason: its name, what happened, at which port it is counted, and what to do. `ringferry ctl show
//! --reasons` prints it, and docs/operating.md has the same rows (a test compares them).

/// The port at which a drop is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedAt {
    /// The one that the packet came from: something is wrong with the packet, or the port may not send it.
    Sender,
    /// The one that it would have left by.
    Receiver,
    /// One or the other.
    Either,
}

impl CountedAt {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            CountedAt::Sender => "sender",
            CountedAt::Receiver => "receiver",
            CountedAt::Either => "sender, or receiver",
        }
    }
}

/// Makes [`DropReason`] from one table: what happened, variant, stable name, where it is counted, what to do.
macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal at $side:ident, $remedy:literal,)+) => {
        /// Why a packet was dropped. The name is part of the interface (JSON): never change one,
        /// only add.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(usize)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of the table.
            pub const ALL: [DropReason; [$($name),+].len()] = [$(DropReason::$variant),+];

            /// The stable name, in kebab case.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)+ }
            }

            /// What happened, for people.
            pub const fn meaning(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }

            /// At which port it is counted.
            pub const fn counted_at(self) -> CountedAt {
                match self { $(DropReason::$variant => CountedAt::$side,)+ }
            }

            /// What to do about it, for people.
            pub const fn remedy(self) -> &'static str {
                match self { $(DropReason::$variant => $remedy,)+ }
            }
        }
    };
}

drop_reasons! {
    /// The virtio-net header contradicts the frame, such as a checksum beyond its end, or asks for an offload that the guest has
    /// not negotiated.
    RxBadHeader = "rx-bad-header" at Sender,
        "A fault of the guest's driver, or an attack. The guest alone is affected.",
    /// The frame is shorter than an Ethernet header.
    RxTooShort = "rx-too-short" at Sender,
        "A fault of the guest's driver, or an attack. The guest alone is affected.",
    /// The frame is longer than 65600 bytes, the most that the switch carries, or lies in more than 256 buffers.
    RxTooBig = "rx-too-big" at Sender,
        "A fault of the guest's driver, or an attack. The guest alone is affected.",
    /// The frame lies outside the memory that the guest shares. Its queue is now broken.
    RxBadMemory = "rx-bad-memory" at Sender,
        "A fault of the guest's driver, or an attack. The guest alone is affected. Its port is in the \
         state `broken`.",
    /// The destination is behind the port that the frame came from.
    SamePort = "same-port" at Sender,
        "Normal behind a bridge. Many of them show a loop, or two guests with the same MAC address.",
    /// The frame was for everybody, or for an address that is not known, and there is no other port that it may leave by.
    NoDestination = "no-destination" at Sender,
        "Normal for a port that is alone: the only one, the only one in its VLAN (compare `ringferry ctl rules`), or there with other isolated ones only; and for untagged frames of a \
         trunk whose native VLAN no other port is in (`native=none` there).",
    /// The receiving guest has posted no buffers, or too few for this frame. It is slower than those who send
    /// to it.
    NoReceiveBuffers = "no-receive-buffers" at Receiver,
        "Some loss is normal when a sender without flow control (UDP) is faster than its receiver. For \
         bursts: a larger ring (`rx_queue_size=1024` in QEMU). For steady loss: more queue pairs and \
         vCPUs in the guest, or `rate_out` at the port.",
    /// The frame does not fit the receiving guest's buffers or MTU, and nobody could be told: it is not IP, or
    /// may be fragmented, or was flooded.
    TxTooBig = "tx-too-big" at Receiver,
        "Give both ends the same MTU. A guest with `mrg_rxbuf=off` and without TSO takes frames of one \
         MTU only.",
    /// Nobody takes frames at this port: no front end, driver not started, interface down, or queue broken. Or the port was taken down with
    /// `ctl link`, and then nothing is taken from it either.
    LinkDown = "link-down" at Either,
        "Nothing, while the guest boots or the interface comes up. Otherwise see the state of the port.",
    /// The frame asks for an offload that the receiver lacks and that the switch cannot do in software: its
    /// headers cannot be parsed, or are too long.
    OffloadUnsupported = "offload-unsupported" at Receiver,
        "Look for tunnels with unusual headers in the sending guest; `tso=off,uso=off` at its port makes \
         it send finished packets.",
    /// The kernel's queue of the tap is full.
    TapBusy = "tap-busy" at Receiver,
        "The host is slower than the guests: look at its softirq time. Several tap queues help \
         (`queues=N` with as many workers).",
    /// The kernel refused the frame, mostly because its header asks for something that the kernel does not
    /// know.
    TapWriteError = "tap-write-error" at Receiver,
        "Look at the guest's driver. With `offloads=off` at the tap, or `csum=off` at the guest's port, \
         no such header reaches the kernel.",
    /// The interface has not sent what it was given before.
    InterfaceBusy = "interface-busy" at Receiver,
        "Some loss is normal when guests are faster than the network (UDP). For steady loss: `rate_out` at the port, a faster interface, or more of its queues.",
    /// The interface received a packet for which the switch had no room left.
    RxMissed = "rx-missed" at Sender,
        "More comes in than the switch forwards: see whether its worker is busy; more workers, with as many queues of the interface (`ethtool -L`).",
    /// The frame had to go to another worker, which has taken nothing for 10 ms (until then the sender waits: `rx_held_microseconds`), or it was one of many copies and of more than the sending port's share of the ring between the two.
    WorkerBusy = "worker-busy" at Receiver,
        "See whether that worker is busy; add workers, or put the pairs that talk to each other on one \
         (`ctl assign`).",
    /// Xen only: the slots of a packet do not add up.
    RxBadSlots = "rx-bad-slots" at Sender,
        "A fault of the guest's driver, or an attack. The guest alone is affected.",
    /// Xen only: the guest asked not to receive this multicast address.
    Filtered = "filtered" at Receiver,
        "Nothing.",
    /// The frame has a tag of a VLAN that its port is not in, or no tag where one is demanded; or it was for an
    /// address behind a port that is not in its VLAN; or a second tag would have come to light where it leaves without the first.
    Vlan = "vlan" at Either,
        "Compare `ctl rules` of both ports. `ringferry capture PORT --drops`, into `tcpdump -enr -`, shows the frames.",
    /// Sender and receiver are both isolated ports.
    Isolated = "isolated" at Receiver,
        "That is what the rule is for; take `isolated` away from one of them if they should talk.",
    /// Sender or receiver is in `quarantine`, and the other one is not the port that it is left with; or that port is not there.
    Quarantine = "quarantine" at Either,
        "That is what the rule is for; `ringferry ctl release PORT` ends it. If the port that it is left with is not there, see which ports there are with `ringferry ctl show`.",
    /// The frame's conversation is not one that the policy of a port's `firewall` allows, or it is none: not IP, malformed, led elsewhere by its headers.
    Firewall = "firewall" at Either,
        "`ringferry ctl firewall PORT` says which rule denied what of late. Add a rule to the policy and use `ringferry ctl reload`.",
    /// The port is an end of a wire, and its other end is not there; or the frame comes from a port that is not the other end.
    WireDown = "wire-down" at Either,
        "`ringferry ctl wire` says which port is missing. Add it, or remove the wire if its ends are to be ports as others are.",
    /// The wire of the port has lost the frame, as its `loss` asks for.
    WireLoss = "wire-loss" at Receiver,
        "That is what the wire is for; `ringferry ctl wire reset NAME` ends it.",
    /// The wire of the port has no room for the frame: `limit` frames wait for its `rate`, or what waits takes `limit_bytes` of memory.
    WireLimit = "wire-limit" at Receiver,
        "If the wire has a `rate`, this is what happens to whoever sends faster. Without one, or if less was sent, raise `limit_bytes`: what is under way is the rate times the delay, and 128 bytes for each frame.",
    /// The frame's source address is not one of `allowed_macs` or `allowed_ips` of the port, or it is of a kind that a port with these rules may not send: router advertisements, redirects, IP and ARP in SNAP, headers that are cut off, contradict each other or lie too deep to be checked.
    Spoofed = "spoofed" at Sender,
        "`ringferry capture PORT --drops`, into `tcpdump -enr -`, shows which. If it is a source address of the guest's, add it: guests that run containers or VMs of their own send from \
         further addresses. For the other kinds no address helps: a port of a router has no such rules.",
    /// The frame is for a protocol between neighbours (01:80:c2:00:00:00 to 0f: spanning tree, PAUSE, LACP, LLDP), is a MAC control frame
    /// (PAUSE) to another address, or comes from a group address or from all zeros.
    Reserved = "reserved" at Sender,
        "Normal where the host sends LLDP. With `reserved=forward` the port may send such frames: only for \
         one that stands for a wire.",
    /// The port has `max_macs` addresses already and this frame has another one, or one that is fixed to
    /// another port (`static_macs`).
    MacLimit = "mac-limit" at Sender,
        "If the port has `max_macs`, and its guest bridges, raise it. Else the guest floods addresses, or uses one \
         that `static_macs` has fixed to another port (`ringferry ctl fdb`), and the rule does what it is for.",
    /// The port sent more broadcast, multicast and unknown-destination frames than `storm` allows.
    Storm = "storm" at Sender,
        "Look for a loop (two paths between the same networks) or a scan; `ctl link` takes a port down that \
         floods on purpose. Raise the limit only if what was sent is wanted.",
    /// More was sent to the port than `rate_out` or `rate_out_packets` allows, for so long that its queue was full, or stood for more than
    /// 5 ms (CoDel).
    RateOut = "rate-out" at Receiver,
        "Nothing, if it is a few per TCP connection: they tell it how fast it may be. Otherwise raise the limit.",
    /// The frame does not fit the receiving guest's buffers or MTU, and its sender was told with ICMP
    /// "fragmentation needed" or "packet too big". Path MTU discovery works.
    TooBigAnswered = "too-big-answered" at Receiver,
        "Nothing, if it is a few per connection. Otherwise the sender ignores ICMP (a firewall in the \
         guest): give both ends the same MTU.",
    /// The receiving guest spreads frames over so many small buffers that filling them takes more than is granted, or, while others have work to be
    /// done, more than the port's share of its worker.
    DearBuffers = "dear-buffers" at Receiver,
        "A fault of the guest's driver, or an attack; others are protected from it. In the guest: buffers of \
         at least a few hundred bytes.",
}

impl DropReason {
    /// The reason of this name.
    pub fn from_name(name: &str) -> Option<DropReason> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }

    /// Returns the [remedy](Self::remedy) with the name of the port that counts the drops in its commands.
    pub fn remedy_at(self, port: &str) -> String {
        self.remedy().replace("PORT", port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_kebab_case_and_explained() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        for reason in DropReason::ALL {
            assert!(
                reason.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'),
                "{}",
                reason.name()
            );
            assert_eq!(DropReason::from_name(reason.name()), Some(reason));
            assert!(reason.remedy().ends_with('.') && !reason.remedy().contains("  "), "{}", reason.remedy());
            assert!(
                reason.meaning().ends_with('.') && !reason.meaning().starts_with(' '),
                "{:?}",
                reason.meaning()
            );
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
    }
}
