//! libFuzzer's entry to [`sconce_fuzz::store_connection`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sconce_fuzz::store_connection::run(data));
