//! Any bytes, as if they came by a control connection: `cargo +nightly fuzz run control`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zero_comm::fuzzing::{coordinate, listen, shake_hands};

fuzz_target!(|bytes: &[u8]| {
    let Some((reader, bytes)) = bytes.split_first() else { return };
    match reader % 3 {
        0 => drop(listen(bytes)),
        1 => drop(coordinate(bytes)),
        _ => assert!(!shake_hands(bytes), "a proof was guessed"),
    }
});
