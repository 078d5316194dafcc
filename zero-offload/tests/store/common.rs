//! What tests of stores share, those within the crate too.

use tempfile::TempDir;

use super::{Engine, NvmeStore, Slot, StoreError, StoreOptions};

/// The engines that there are.
pub(crate) fn engines() -> Vec<Engine> {
    let directory = TempDir::new().unwrap();
    let options = StoreOptions { engine: Engine::Uring, ..StoreOptions::new(directory.path()) };
    match NvmeStore::open(options) {
        Ok(_) => vec![Engine::Threads, Engine::Uring],
        Err(StoreError::NoUring { source }) => {
            println!("not tested with io_uring: {source}");
            vec![Engine::Threads]
        }
        Err(error) => panic!("{error}"),
    }
}

/// Bytes of which no block equals another.
pub(crate) fn content(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|i| (i.wrapping_mul(0x9E37_79B9).wrapping_add(seed * 77) >> 7) as u8).collect()
}

/// Reads to an odd address.
pub(crate) fn read(slot: &Slot) -> Result<Vec<u8>, StoreError> {
    let mut bytes = vec![0xEE; slot.bytes() as usize + 1];
    slot.read(0, &mut bytes[1..])?;
    Ok(bytes.split_off(1))
}
