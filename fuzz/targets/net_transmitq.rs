//! See [`ringferry_fuzz::net::transmitq`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::net::transmitq(input);
});
