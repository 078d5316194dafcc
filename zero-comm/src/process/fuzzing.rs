//! Posts from the network, for whoever fuzzes them. Not part of the API.

use zero_core::Rank;

use super::group::seating;
use super::hosts::unbundle;
use super::posted::{data, disagree, requests};

/// Reads `bytes` as the posts of three members that a leader passes on, and returns whether they are those of one operation.
pub fn read_posts(bytes: &[u8]) -> bool {
    let mut posts = unbundle(bytes);
    posts.resize(3, &[]);
    let members = [0, 1, 2].map(Rank::new);
    if let Some(failure) = disagree(&posts, &members) {
        drop(failure.to_string());
        return false;
    }
    posts.iter().for_each(|post| drop(data(post).to_vec()));
    let requests = requests(&posts);
    (0..posts.len()).for_each(|position| drop(seating(&requests, position)));
    true
}
