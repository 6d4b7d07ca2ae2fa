//! Makes the program smaller by what the linker can do, where it can.
//!
//! Relocations of pointers in constant tables take 24 bytes each, and packed (DT_RELR) hardly any: 155 KB of the program. Functions that were made for several
//! types and came out alike are folded into one: 108 KB. Neither is everywhere to be had: the first needs glibc 2.36 where the program runs, the second lld, which
//! Rust uses by itself on x86-64 only. So each is used if a program that was linked with it has been seen to run here, and never for another machine than this one.

use std::env::{self, consts::EXE_SUFFIX};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Flags of the linker, each of which is tried.
const FLAGS: [&str; 2] = ["-Wl,-z,pack-relative-relocs", "-Wl,--icf=all"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| env::var(key).is_ok_and(|found| found == value);
    let is_native = env::var("HOST").ok() == env::var("TARGET").ok();
    if is("PROFILE", "release") && is("CARGO_CFG_TARGET_ENV", "gnu") && is_native {
        let flags = FLAGS.into_iter().filter(|flag| runs_with(flag).unwrap_or(false));
        flags.for_each(|flag| println!("cargo:rustc-link-arg-bins={flag}"));
    }
}

/// Returns true if a program runs that was linked with a flag, or `None` if it could not be built.
fn runs_with(flag: &str) -> Option<bool> {
    let directory = env::var("OUT_DIR").ok()?;
    let source = Path::new(&directory).join("linked.rs");
    let program = Path::new(&directory).join(format!("linked{EXE_SUFFIX}"));
    fs::write(&source, "fn main() {}").ok()?;
    let mut compiler = Command::new(env::var_os("RUSTC")?);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        compiler.args(["-C", &format!("linker={linker}")]);
    }
    let others = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    compiler.args(others.split('\x1f').filter(|flag| !flag.is_empty()));
    compiler.arg(&source).arg("-o").arg(&program).args(["-C", &format!("link-arg={flag}")]);
    let is_linked = compiler.stderr(Stdio::null()).status().ok()?.success();
    Some(is_linked && Command::new(&program).status().ok()?.success())
}
