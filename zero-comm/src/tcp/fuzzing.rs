//! What comes by connections between ranks, for whoever fuzzes it. Not part of the API.

use zero_core::{Rank, WorldSize};

use super::channel::Channel;
use crate::reading::{ReadAnswer, ReadRequest};
use crate::windows;

/// Reads `bytes` as the hello of who dials rank 1 of three, and returns whether they are one.
pub fn open_channel(bytes: &[u8]) -> bool {
    WorldSize::new(3).is_some_and(|size| Channel::decode(bytes, Rank::new(1), size).is_some())
}

/// Reads `bytes` as a request for a part of a window that consists of the bytes that follow it, and as an
/// answer to one; returns how many bytes would be sent.
pub fn read_window(bytes: &[u8]) -> usize {
    if let Some((answer, _)) = bytes.split_first_chunk::<{ ReadAnswer::BYTES }>() {
        let _ = ReadAnswer::decode(answer);
    }
    let Some((request, window)) = bytes.split_first_chunk::<{ ReadRequest::BYTES }>() else { return 0 };
    let ReadRequest { offset, length, .. } = ReadRequest::decode(request);
    windows::part(window.len(), offset, length).map_or(0, |part| window[part].len())
}
