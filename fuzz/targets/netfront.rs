//! See [`ringferry_fuzz::netfront::netfront`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::netfront::netfront(input);
});
