//! See [`ringferry_fuzz::store::store`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::store::store(input);
});
