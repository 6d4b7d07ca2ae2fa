//! Segmentation of a packet in a chain of buffers: one call turns it into a chain per segment, without copying payload.

use thiserror::Error;

use super::{Checksum, MAX_HEADERS, SegmentError, SegmentHeaders};
use crate::buffer::{Buf, Bufs, Chain, Pools};
use crate::vnet::Header;

/// The reason for which a packet was not segmented.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Reason {
    /// The packet cannot be segmented.
    #[error(transparent)]
    Refused(#[from] SegmentError),
    /// There are not enough buffers for the headers.
    #[error("no buffers for the headers of all segments; try again when some have come back")]
    NoBuffers,
}

/// A packet that was not segmented, unchanged, with the reason.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct Unsegmented {
    /// The reason for which it was not segmented.
    pub reason: Reason,
    /// The packet, unchanged and owned by the caller again.
    pub chain: Chain,
}

/// Segments a packet as its header requests, and appends the segments to `out`, in order. Returns their number.
///
/// Each segment has its headers in a new buffer, followed by its part of the payload in the original buffers, which are
/// split where a segment ends. All segments get the flow hash of the packet. Headers change as with
/// [`Segmenter`](super::Segmenter).
///
/// # Errors
/// [`Unsegmented`]; `out` is unchanged then.
pub fn segment_chain(
    chain: Chain,
    checksum: Checksum,
    pools: &mut Pools,
    out: &mut Vec<Chain>,
) -> Result<usize, Unsegmented> {
    let mut prefix = [0; MAX_HEADERS];
    let mut heads = match SegmentHeaders::new(&chain.header, chain.prefix(&mut prefix), chain.len()) {
        Ok(heads) => heads,
        Err(error) => return Err(Unsegmented { reason: error.into(), chain }),
    };
    // All steps that can fail come before the first split.
    let Some(mut buffers) = buffers_for(&heads, pools) else {
        return Err(Unsegmented { reason: Reason::NoBuffers, chain });
    };

    let hash = chain.hash;
    let mut payload = chain;
    payload.pull(heads.front.len());
    let mut rest = payload.into_bufs().into_iter();
    let mut next = rest.next();
    out.reserve(heads.segments);
    while let (Some(part), Some(mut head)) = (heads.advance(), buffers.pop()) {
        let mut body = Chain::default();
        while let Some(mut buf) = next.take() {
            let missing = part.len() - body.len();
            if missing == 0 {
                next = Some(buf);
                break;
            }
            next = if buf.len() > missing { Some(buf.split_off(missing)) } else { rest.next() };
            body.push_back(buf);
        }
        let header = match checksum {
            Checksum::Partial => heads.partial(),
            Checksum::Complete => {
                let mut sum = heads.sum();
                for piece in body.pieces() {
                    sum.add_slice(&piece);
                }
                heads.complete(sum);
                Header::default()
            }
        };
        head.append(heads.current());
        let mut segment = Chain::from(head);
        segment.append(body);
        (segment.header, segment.hash) = (header, hash);
        out.push(segment);
    }
    Ok(heads.segments)
}

/// Allocates a buffer for the headers of each segment; `None`, with none allocated, if there are too few.
fn buffers_for(heads: &SegmentHeaders<'_>, pools: &mut Pools) -> Option<Bufs> {
    let len = heads.front.len();
    let mut buffers = Bufs::with_capacity(heads.segments);
    while buffers.len() < heads.segments {
        match pools.alloc(len).filter(|buf: &Buf| buf.tailroom() >= len) {
            Some(buf) => buffers.push(buf),
            None => {
                buffers.into_iter().for_each(|buf| pools.recycle(buf));
                return None;
            }
        }
    }
    Some(buffers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segmenter;
    use crate::testing::{Packet, available, chain_of, pools};
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// The segments of a frame that lies in one slice.
    fn expected(
        header: &Header,
        frame: &[u8],
        checksum: Checksum,
    ) -> Result<Vec<(Header, Vec<u8>)>, SegmentError> {
        let mut segmenter = Segmenter::new(header, frame, checksum)?;
        let mut packets = Vec::new();
        while let Some(segment) = segmenter.next_segment() {
            packets.push((segment.header, [segment.head, segment.payload].concat()));
        }
        Ok(packets)
    }

    fn contents(chains: &[Chain]) -> Vec<(Header, Vec<u8>)> {
        chains.iter().map(|chain| (chain.header, chain.to_vec())).collect()
    }

    #[test]
    fn payload_is_not_copied() {
        let mut pools = pools(40);
        let packet = Packet::plain(false, true, (0..3500u32).map(|n| n as u8).collect());
        let chain = chain_of(&mut pools, packet.gso_header(1000), &packet.partial(), &[]);
        let (addr, in_use) = (chain.bufs()[0].addr() + 54, available(&pools)[2]);
        let mut out = Vec::new();
        assert_eq!(segment_chain(chain, Checksum::Complete, &mut pools, &mut out).unwrap(), 4);
        for (index, segment) in out.iter().enumerate() {
            assert_eq!(segment.bufs().len(), 2);
            assert_eq!(segment.bufs()[1].addr(), addr + 1000 * index as u64);
            assert!(segment.bufs().iter().all(Buf::is_exclusive));
        }
        assert_eq!(available(&pools), [36, 40, in_use]);
        drop(out);
        assert_eq!(available(&pools), [40; 3]);
    }

    #[test]
    fn a_packet_for_whose_headers_there_are_no_buffers_is_given_back() {
        for count in 1..12 {
            let mut pools = pools(count);
            let packet = Packet::plain(true, true, vec![5; 1000]);
            let (header, frame) = (packet.gso_header(100), packet.partial());
            let mut chain = chain_of(&mut pools, header, &frame, &[]);
            chain.hash = Some(9);
            let before = available(&pools);
            let mut out = Vec::new();
            match segment_chain(chain, Checksum::Partial, &mut pools, &mut out) {
                Ok(segments) => {
                    assert_eq!((segments, out.len(), count >= 10), (10, 10, true));
                    assert!(out.iter().all(|segment| segment.hash == Some(9)));
                }
                Err(Unsegmented { reason, chain }) => {
                    assert_eq!((reason, count < 10), (Reason::NoBuffers, true));
                    assert_eq!((chain.header, chain.hash, chain.to_vec()), (header, Some(9), frame));
                    assert_eq!((available(&pools), out.len()), (before, 0));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn segments_equal_those_of_a_frame_in_one_slice(
            packet in Packet::any(4000),
            gso_size in 20..2000u16,
            lens in vec(1..900usize, 0..6),
            partial: bool,
        ) {
            let (header, frame) = (packet.gso_header(gso_size), packet.partial());
            let checksum = if partial { Checksum::Partial } else { Checksum::Complete };
            let mut pools = pools(250);
            let chain = chain_of(&mut pools, header, &frame, &lens);
            let mut out = vec![Chain::default()];
            match (segment_chain(chain, checksum, &mut pools, &mut out), expected(&header, &frame, checksum)) {
                (Ok(segments), Ok(expected)) => {
                    prop_assert_eq!(segments, expected.len());
                    prop_assert_eq!(contents(&out[1..]), expected);
                }
                (Err(Unsegmented { chain, .. }), Err(_)) => {
                    prop_assert_eq!((chain.header, chain.to_vec(), out.len()), (header, frame, 1));
                }
                (got, expected) => prop_assert!(false, "{:?} {:?}", got, expected),
            }
            drop(out);
            prop_assert_eq!(available(&pools), [250; 3]);
        }

        #[test]
        fn any_bytes_and_any_header_do_no_harm(
            packet in Packet::any(300),
            damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            header: [u8; Header::LEN],
            its_own: bool,
            lens in vec(1..100usize, 0..4),
        ) {
            let mut frame = packet.partial();
            for (at, byte) in damage {
                let at = at.index(frame.len());
                frame[at] = byte;
            }
            let header = if its_own { packet.gso_header(50) } else { Header::from_bytes(&header) };
            let mut pools = pools(80);
            let chain = chain_of(&mut pools, header, &frame, &lens);
            let mut out = Vec::new();
            match segment_chain(chain, Checksum::Complete, &mut pools, &mut out) {
                Ok(_) => prop_assert_eq!(contents(&out), expected(&header, &frame, Checksum::Complete).unwrap()),
                Err(Unsegmented { chain, .. }) => prop_assert_eq!(chain.to_vec(), frame),
            }
            drop(out);
            prop_assert_eq!(available(&pools), [80; 3]);
        }
    }
}
