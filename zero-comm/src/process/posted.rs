//! What a member posts for an operation: the operation itself and, if they are few, its bytes.

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use crate::failure::Failure;
use crate::request::{Request, disagreement};
use crate::{Call, CommError};

/// The most bytes of data that travel with a post.
pub(crate) const EAGER_BYTES: usize = 8 << 10;

/// Where data begins is a multiple of this, so that it is aligned for every element type.
const ALIGNMENT: usize = 8;

#[derive(Deserialize, Serialize)]
struct Header<'a, R = Request> {
    request: R,
    label: &'a str,
}

/// The first part of a post; data may follow it.
pub(crate) fn encode(request: &Request, label: &str) -> Vec<u8> {
    let header = Header { request, label };
    let bytes = postcard::to_extend(&header, vec![0; ALIGNMENT]);
    let mut bytes = bytes.expect("a request and a text, written to memory, do not fail");
    let length = (bytes.len() - ALIGNMENT) as u64;
    bytes[..ALIGNMENT].copy_from_slice(&length.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes
}

/// The header and the data of a post; `None` if it is garbled.
fn parts(post: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = post.split_first_chunk::<ALIGNMENT>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let data = rest.get(length.checked_next_multiple_of(ALIGNMENT)?..)?;
    Some((&rest[..length], data))
}

/// The data of a post.
pub(crate) fn data(post: &[u8]) -> &[u8] {
    parts(post).map_or(&[], |(_, data)| data)
}

/// What the members came for, by position; members whose posts are garbled are left out.
pub(crate) fn requests(posts: &[&[u8]]) -> Vec<Request> {
    let request = |post: &&[u8]| Some(decode(parts(post)?.0)?.request);
    posts.iter().filter_map(request).collect()
}

fn decode(header: &[u8]) -> Option<Header<'_>> {
    postcard::from_bytes(header).ok()
}

/// Why the posts of `members`, by position, are not those of one operation, if so.
pub(crate) fn disagree(posts: &[&[u8]], members: &[Rank]) -> Option<Failure> {
    let own = |post: &&[u8]| parts(post).map(|(header, _)| header.to_vec());
    // Nearly always all are equal, to the byte.
    if let Some((first, rest)) = posts.split_first() {
        let first = parts(first).map(|(header, _)| header);
        if first.is_some() && rest.iter().all(|post| parts(post).map(|(header, _)| header) == first) {
            let decoded = first.and_then(decode);
            if decoded.is_some_and(|header| header.request.is_uniform()) {
                return None;
            }
        }
    }
    let headers: Vec<_> = posts.iter().map(own).collect();
    let mut calls = Vec::with_capacity(posts.len());
    for (header, rank) in headers.iter().zip(members) {
        let Some(header) = header.as_deref().and_then(decode) else {
            let reason = "what it posted for an operation cannot be read".to_owned();
            return Some(Failure::Aborted { rank: *rank, reason });
        };
        calls.push(header);
    }
    let sides: Vec<_> = calls.iter().map(|header| (&header.request, header.label)).collect();
    let (first, second) = disagreement(&sides)?;
    let call = |position: usize| {
        let (request, label) = sides[position];
        Box::new(Call {
            rank: members[position],
            operation: request.kind(),
            arguments: request.arguments(),
            label: label.to_owned(),
        })
    };
    let error = CommError::Mismatch { first: call(first), second: call(second) };
    Some(Failure::Error { error, blamed: None })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zero_core::DType;

    use super::*;
    use crate::{OpKind, ReduceOp};

    fn post(length: usize, label: &str, bytes: &[u8]) -> Vec<u8> {
        let request = Request::AllReduce { dtype: DType::F32, length, op: ReduceOp::Sum };
        let mut post = encode(&request, label);
        post.extend(bytes);
        post
    }

    fn failure(posts: &[Vec<u8>]) -> Option<Failure> {
        let posts: Vec<_> = posts.iter().map(Vec::as_slice).collect();
        disagree(&posts, &[Rank::new(3), Rank::new(5), Rank::new(7)][..posts.len()])
    }

    #[test]
    fn data_follows_the_header() {
        for label in ["", "a", "weights", "twelve bytes"] {
            let post = post(3, label, &[1, 2, 3]);
            assert_eq!(data(&post), [1, 2, 3]);
            assert_eq!((post.len() - 3) % ALIGNMENT, 0);
        }
    }

    #[test]
    fn equal_calls_agree_whatever_their_data() {
        assert_eq!(failure(&[post(3, "a", &[1]), post(3, "a", &[2]), post(3, "", &[])]), None);
    }

    #[test]
    fn different_calls_are_both_named() {
        let failure = failure(&[post(3, "a", &[]), post(3, "a", &[]), post(4, "a", &[])]);
        let Some(Failure::Error { error: CommError::Mismatch { first, second }, .. }) = failure else {
            panic!("got {failure:?}");
        };
        assert_eq!((first.rank, second.rank), (Rank::new(3), Rank::new(7)));
        assert_eq!((first.operation, first.arguments.as_str()), (OpKind::AllReduce, "sum, 3 x f32"));
        assert_eq!(second.arguments, "sum, 4 x f32");
    }

    proptest! {
        #[test]
        fn garbled_posts_are_blamed_on_who_posted_them(garbage: Vec<u8>) {
            let blamed = failure(&[post(3, "a", &[]), garbage.clone()]).and_then(|failure| failure.blamed());
            prop_assert!(blamed.is_none() || blamed == Some(Rank::new(5)));
            data(&garbage);
        }
    }
}
