//! A stack made for the purpose: it turns a stream of sends into TCP packets that the device is to cut up.
//!
//! As a socket does, it copies every send into buffers of its own: one if the send fits, several if not. As TCP does,
//! it takes what is next in the stream for a packet wherever sends begin and end; a buffer that belongs to two packets
//! is divided between them, not copied. So small sends make long chains.
//!
//! Or it coalesces, as the stacks of FreeBSD (sbcompress) and Linux (tcp_sendmsg) do where they can: what is sent goes behind
//! what was sent before, as far as that buffer has room.

use ringferry_packet::buffer::{Buf, Chain, PoolLayout, Pools, PoolsLayout};

use crate::frames::stream::{HEADERS, PAYLOAD, Payload, headers, offloads};

/// Room of the large buffers: four hold the longest packet, so that it fits 8 segments, and a send of 256 KiB takes 16.
/// Pages would be the stack's choice, too, but 64 KiB of them do not fit the smaller limits even when copied.
const LARGE: u32 = 16 << 10;

/// Pools for such a stack: packets of 64 bytes a buffer, several at once.
pub(super) const POOLS: fn() -> PoolsLayout = || {
    let layout = |len, count| PoolLayout::fixed(len, count, PoolsLayout::HEADROOM);
    PoolsLayout {
        small: layout(PoolsLayout::SMALL, 8192),
        frame: layout(PoolsLayout::FRAME, 4096),
        large: layout(LARGE, 2048),
    }
};

/// A network stack that makes packets of sends.
#[derive(Debug)]
pub(super) struct Stack {
    send: usize,
    coalesces: bool,
    payload: Payload,
    headers: [u8; HEADERS],
    /// Bytes of the stream that were sent by the application.
    at: u64,
    /// Bytes of the current send that are not in buffers yet.
    left: usize,
    /// The rest of the last buffer, which belongs to the next packet.
    rest: Option<Buf>,
    /// The packet that is being made.
    chain: Chain,
}

impl Stack {
    /// An application that sends `send` bytes at a time, into buffers of their own unless the stack `coalesces`.
    pub(super) fn new(send: usize, coalesces: bool) -> Self {
        let payload = Payload::new();
        let (rest, chain) = (None, Chain::default());
        Self { send, coalesces, payload, headers: headers(), at: 0, left: send, rest, chain }
    }

    /// The next packet of the stream; `None` when there are no buffers now, and the next call goes on with it.
    pub(super) fn packet(&mut self, pools: &mut Pools) -> Option<Chain> {
        if self.chain.is_empty() {
            let mut buf = pools.alloc(HEADERS)?;
            buf.append(&self.headers);
            self.chain = Chain::from(buf);
            self.chain.header = offloads();
        }
        while let missing @ 1.. = HEADERS + PAYLOAD - self.chain.len() {
            if self.coalesces {
                let bytes = self.payload.slice(self.at, self.left.min(missing));
                let taken = pools.append(&mut self.chain, bytes, missing);
                let all = taken == bytes.len();
                self.sent(taken);
                if all { continue } else { return None }
            }
            let mut buf = match self.rest.take() {
                Some(rest) => rest,
                None => self.buffer(pools)?,
            };
            if buf.len() > missing {
                self.rest = Some(buf.split_off(missing));
            }
            self.chain.push_back(buf);
        }
        Some(std::mem::take(&mut self.chain))
    }

    /// A buffer of the current send, or the next.
    fn buffer(&mut self, pools: &mut Pools) -> Option<Buf> {
        let mut buf = pools.alloc(self.left)?;
        let len = buf.append(self.payload.slice(self.at, self.left.min(LARGE as usize)));
        self.sent(len);
        Some(buf)
    }

    /// So many bytes are in buffers.
    fn sent(&mut self, len: usize) {
        self.at += len as u64;
        self.left -= len;
        if self.left == 0 {
            self.left = self.send;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::SENDS;
    use super::*;
    use ringferry_virtio_net::driver::Arena;

    fn pools() -> Pools {
        let mut arena = Arena::new(POOLS().bytes()).unwrap();
        let at = arena.alloc(POOLS().bytes()).unwrap();
        Pools::new(arena.memory(), at, POOLS()).unwrap()
    }

    #[test]
    fn a_stream_is_the_same_bytes_whatever_the_sends() {
        for (send, coalesces) in SENDS.into_iter().flat_map(|send| [(send, false), (send, true)]) {
            let (mut pools, mut stack, payload) = (pools(), Stack::new(send, coalesces), Payload::new());
            for number in 0..50 {
                let packet = stack.packet(&mut pools).unwrap();
                payload.check(number, &packet.to_vec()).unwrap();
                assert!(packet.header.check(packet.len()).is_ok());
                pools.recycle_chain(packet);
            }
        }
    }

    #[test]
    fn a_send_takes_a_buffer_or_as_many_as_it_needs() {
        for (send, buffers) in
            [(64, PAYLOAD.div_ceil(64)), (512, PAYLOAD.div_ceil(512)), (4096, 16), (256 << 10, 4)]
        {
            let (mut pools, mut stack) = (pools(), Stack::new(send, false));
            let packet = stack.packet(&mut pools).unwrap();
            // And one for the headers.
            assert_eq!(packet.bufs().len(), 1 + buffers, "{send}");
        }
    }

    #[test]
    fn a_stack_that_coalesces_makes_the_same_packets_of_small_sends_as_of_large_ones() {
        for send in SENDS {
            let (mut pools, mut stack) = (pools(), Stack::new(send, true));
            for _ in 0..20 {
                let packet = stack.packet(&mut pools).unwrap();
                assert_eq!(packet.bufs().len(), 1 + PAYLOAD.div_ceil(LARGE as usize), "{send}");
                pools.recycle_chain(packet);
            }
        }
    }

    #[test]
    fn a_stack_without_buffers_goes_on_where_it_was() {
        for coalesces in [false, true] {
            let (mut pools, mut stack, payload) = (pools(), Stack::new(64, coalesces), Payload::new());
            let mut kept = Vec::new();
            while let Some(packet) = stack.packet(&mut pools) {
                kept.push(packet);
            }
            let so_far = kept.len() as u64;
            assert!(so_far > 2);
            kept.drain(..).for_each(|packet| pools.recycle_chain(packet));
            payload.check(so_far, &stack.packet(&mut pools).unwrap().to_vec()).unwrap();
        }
    }

    #[test]
    fn damage_and_loss_are_found() {
        let (mut pools, mut stack, payload) = (pools(), Stack::new(512, false), Payload::new());
        let mut frame = stack.packet(&mut pools).unwrap().to_vec();
        assert!(payload.check(1, &frame).is_err() && payload.check(0, &frame[..HEADERS + 9]).is_err());
        for at in [0, HEADERS, frame.len() - 1] {
            frame[at] ^= 1;
            assert!(payload.check(0, &frame).is_err(), "{at}");
            frame[at] ^= 1;
        }
        payload.check(0, &frame).unwrap();
    }
}
