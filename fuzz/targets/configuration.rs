//! libFuzzer's entry to [`sconce_fuzz::configuration`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sconce_fuzz::configuration::run(data));
