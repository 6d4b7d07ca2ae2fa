//! See [`ringferry_fuzz::netback::netback`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::netback::netback(input);
});
