//! See [`ringferry_fuzz::filter::filter`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::filter::filter(input);
});
