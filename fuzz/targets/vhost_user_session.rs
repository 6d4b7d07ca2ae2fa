//! See [`ringferry_fuzz::session::session`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::session::session(input);
});
