//! A file's way to the medium: filled and hashed here, written there, at the same time.

use std::io;
use std::sync::mpsc;
use std::thread;

use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::memory::Memory;
use crate::storage::WriteFile;

/// The length of the parts that files are hashed by.
pub(crate) const CHUNK: usize = 1 << 20;

/// The least that a writer is given: one chunk being filled, one being written.
pub(crate) const LEAST_BUFFER: usize = 2 * CHUNK;

/// The most bytes that are written at once.
const BLOCK: usize = 8 << 20;

/// What stops a write.
pub(crate) enum Stopped {
    /// The file.
    File(io::Error),
    /// Where its content comes from.
    Source(CheckpointError),
}

/// Writes `bytes` from `read` through the two halves of a buffer; gives the hashes of the chunks.
pub(crate) fn stream(
    file: &mut dyn WriteFile,
    bytes: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<(), CheckpointError>,
    buffer: &mut Memory,
) -> Result<Vec<Digest>, Stopped> {
    let mut digests = Vec::with_capacity(bytes.div_ceil(CHUNK as u64) as usize);
    let written = thread::scope(|scope| {
        let (full, to_write) = mpsc::sync_channel::<(&mut [u8], usize)>(2);
        let (empty, to_fill) = mpsc::sync_channel(2);
        let half = buffer.len() / 2;
        for half in buffer.chunks_exact_mut(half) {
            // There is room for both.
            let _ = empty.send(half);
        }
        let writer = scope.spawn(move || {
            for (buffer, len) in to_write {
                file.write(&buffer[..len])?;
                // Nobody fills any more when all is filled.
                let _ = empty.send(buffer);
            }
            file.finish()
        });
        let mut at = 0;
        let filled = (|| {
            while at < bytes {
                // A writer that has failed gives no buffers back.
                let Ok(buffer) = to_fill.recv() else { break };
                let len = (buffer.len() as u64).min(bytes - at) as usize;
                read(at, &mut buffer[..len]).map_err(Stopped::Source)?;
                digests.extend(buffer[..len].chunks(CHUNK).map(Digest::of));
                at += len as u64;
                if full.send((buffer, len)).is_err() {
                    break;
                }
            }
            Ok(())
        })();
        drop(full);
        let written = writer.join().unwrap_or_else(|_| Err(io::Error::other("the writer panicked")));
        filled.and(written.map_err(Stopped::File))
    });
    written.map(|()| digests)
}

/// Writes what lies in memory as a whole; gives the hashes of the chunks.
pub(crate) fn whole(file: &mut dyn WriteFile, content: &[u8]) -> Result<Vec<Digest>, Stopped> {
    thread::scope(|scope| {
        let hasher = scope.spawn(|| content.chunks(CHUNK).map(Digest::of).collect());
        let written = content.chunks(BLOCK).try_for_each(|block| file.write(block));
        written.and_then(|()| file.finish()).map_err(Stopped::File)?;
        hasher.join().map_err(|_| Stopped::File(io::Error::other("hashing panicked")))
    })
}

/// A buffer of at most `budget` bytes, each half of whole chunks.
pub(crate) fn buffer(budget: u64) -> Result<Memory, CheckpointError> {
    let half = (budget / 2).clamp(CHUNK as u64, BLOCK as u64) as usize / CHUNK * CHUNK;
    Memory::zeroed(2 * half).ok_or(CheckpointError::NoMemory { bytes: budget })
}
