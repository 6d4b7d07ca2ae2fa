//! Packet filters: an interpreter of classic BPF (cBPF), the language that libpcap compiles filter expressions to.
//!
//! A client compiles an expression such as `tcp port 80` and sends the program. [`Filter::new`] verifies it, once, and decodes it to a form in which
//! nothing invalid can be said; a worker then calls [`Filter::matches`] for each frame. The program is its sender's word, so it is treated as hostile:
//! it has at most [`MAX_INSTRUCTIONS`] instructions and jumps only forward, so it ends after as many steps; it reads only the frame and 16 words of
//! scratch memory of its own, and writes only these.
//!
//! The machine is that of McCanne and Jacobson ("The BSD Packet Filter", USENIX 1993) as libpcap has it: an accumulator `A`, an index register `X`,
//! both of 32 bits, and the result is the number of bytes to keep, 0 for none. A load beyond the frame, and a division by 0, end the program
//! with 0. Extensions of the Linux kernel (negative offsets for what lies beside the packet) are not known; without an interface libpcap makes none.

use ringferry_memory::ReadSlice;
use thiserror::Error;

use crate::frame::PREFIX;

/// Upper bound on the instructions of a program, as in the Linux kernel and in BSD.
pub const MAX_INSTRUCTIONS: usize = 4096;

/// Words of scratch memory.
const SCRATCH: usize = 16;

/// One instruction as it is sent: `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Class, size, mode or operation, and source.
    pub code: u16,
    /// Instructions to skip if the condition of a jump is true.
    pub jt: u8,
    /// Instructions to skip if it is not.
    pub jf: u8,
    /// The operand.
    pub k: u32,
}

/// Offsets from here on mean something else than a place in the frame to Linux: `SKF_LL_OFF`, below which is `SKF_NET_OFF`, below which is `SKF_AD_OFF`.
const LEAST_ANCILLARY: u32 = -0x20_0000_i32 as u32;

/// The reason for which a program is no filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FilterError {
    /// It has no instruction, or more than [`MAX_INSTRUCTIONS`].
    #[error("a filter program has 1 to {MAX_INSTRUCTIONS} instructions, and this one has {0}")]
    Length(usize),
    /// An instruction is not one of cBPF.
    #[error("instruction {at} of the filter program has the unknown code {code:#06x}")]
    Code {
        /// Index of the instruction.
        at: usize,
        /// What it says.
        code: u16,
    },
    /// A jump goes beyond the last instruction.
    #[error("instruction {0} of the filter program jumps beyond its end")]
    Jump(usize),
    /// A word of scratch memory that does not exist is meant.
    #[error("instruction {at} of the filter program uses word {word} of a memory of {SCRATCH}")]
    Memory {
        /// Index of the instruction.
        at: usize,
        /// The word.
        word: u32,
    },
    /// It asks for what only a socket of Linux knows of a frame.
    #[error(
        "instruction {0} of the filter program asks for what only a socket of Linux knows of a frame, as inbound, outbound and ifindex do: \
         --direction says which way"
    )]
    Ancillary(usize),
    /// A constant divisor is 0, or a constant shift is 32 or more.
    #[error("instruction {0} of the filter program divides by 0, or shifts by 32 or more")]
    Operand(usize),
    /// The last instruction does not return.
    #[error("the filter program does not end with a return")]
    End,
}

/// An operand: a constant, or the index register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operand {
    K(u32),
    X,
}

/// Bytes of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Word,
    Half,
    Byte,
}

impl Size {
    fn bytes(self) -> usize {
        match self {
            Size::Word => 4,
            Size::Half => 2,
            Size::Byte => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alu {
    Add,
    Sub,
    Mul,
    Div,
    Or,
    And,
    Lsh,
    Rsh,
    Mod,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Equal,
    Greater,
    GreaterOrEqual,
    Set,
}

/// A verified instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// A = a constant.
    LoadConstant(u32),
    /// A = the length of the frame.
    LoadLength,
    /// A = a word of scratch memory; the index is below [`SCRATCH`].
    LoadScratch(u8),
    /// A = bytes of the frame at a constant offset.
    LoadAbsolute(Size, u32),
    /// A = bytes of the frame at X plus an offset.
    LoadIndirect(Size, u32),
    IndexConstant(u32),
    IndexLength,
    IndexScratch(u8),
    /// X = 4 * the low half of a byte of the frame: the length of an IPv4 header.
    IndexHeaderLength(u32),
    StoreA(u8),
    StoreX(u8),
    Alu(Alu, Operand),
    Negate,
    /// Skip so many instructions.
    Jump(u32),
    Branch(Condition, Operand, u8, u8),
    ReturnConstant(u32),
    ReturnA,
    AToX,
    XToA,
}

impl Op {
    /// Returns true if the instruction loads bytes that may lie behind the first [`PREFIX`].
    fn may_be_far(self) -> bool {
        match self {
            Op::LoadAbsolute(size, at) => at as usize + size.bytes() > PREFIX,
            Op::IndexHeaderLength(at) => at as usize >= PREFIX,
            Op::LoadIndirect(..) => true,
            _ => false,
        }
    }
}

/// A verified program.
#[derive(Clone, Debug)]
pub struct Filter {
    ops: Box<[Op]>,
    /// Loads that may be of bytes behind the first [`PREFIX`].
    far_loads: usize,
}

impl Filter {
    /// Verifies a program.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub fn new(program: &[Instruction]) -> Result<Filter, FilterError> {
        if !(1..=MAX_INSTRUCTIONS).contains(&program.len()) {
            return Err(FilterError::Length(program.len()));
        }
        let ops: Result<Box<[Op]>, _> =
            program.iter().enumerate().map(|(at, one)| decode(at, one, program.len())).collect();
        let ops = ops?;
        match ops.last() {
            Some(Op::ReturnConstant(_) | Op::ReturnA) => {
                let far_loads = ops.iter().filter(|op| op.may_be_far()).count();
                Ok(Filter { ops, far_loads })
            }
            _ => Err(FilterError::End),
        }
    }

    /// Returns the number of instructions, which is also the most that are executed for a frame.
    #[must_use]
    pub fn instructions(&self) -> usize {
        self.ops.len()
    }

    /// Returns how many of them may load bytes behind the first [`PREFIX`] of a frame, for which its pieces are looked through.
    #[must_use]
    pub fn far_loads(&self) -> usize {
        self.far_loads
    }

    /// Returns true if a frame, the concatenation of `first` and `rest`, passes. Bytes in `rest` may be a peer's, who changes them meanwhile; the
    /// verdict is then about any mixture of what was there.
    #[must_use]
    pub fn matches(&self, first: &[u8], rest: &[ReadSlice<'_>], len: u32) -> bool {
        self.run(&Bytes { first, rest }, len) > 0
    }

    fn run(&self, frame: &Bytes<'_, '_>, len: u32) -> u32 {
        let (mut a, mut x, mut at) = (0u32, 0u32, 0usize);
        let mut scratch = [0u32; SCRATCH];
        while let Some(op) = self.ops.get(at) {
            at += 1;
            match *op {
                Op::LoadConstant(k) => a = k,
                Op::LoadLength => a = len,
                Op::LoadScratch(word) => a = scratch[usize::from(word)],
                Op::LoadAbsolute(size, k) => match frame.load(size, k) {
                    Some(value) => a = value,
                    None => return 0,
                },
                Op::LoadIndirect(size, k) => match x.checked_add(k).and_then(|at| frame.load(size, at)) {
                    Some(value) => a = value,
                    None => return 0,
                },
                Op::IndexConstant(k) => x = k,
                Op::IndexLength => x = len,
                Op::IndexScratch(word) => x = scratch[usize::from(word)],
                Op::IndexHeaderLength(k) => match frame.load(Size::Byte, k) {
                    Some(byte) => x = (byte & 0xf) * 4,
                    None => return 0,
                },
                Op::StoreA(word) => scratch[usize::from(word)] = a,
                Op::StoreX(word) => scratch[usize::from(word)] = x,
                Op::Alu(operation, operand) => match compute(operation, a, value(operand, x)) {
                    Some(result) => a = result,
                    None => return 0,
                },
                Op::Negate => a = a.wrapping_neg(),
                Op::Jump(skip) => at += skip as usize,
                Op::Branch(condition, operand, jt, jf) => {
                    let operand = value(operand, x);
                    let holds = match condition {
                        Condition::Equal => a == operand,
                        Condition::Greater => a > operand,
                        Condition::GreaterOrEqual => a >= operand,
                        Condition::Set => a & operand != 0,
                    };
                    at += usize::from(if holds { jt } else { jf });
                }
                Op::ReturnConstant(k) => return k,
                Op::ReturnA => return a,
                Op::AToX => x = a,
                Op::XToA => a = x,
            }
        }
        0
    }
}

#[inline]
fn value(operand: Operand, x: u32) -> u32 {
    match operand {
        Operand::K(k) => k,
        Operand::X => x,
    }
}

/// Computes, or returns `None` for a division by 0.
#[inline]
fn compute(operation: Alu, a: u32, b: u32) -> Option<u32> {
    Some(match operation {
        Alu::Add => a.wrapping_add(b),
        Alu::Sub => a.wrapping_sub(b),
        Alu::Mul => a.wrapping_mul(b),
        Alu::Div => a.checked_div(b)?,
        Alu::Mod => a.checked_rem(b)?,
        Alu::Or => a | b,
        Alu::And => a & b,
        Alu::Xor => a ^ b,
        Alu::Lsh => a.checked_shl(b).unwrap_or(0),
        Alu::Rsh => a.checked_shr(b).unwrap_or(0),
    })
}

/// The bytes of a frame.
struct Bytes<'f, 'm> {
    first: &'f [u8],
    rest: &'f [ReadSlice<'m>],
}

impl Bytes<'_, '_> {
    /// Loads big-endian bytes; `None` if they are not all inside the frame.
    #[inline]
    fn load(&self, size: Size, at: u32) -> Option<u32> {
        Some(match size {
            Size::Word => u32::from_be_bytes(self.bytes(at)?),
            Size::Half => u16::from_be_bytes(self.bytes(at)?).into(),
            Size::Byte => u8::from_be_bytes(self.bytes(at)?).into(),
        })
    }

    #[inline]
    fn bytes<const N: usize>(&self, at: u32) -> Option<[u8; N]> {
        let at = at as usize;
        match self.first.get(at..).and_then(|bytes| bytes.first_chunk()) {
            Some(bytes) => Some(*bytes),
            None => self.bytes_behind(at),
        }
    }

    #[cold]
    fn bytes_behind<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let mut out = [0; N];
        let mut have = 0;
        let mut skip = at;
        if let Some(bytes) = self.first.get(at..) {
            have = bytes.len().min(N);
            out[..have].copy_from_slice(&bytes[..have]);
            skip = self.first.len();
        }
        skip -= self.first.len();
        for piece in self.rest {
            if have == N {
                break;
            }
            let left = skip.min(piece.len());
            skip -= left;
            have += piece.skip(left).copy_to(&mut out[have..]);
        }
        (have == N).then_some(out)
    }
}

/// Verifies one instruction of a program of `len`.
fn decode(at: usize, one: &Instruction, len: usize) -> Result<Op, FilterError> {
    let Instruction { code, jt, jf, k } = *one;
    let unknown = FilterError::Code { at, code };
    let operand = if code & 0x08 == 0 { Operand::K(k) } else { Operand::X };
    let scratch = || match u8::try_from(k) {
        Ok(word) if usize::from(word) < SCRATCH => Ok(word),
        _ => Err(FilterError::Memory { at, word: k }),
    };
    // A jump may go to the last instruction at most.
    let inside = |skip: u32| {
        let target = (at as u64).saturating_add(1 + u64::from(skip));
        if target < len as u64 { Ok(()) } else { Err(FilterError::Jump(at)) }
    };
    // Linux's SKF_AD_OFF and SKF_LL_OFF: beyond all frames, and negative for those who use them.
    if let 0x20 | 0x28 | 0x30 = code
        && k >= LEAST_ANCILLARY
    {
        return Err(FilterError::Ancillary(at));
    }
    Ok(match code {
        // BPF_LD
        0x00 => Op::LoadConstant(k),
        0x80 => Op::LoadLength,
        0x60 => Op::LoadScratch(scratch()?),
        0x20 => Op::LoadAbsolute(Size::Word, k),
        0x28 => Op::LoadAbsolute(Size::Half, k),
        0x30 => Op::LoadAbsolute(Size::Byte, k),
        0x40 => Op::LoadIndirect(Size::Word, k),
        0x48 => Op::LoadIndirect(Size::Half, k),
        0x50 => Op::LoadIndirect(Size::Byte, k),
        // BPF_LDX
        0x01 => Op::IndexConstant(k),
        0x81 => Op::IndexLength,
        0x61 => Op::IndexScratch(scratch()?),
        0xb1 => Op::IndexHeaderLength(k),
        // BPF_ST, BPF_STX
        0x02 => Op::StoreA(scratch()?),
        0x03 => Op::StoreX(scratch()?),
        // BPF_ALU
        0x84 => Op::Negate,
        _ if code & !0xf8 == 0x04 => {
            let operation = match code & 0xf0 {
                0x00 => Alu::Add,
                0x10 => Alu::Sub,
                0x20 => Alu::Mul,
                0x30 => Alu::Div,
                0x40 => Alu::Or,
                0x50 => Alu::And,
                0x60 => Alu::Lsh,
                0x70 => Alu::Rsh,
                0x90 => Alu::Mod,
                0xa0 => Alu::Xor,
                _ => return Err(unknown),
            };
            match (operation, operand) {
                (Alu::Div | Alu::Mod, Operand::K(0)) => return Err(FilterError::Operand(at)),
                (Alu::Lsh | Alu::Rsh, Operand::K(32..)) => return Err(FilterError::Operand(at)),
                _ => Op::Alu(operation, operand),
            }
        }
        // BPF_JMP
        0x05 => {
            inside(k)?;
            Op::Jump(k)
        }
        _ if code & !0xf8 == 0x05 => {
            let condition = match code & 0xf0 {
                0x10 => Condition::Equal,
                0x20 => Condition::Greater,
                0x30 => Condition::GreaterOrEqual,
                0x40 => Condition::Set,
                _ => return Err(unknown),
            };
            inside(jt.into())?;
            inside(jf.into())?;
            Op::Branch(condition, operand, jt, jf)
        }
        // BPF_RET
        0x06 => Op::ReturnConstant(k),
        0x16 => Op::ReturnA,
        // BPF_MISC
        0x07 => Op::AToX,
        0x87 => Op::XToA,
        _ => return Err(unknown),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn program(text: &str) -> Vec<Instruction> {
        let number = |word: &str| word.parse::<u32>().unwrap();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines
            .map(|line| {
                let words: Vec<_> = line.split(' ').map(number).collect();
                Instruction { code: words[0] as u16, jt: words[1] as u8, jf: words[2] as u8, k: words[3] }
            })
            .collect()
    }

    /// `tcpdump -y EN10MB -ddd "tcp port 80"`, without the line that counts.
    const TCP_PORT_80: &str = "
        40 0 0 12
        21 0 6 34525
        48 0 0 20
        21 0 15 6
        40 0 0 54
        21 12 0 80
        40 0 0 56
        21 10 11 80
        21 0 10 2048
        48 0 0 23
        21 0 8 6
        40 0 0 20
        69 6 0 8191
        177 0 0 14
        72 0 0 14
        21 2 0 80
        72 0 0 16
        21 0 1 80
        6 0 0 262144
        6 0 0 0";

    fn tcp(v6: bool, port: u16) -> Vec<u8> {
        let [high, low] = port.to_be_bytes();
        let packet = crate::testing::Packet {
            ports: [0x12, 0x34, high, low],
            ..crate::testing::Packet::plain(v6, true, vec![7; 90])
        };
        packet.sent(0).1
    }

    #[test]
    fn what_libpcap_compiles_finds_what_it_is_about() {
        let filter = Filter::new(&program(TCP_PORT_80)).unwrap();
        assert_eq!((filter.instructions(), filter.far_loads()), (20, 2));
        for v6 in [false, true] {
            for (port, expected) in [(80, true), (81, false)] {
                let frame = tcp(v6, port);
                assert_eq!(filter.matches(&frame, &[], frame.len() as u32), expected, "{v6} {port}");
                // Wherever the frame is cut, and whatever of it is private.
                for first in 0..frame.len() {
                    for second in (first..frame.len()).step_by(7) {
                        let rest = [&frame[first..second], &frame[second..]].map(ReadSlice::from);
                        assert_eq!(filter.matches(&frame[..first], &rest, frame.len() as u32), expected);
                    }
                }
            }
        }
        assert!(!filter.matches(&tcp(false, 80)[..37], &[], 37), "a port that is not there does not match");
        assert!(!filter.matches(&[], &[], 0));
    }

    /// Runs a program that leaves its result in A.
    fn result(text: &str, frame: &[u8]) -> u32 {
        let text = format!("{text}\n22 0 0 0");
        Filter::new(&program(&text)).unwrap().run(&Bytes { first: frame, rest: &[] }, frame.len() as u32)
    }

    #[test]
    fn every_instruction_does_what_its_name_says() {
        let frame = [0x10, 0x20, 0x30, 0x40, 0x50];
        for (text, expected) in [
            ("0 0 0 7", 7),
            ("128 0 0 0", 5),
            ("32 0 0 1", 0x2030_4050),
            ("40 0 0 1", 0x2030),
            ("48 0 0 1", 0x20),
            ("1 0 0 2\n64 0 0 4294967295", 0),
            ("1 0 0 1\n64 0 0 0", 0x2030_4050),
            ("1 0 0 2\n72 0 0 1", 0x4050),
            ("1 0 0 2\n80 0 0 2", 0x50),
            ("129 0 0 0\n135 0 0 0", 5),
            ("177 0 0 0\n135 0 0 0", 0),
            ("48 0 0 4\n177 0 0 4\n135 0 0 0", 0),
            ("0 0 0 9\n2 0 0 15\n0 0 0 1\n96 0 0 15", 9),
            ("1 0 0 9\n3 0 0 0\n97 0 0 0\n135 0 0 0", 9),
            ("0 0 0 6\n7 0 0 0\n0 0 0 1\n135 0 0 0", 6),
            ("0 0 0 6\n4 0 0 4", 10),
            ("0 0 0 6\n20 0 0 7", u32::MAX),
            ("0 0 0 6\n36 0 0 4", 24),
            ("0 0 0 6\n52 0 0 4", 1),
            ("0 0 0 6\n148 0 0 4", 2),
            ("0 0 0 6\n68 0 0 1", 7),
            ("0 0 0 6\n84 0 0 3", 2),
            ("0 0 0 6\n164 0 0 3", 5),
            ("0 0 0 6\n100 0 0 31", 0),
            ("0 0 0 6\n116 0 0 1", 3),
            ("0 0 0 6\n132 0 0 0", 6u32.wrapping_neg()),
            ("0 0 0 6\n1 0 0 2\n12 0 0 0", 8),
            ("0 0 0 6\n1 0 0 2\n60 0 0 0", 3),
            ("0 0 0 6\n1 0 0 32\n108 0 0 0", 0),
            // A division by X ends the program if that is 0.
            ("0 0 0 6\n60 0 0 0", 0),
            ("0 0 0 6\n156 0 0 0", 0),
            ("0 0 0 6\n5 0 0 1\n0 0 0 1", 6),
            ("0 0 0 6\n21 1 0 6\n0 0 0 1", 6),
            ("0 0 0 6\n21 0 1 7\n0 0 0 1", 6),
            ("0 0 0 6\n37 1 0 5\n0 0 0 1", 6),
            ("0 0 0 6\n37 1 0 6\n0 0 0 1", 1),
            ("0 0 0 6\n53 1 0 6\n0 0 0 1", 6),
            ("0 0 0 6\n69 1 0 2\n0 0 0 1", 6),
            ("0 0 0 6\n69 1 0 8\n0 0 0 1", 1),
            ("0 0 0 6\n1 0 0 6\n29 1 0 0\n0 0 0 1", 6),
            ("6 0 0 3", 3),
            // Beyond the frame.
            ("32 0 0 2", 0),
            ("48 0 0 4292870143", 0),
        ] {
            assert_eq!(result(text, &frame), expected, "{text}");
        }
    }

    #[test]
    fn what_could_go_wrong_at_run_time_is_refused_before() {
        let refused = |text: &str| Filter::new(&program(text)).unwrap_err();
        assert_eq!(refused(""), FilterError::Length(0));
        assert_eq!(refused(&"0 0 0 0\n".repeat(4097)), FilterError::Length(4097));
        assert!(Filter::new(&program(&("0 0 0 0\n".repeat(4095) + "6 0 0 1"))).is_ok());
        assert_eq!(refused("0 0 0 1"), FilterError::End);
        assert_eq!(refused("5 0 0 1\n6 0 0 0"), FilterError::Jump(0));
        assert_eq!(refused("5 0 0 4294967295\n6 0 0 0"), FilterError::Jump(0));
        assert_eq!(refused("21 1 0 0\n6 0 0 0"), FilterError::Jump(0));
        assert_eq!(refused("21 0 255 0\n6 0 0 0"), FilterError::Jump(0));
        assert_eq!(refused("2 0 0 16\n6 0 0 0"), FilterError::Memory { at: 0, word: 16 });
        assert_eq!(refused("96 0 0 256\n6 0 0 0"), FilterError::Memory { at: 0, word: 256 });
        // inbound, as libpcap compiles it for an interface: ld #type.
        assert_eq!(refused("40 0 0 4294963204\n6 0 0 0"), FilterError::Ancillary(0));
        assert_eq!(refused("52 0 0 0\n6 0 0 0"), FilterError::Operand(0));
        assert_eq!(refused("100 0 0 32\n6 0 0 0"), FilterError::Operand(0));
        assert_eq!(refused("180 0 0 32\n6 0 0 0"), FilterError::Code { at: 0, code: 180 });
        assert_eq!(refused("65535 0 0 0\n6 0 0 0"), FilterError::Code { at: 0, code: 65535 });
    }

    proptest! {
        /// Where the frame is cut makes no difference, whatever the program.
        #[test]
        fn a_verified_program_sees_the_frame_and_not_its_pieces(
            program in prop::collection::vec((any::<u16>(), 0..4u8, 0..4u8, 0..40u32), 1..40),
            frame in prop::collection::vec(any::<u8>(), 0..40),
            cut in 0..40usize,
        ) {
            let codes = [0, 0x80, 0x60, 0x20, 0x28, 0x30, 0x40, 0x48, 0x50, 1, 0x81, 0x61, 0xb1, 2, 3, 0x84, 4, 0x0c,
                0x14, 0x24, 0x3c, 0x9c, 0x6c, 0x7c, 0x5c, 5, 0x15, 0x1d, 0x25, 0x35, 0x45, 7, 0x87];
            let mut program: Vec<_> = program
                .into_iter()
                .map(|(code, jt, jf, k)| Instruction { code: codes[usize::from(code) % codes.len()], jt, jf, k })
                .collect();
            program.push(Instruction { code: 0x16, jt: 0, jf: 0, k: 0 });
            if let Ok(filter) = Filter::new(&program) {
                let whole = filter.run(&Bytes { first: &frame, rest: &[] }, frame.len() as u32);
                let (first, rest) = frame.split_at(cut.min(frame.len()));
                let cut = filter.run(&Bytes { first, rest: &[ReadSlice::from(rest)] }, frame.len() as u32);
                prop_assert_eq!(whole, cut);
            }
        }
    }
}
