//! See [`ringferry_fuzz::forward::forward`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::forward::forward(input);
});
