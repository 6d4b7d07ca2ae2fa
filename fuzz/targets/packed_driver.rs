//! See [`ringferry_fuzz::driver::packed`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::driver::packed(input);
});
