//! Filter expressions: libpcap's language, compiled by libpcap, which comes with tcpdump.
//!
//! The program links no libpcap, so that a switch has no C in it that parses what users say. `tcpdump -ddd` prints what it has compiled, and needs
//! neither an interface nor rights for that.

use std::io;
use std::process::{Command, Stdio};

use super::CaptureError;

/// One instruction: code, jt, jf, k.
pub(super) type Instruction = (u16, u8, u8, u32);

/// Compiles an expression.
///
/// # Errors
/// It is none, or there is no tcpdump.
pub(super) fn compile(expression: &str) -> Result<Vec<Instruction>, CaptureError> {
    compile_with("tcpdump", expression)
}

fn compile_with(tcpdump: &str, expression: &str) -> Result<Vec<Instruction>, CaptureError> {
    let mut command = Command::new(tcpdump);
    command.args(["-y", "EN10MB", "-s", "262144", "-ddd", "--"]).arg(expression).stdin(Stdio::null());
    let output = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CaptureError::NoTcpdump,
        _ => CaptureError::Filter(format!("tcpdump cannot be run: {error}")),
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("tcpdump failed");
        return Err(CaptureError::Filter(line.trim_start_matches("tcpdump: ").to_owned()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    read(&text).ok_or_else(|| CaptureError::Filter(format!("tcpdump printed no program: {text:?}")))
}

/// Reads what `tcpdump -ddd` prints: the number of instructions, then a line for each.
fn read(text: &str) -> Option<Vec<Instruction>> {
    let mut lines = text.lines();
    let count: usize = lines.next()?.trim().parse().ok()?;
    let program = lines.map(|line| {
        let mut words = line.split_whitespace();
        let instruction = (
            words.next()?.parse().ok()?,
            words.next()?.parse().ok()?,
            words.next()?.parse().ok()?,
            words.next()?.parse().ok()?,
        );
        words.next().is_none().then_some(instruction)
    });
    program.collect::<Option<Vec<_>>>().filter(|program| program.len() == count && count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_read_whole_or_not_at_all() {
        assert_eq!(read("2\n40 0 0 12\n6 0 0 262144\n"), Some(vec![(40, 0, 0, 12), (6, 0, 0, 262_144)]));
        for wrong in
            ["", "0\n", "2\n6 0 0 1\n", "1\n6 0 0\n", "1\n6 0 0 0 0\n", "1\n6 0 256 0\n", "x\n6 0 0 0\n"]
        {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn without_tcpdump_the_error_says_what_to_install() {
        let error = compile_with("/nonexistent/tcpdump", "tcp").unwrap_err();
        assert!(error.to_string().contains("apt install tcpdump"), "{error}");
    }

    #[test]
    fn what_tcpdump_says_is_passed_on() {
        // Stands for a tcpdump that does not like what it is asked.
        let error = compile_with("false", "tcp prt 80").unwrap_err();
        assert_eq!(error.to_string(), "--filter: tcpdump failed");
        let error = compile_with("true", "tcp").unwrap_err();
        assert_eq!(error.to_string(), "--filter: tcpdump printed no program: \"\"");
    }
}
