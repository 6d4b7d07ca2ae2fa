//! See [`ringferry_fuzz::handover::handover`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::handover::handover(input);
});
