//! See [`ringferry_fuzz::driver::split`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::driver::split(input);
});
