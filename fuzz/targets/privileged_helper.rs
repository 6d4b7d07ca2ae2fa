//! See [`ringferry_fuzz::helper::helper`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::helper::helper(input);
});
