//! Any bytes, as if another rank had sent them: `cargo +nightly fuzz run data`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zero_comm::fuzzing::{open_channel, read_posts, read_window};

fuzz_target!(|bytes: &[u8]| {
    let Some((reader, bytes)) = bytes.split_first() else { return };
    match reader % 3 {
        0 => drop(open_channel(bytes)),
        1 => drop(read_posts(bytes)),
        _ => assert!(read_window(bytes) <= bytes.len()),
    }
});
