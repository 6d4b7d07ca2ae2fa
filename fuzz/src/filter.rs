//! The filter program of a capture, which a client sends.
//!
//! Each program that is accepted is also run by a second machine, written from the paper, on the frame in one piece: it must say the same, whatever pieces
//! the frame lies in. A program that is refused must be one that the second reader refuses, too, for the rules that it has by itself.

use ringferry_memory::ReadSlice;
use ringferry_packet::filter::{Filter, Instruction, MAX_INSTRUCTIONS};

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

/// Bytes of a frame, at most.
const FRAME: usize = 2048;

operations! {
    /// One step of a script.
    Step {
        /// The next instruction of the program.
        Add { code: u16, jt: u8, jf: u8, k: u32 },
        /// The next instruction again, so many times.
        Repeat { count: u16 },
        /// There is no program any more.
        Clear {},
        /// The frame has so many bytes from now on.
        Resize { len: u16 },
        /// Bytes of the frame.
        Write { at: u16, value: u64 },
        /// The program is verified and run; the frame is cut at two places.
        Run { first: u16, second: u16 },
    }
}

/// Runs a script, and panics if a check fails.
pub fn filter(input: &[u8]) -> Reached {
    let mut input = Bytes(input);
    let (mut program, mut frame) = (Vec::new(), vec![0u8; 60]);
    let mut reached = Reached::default();
    while let Some(step) = Step::get(&mut input) {
        match step {
            Step::Add { code, jt, jf, k } => program.push(Instruction { code, jt, jf, k }),
            Step::Repeat { count } => {
                if let Some(last) = program.last().copied() {
                    program.extend(std::iter::repeat_n(last, count.into()));
                    program.truncate(MAX_INSTRUCTIONS + 1);
                }
            }
            Step::Clear {} => program.clear(),
            Step::Resize { len } => frame.resize(usize::from(len) % (FRAME + 1), 0),
            Step::Write { at, value } => {
                for (byte, value) in frame.iter_mut().skip(at.into()).zip(value.to_le_bytes()) {
                    *byte = value;
                }
            }
            Step::Run { first, second } => run(&program, &frame, first.into(), second.into(), &mut reached),
        }
    }
    reached
}

fn run(program: &[Instruction], frame: &[u8], first: usize, second: usize, reached: &mut Reached) {
    let Ok(filter) = Filter::new(program) else {
        assert!(!is_valid(program), "a program was refused that obeys the rules: {program:?}");
        reached.broken = true;
        return;
    };
    assert!(is_valid(program), "a program was accepted that breaks the rules: {program:?}");
    assert_eq!(filter.instructions(), program.len());
    let second = second.min(frame.len());
    let first = first.min(second);
    let rest = [&frame[first..second], &frame[second..]].map(ReadSlice::from);
    let passes = filter.matches(&frame[..first], &rest, frame.len() as u32);
    assert_eq!(passes, machine(program, frame) > 0, "{program:?}");
    reached.chains += 1;
    reached.longest = reached.longest.max(program.len());
    reached.frames += usize::from(passes);
}

/// Whether each instruction is one of the table in McCanne and Jacobson's paper, as libpcap has it, with operands that mean something.
fn is_valid(program: &[Instruction]) -> bool {
    let fine = |(at, one): (usize, &Instruction)| {
        let Instruction { code, jt, jf, k } = *one;
        let left = (program.len() - at - 1) as u64;
        let operation = code & 0xf0;
        match (code & 7, code) {
            // What Linux takes for questions about the socket, or the link's header, begins at -2 MiB.
            (0, 0x20 | 0x28 | 0x30) => k < 0xffe0_0000,
            (0, 0x00 | 0x80 | 0x40 | 0x48 | 0x50) => true,
            (1, 0x01 | 0x81 | 0xb1) => true,
            (0, 0x60) | (1, 0x61) | (2, 0x02) | (3, 0x03) => k < 16,
            (4, 0x84) => true,
            (4, _) if code & !0xf8 == 4 => match operation {
                0x30 | 0x90 => code & 8 != 0 || k > 0,
                0x60 | 0x70 => code & 8 != 0 || k < 32,
                0x00 | 0x10 | 0x20 | 0x40 | 0x50 | 0xa0 => true,
                _ => false,
            },
            (5, 0x05) => u64::from(k) < left,
            (5, _) if code & !0xf8 == 5 && (0x10..=0x40).contains(&operation) => u64::from(jt.max(jf)) < left,
            (6, 0x06 | 0x16) | (7, 0x07 | 0x87) => true,
            _ => false,
        }
    };
    (1..=MAX_INSTRUCTIONS).contains(&program.len())
        && program.iter().enumerate().all(fine)
        && program.last().is_some_and(|last| last.code & 7 == 6)
}

/// Runs a valid program on a frame in one piece.
fn machine(program: &[Instruction], frame: &[u8]) -> u32 {
    let (mut a, mut x, mut memory, mut at) = (0u32, 0u32, [0u32; 16], 0);
    let load = |from: u64, size: u64| -> Option<u32> {
        let bytes = frame.get(usize::try_from(from).ok()?..usize::try_from(from + size).ok()?)?;
        Some(bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
    };
    let mut steps = 0;
    loop {
        let Instruction { code, jt, jf, k } = program[at];
        steps += 1;
        assert!(steps <= program.len(), "jumps go only forward");
        at += 1;
        let size = [4, 2, 1, 0][usize::from(code >> 3 & 3)];
        let loaded = match code {
            0x20 | 0x28 | 0x30 => load(k.into(), size),
            // Registers have 32 bits, and an offset beyond them is beyond the frame.
            0x40 | 0x48 | 0x50 => load(u64::from(x) + u64::from(k), size),
            0xb1 => load(k.into(), 1),
            _ => Some(0),
        };
        let Some(loaded) = loaded else { return 0 };
        let operand = if code & 8 == 0 { k } else { x };
        match code {
            0x00 => a = k,
            0x80 => a = frame.len() as u32,
            0x60 => a = memory[k as usize],
            0x20 | 0x28 | 0x30 | 0x40 | 0x48 | 0x50 => a = loaded,
            0x01 => x = k,
            0x81 => x = frame.len() as u32,
            0x61 => x = memory[k as usize],
            0xb1 => x = 4 * (loaded & 15),
            0x02 => memory[k as usize] = a,
            0x03 => memory[k as usize] = x,
            0x84 => a = 0u32.wrapping_sub(a),
            0x05 => at += k as usize,
            0x06 => return k,
            0x16 => return a,
            0x07 => x = a,
            0x87 => a = x,
            _ if code & 7 == 4 => {
                let (long, by) = (u64::from(a), u64::from(operand));
                a = match code & 0xf0 {
                    0x00 => (long + by) as u32,
                    0x10 => (long + (1 << 32) - by) as u32,
                    0x20 => (long * by) as u32,
                    0x30 | 0x90 if by == 0 => return 0,
                    0x30 => (long / by) as u32,
                    0x90 => (long % by) as u32,
                    0x40 => a | operand,
                    0x50 => a & operand,
                    0xa0 => a ^ operand,
                    0x60 if by > 31 => 0,
                    0x60 => (long << by) as u32,
                    _ if by > 31 => 0,
                    _ => (long >> by) as u32,
                };
            }
            _ => {
                let holds = match code & 0xf0 {
                    0x10 => a == operand,
                    0x20 => a > operand,
                    0x30 => a >= operand,
                    _ => a & operand != 0,
                };
                at += usize::from(if holds { jt } else { jf });
            }
        }
    }
}
