//! Messages on a stream of bytes: each is a frame, its length as a little-endian `u32` and then its bytes.

use serde::Serialize;
use serde::de::DeserializeOwned;

const LENGTH: usize = size_of::<u32>();

/// The longest message to a rank, in bytes.
pub(crate) const MAX_TO_RANK: usize = 1 << 20;

/// The longest message from a rank, in bytes: what it says has to fit into messages to others.
pub(crate) const MAX_FROM_RANK: usize = MAX_TO_RANK - 1024;

/// What is wrong with a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a message of {length} bytes is longer than {limit}")]
    TooLong { length: usize, limit: usize },
    #[error("a message of {length} bytes cannot be read: {source}")]
    Malformed { length: usize, source: postcard::Error },
    #[error("a message has {0} bytes too many")]
    Trailing(usize),
}

/// `message` as a frame of at most `limit` bytes, not counting the length.
pub(crate) fn encode(message: &impl Serialize, limit: usize) -> Result<Vec<u8>, FrameError> {
    let mut frame = postcard::to_extend(message, vec![0; LENGTH])
        .map_err(|source| FrameError::Malformed { length: 0, source })?;
    let length = frame.len() - LENGTH;
    match u32::try_from(length) {
        Ok(prefix) if length <= limit => frame[..LENGTH].copy_from_slice(&prefix.to_le_bytes()),
        _ => return Err(FrameError::TooLong { length, limit }),
    }
    Ok(frame)
}

/// Takes the first message off `input`, if all of it has come.
///
/// An announced length costs no memory before the bytes are there, and one of more than `limit` is refused
/// at once. After an error the stream is of no use.
pub(crate) fn decode<T: DeserializeOwned>(
    input: &mut Vec<u8>,
    limit: usize,
) -> Result<Option<T>, FrameError> {
    let Some((prefix, rest)) = input.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_le_bytes(*prefix) as usize;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    let Some(bytes) = rest.get(..length) else { return Ok(None) };
    let (message, rest) =
        postcard::take_from_bytes(bytes).map_err(|source| FrameError::Malformed { length, source })?;
    if !rest.is_empty() {
        return Err(FrameError::Trailing(rest.len()));
    }
    input.drain(..LENGTH + length);
    Ok(Some(message))
}
