//! Why packets are dropped.

/// Makes [`DropReason`] from one table: variant, stable name, meaning.
macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped. The name is part of the interface (JSON, metrics): never change one,
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

            /// What the reason means, for people.
            pub const fn meaning(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

drop_reasons! {
    /// The frame's virtio-net header contradicts itself or the frame.
    RxBadHeader = "rx-bad-header",
    /// The frame is shorter than an Ethernet header.
    RxTooShort = "rx-too-short",
    /// The frame is longer than any the switch carries (65600 bytes).
    RxTooBig = "rx-too-big",
    /// The frame lies in memory the guest did not share; it broke its queue.
    RxBadMemory = "rx-bad-memory",
    /// The frame's own destination is the port it came from.
    SamePort = "same-port",
    /// The frame is for everybody, and no other port is in its VLAN, or may be reached by it.
    NoDestination = "no-destination",
    /// The receiving guest posted too few buffers: it is slower than its senders.
    NoReceiveBuffers = "no-receive-buffers",
    /// The receiving guest's buffers are too small for the frame.
    TxTooBig = "tx-too-big",
    /// The receiving port is not connected, its driver has not started, or its queue is broken.
    LinkDown = "link-down",
    /// The receiver lacks an offload the frame needs and it could not be done in software.
    OffloadUnsupported = "offload-unsupported",
    /// The tap's queue in the kernel is full: the host is slower than its senders.
    TapBusy = "tap-busy",
    /// The kernel refused the frame written to the tap.
    TapWriteError = "tap-write-error",
    /// The worker that serves the receiving queue is too far behind.
    WorkerBusy = "worker-busy",
    /// The slots of a Xen guest's packet do not add up.
    RxBadSlots = "rx-bad-slots",
    /// The receiving guest has asked not to get this multicast frame.
    Filtered = "filtered",
    /// The frame is tagged for a VLAN that the port is not in, or lacks a tag that the port demands.
    Vlan = "vlan",
    /// Sender and receiver are isolated ports.
    Isolated = "isolated",
    /// The frame's source address may not be used behind this port (anti-spoofing).
    Spoofed = "spoofed",
    /// The port has as many source addresses as it may have, and this frame is from another, or from one that is fixed to another
    /// port.
    MacLimit = "mac-limit",
    /// The port floods more frames than it may.
    Storm = "storm",
    /// The port sends more than it may.
    RateIn = "rate-in",
    /// The port is sent more than it may receive.
    RateOut = "rate-out",
    /// The frame does not fit the receiving port, and its sender was told so (ICMP).
    TooBigAnswered = "too-big-answered",
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
