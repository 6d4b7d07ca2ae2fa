use proptest::prelude::*;

use super::*;

const LAYOUT: Layout = Layout { rings: 2, ring_bytes: MIN_RING, interfaces: 3 };

fn record(number: u32, original: usize) -> Record {
    Record {
        stamp: 1 << 40 | u64::from(number),
        interface: (number % 3) as u16,
        queue: number.is_multiple_of(2).then_some(number as u16 & 0xff),
        original: original as u32,
        direction: if number.is_multiple_of(5) { Direction::Out } else { Direction::In },
        dropped: DropReason::ALL.get(number as usize % 40).copied(),
        header: Header {
            flags: 1,
            gso_type: 4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        },
    }
}

fn frame(number: u32, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u32).wrapping_mul(7).wrapping_add(number) as u8).collect()
}

fn open(layout: Layout) -> (SharedRings, RingReader) {
    let rings = SharedRings::new(layout).unwrap();
    let [index, contents] = rings.fds().map(|fd| fd.try_clone_to_owned().unwrap());
    (rings, RingReader::new(layout, index, contents).unwrap())
}

fn read(reader: &mut RingReader, ring: usize) -> Vec<(Record, Vec<u8>)> {
    let mut all = Vec::new();
    reader.read(ring, &mut Vec::new(), &mut |record, frame| all.push((record, frame.to_vec()))).unwrap();
    all
}

#[test]
fn records_come_out_as_they_went_in_wherever_the_ring_wraps() {
    let (rings, mut reader) = open(LAYOUT);
    let writers = [0, 1].map(|ring| rings.writer(ring).unwrap());
    assert!(rings.writer(2).is_none());
    for number in 0..5000u32 {
        let (ring, len) = (number as usize % 2, 14 + number as usize * 13 % 3000);
        let bytes = frame(number, len);
        let (first, rest) = bytes.split_at((number as usize % 70).min(len));
        let (one, two) = rest.split_at(rest.len() / 3);
        let pieces = [one, two].map(ReadSlice::from);
        assert!(writers[ring].push(&record(number, len), first, &pieces, 2000));
        assert_eq!(read(&mut reader, ring), [(record(number, len), bytes[..len.min(2000)].to_vec())]);
        assert_eq!(read(&mut reader, 1 - ring), []);
    }
}

#[test]
fn a_reader_that_stops_costs_records_and_holds_nobody_up() {
    let (rings, mut reader) = open(LAYOUT);
    let writer = rings.writer(0).unwrap();
    let bytes = frame(1, 1000);
    let push = |number| writer.push(&record(number, 1000), &bytes, &[], SNAP);
    const SNAP: u32 = super::super::SNAPLEN;
    let fit = (0..).take_while(|number| push(*number)).count();
    assert_eq!(fit, MIN_RING / 1040);
    assert!(!push(0));
    assert_eq!(read(&mut reader, 0).len(), fit);
    assert_eq!((0..).take_while(|number| push(*number)).count(), fit);
    // A record that is larger than the ring never fits.
    let writer = rings.writer(1).unwrap();
    let large = frame(2, MIN_RING);
    assert!(!writer.push(&record(2, MIN_RING), &large, &[], SNAP));
    assert!(writer.push(&record(2, MIN_RING), &large, &[], SNAP / 8));
}

#[test]
fn a_position_that_the_reader_cannot_have_makes_records_lost_and_nothing_else() {
    let (rings, _) = open(LAYOUT);
    let writer = rings.writer(0).unwrap();
    let index = Region::map(rings.fds()[0], spec(4096)).unwrap().area(0, 4096).unwrap();
    let bytes = frame(1, 1000);
    while writer.push(&record(1, 1000), &bytes, &[], 2000) {}
    for tail in [u64::MAX, 1 << 63, MIN_RING as u64 + 1, MIN_RING as u64 * 3] {
        index.store64(TAIL, tail);
        assert!(!writer.push(&record(1, 1000), &bytes, &[], 2000), "{tail}");
    }
    // What it can have is believed.
    index.store64(TAIL, 1040);
    assert!(writer.push(&record(1, 1000), &bytes, &[], 2000));
    assert!(!writer.push(&record(1, 1000), &bytes, &[], 2000));
}

#[test]
fn the_client_can_neither_write_the_contents_nor_make_a_hole_in_them() {
    use rustix::fs::FallocateFlags;
    let (rings, _) = open(LAYOUT);
    let [index, contents] = rings.fds();
    assert!(rustix::io::pwrite(contents, &[1], 0).is_err());
    assert!(Region::map(contents, spec(4096)).is_err());
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(contents, hole, 0, 4096).is_err());
    for fd in [index, contents] {
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
    }
}

#[test]
fn counts_of_all_rings_are_summed() {
    let (rings, reader) = open(LAYOUT);
    for ring in 0..2 {
        let writer = rings.writer(ring).unwrap();
        writer.show(2, Counts { seen: 10, accepted: 4, lost: 1 });
        // There is no such interface.
        writer.show(3, Counts { seen: 1, accepted: 1, lost: 1 });
    }
    assert_eq!(rings.writer(1).unwrap().shown(2).seen, 10);
    assert_eq!(reader.counts(2), Counts { seen: 20, accepted: 8, lost: 2 });
    assert_eq!(reader.counts(1), Counts::default());
    assert_eq!(reader.counts(3), Counts::default());
}

#[test]
fn rings_that_cannot_be_are_refused() {
    for layout in [
        Layout { rings: 0, ..LAYOUT },
        Layout { rings: 5000, ..LAYOUT },
        Layout { ring_bytes: 0, ..LAYOUT },
        Layout { ring_bytes: MIN_RING + 4096, ..LAYOUT },
        Layout { ring_bytes: MAX_RING * 2, ..LAYOUT },
        Layout { interfaces: 0, ..LAYOUT },
        Layout { interfaces: 1 << 16, ..LAYOUT },
    ] {
        assert!(matches!(SharedRings::new(layout), Err(RingError::Garbled)), "{layout:?}");
    }
}

#[test]
fn contents_that_are_no_records_are_an_error() {
    let (rings, mut reader) = open(LAYOUT);
    let index = Region::map(rings.fds()[0], spec(4096)).unwrap().area(0, 4096).unwrap();
    for head in [8, 48, MIN_RING as u64 + 8, u64::MAX] {
        index.store64(HEAD, head);
        let read = reader.read(0, &mut Vec::new(), &mut |_, _| panic!("a record"));
        assert!(matches!(read, Err(RingError::Garbled)), "{head}");
        reader.tails[0] = 0;
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_as_records_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Some((record, frame, behind)) = Record::read(&bytes) {
            prop_assert!(HEADER + frame.len() + behind.len() <= bytes.len());
            let again = record.to_bytes(frame.len() as u32, record_bytes(frame.len()) as u32);
            prop_assert_eq!(&again[..37], &[&bytes[..36], &[u8::from(bytes[36] != 0)]].concat()[..]);
        }
    }
}
