//! See [`ringferry_fuzz::control::queue`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::control::queue(input);
});
