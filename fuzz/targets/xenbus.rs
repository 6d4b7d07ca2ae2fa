//! See [`ringferry_fuzz::xenbus::xenbus`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::xenbus::xenbus(input);
});
