//! The hash of bytes at rest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_128;

/// The XXH3 128-bit hash of some bytes; displays as 32 lower-case hexadecimal digits, as `xxhsum -H2` does.
///
/// It finds what disks, networks and tools damage; it does not keep out who damages on purpose.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(u128);

impl Digest {
    /// How many digits the text of one has.
    pub const DIGITS: usize = 32;

    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_128(bytes))
    }

    /// The hash of a file from those of its chunks: of their 16 bytes each, most significant first, in order.
    pub fn of_chunks(chunks: &[Self]) -> Self {
        let bytes: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.0.to_be_bytes()).collect();
        Self::of(&bytes)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not 32 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a hash is 32 lower-case hexadecimal digits, not `{0}`")]
pub struct NotADigest(String);

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let refused = || NotADigest(text.chars().take(2 * Self::DIGITS).collect());
        // One spelling for one hash: a changed letter is a changed hash.
        let spelled = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != Self::DIGITS || !text.bytes().all(spelled) {
            return Err(refused());
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| refused())
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn a_digest_is_written_as_xxhsum_writes_it() {
        // `printf '' | xxhsum -H2` and `printf abc | xxhsum -H2`.
        assert_eq!(Digest::of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
        assert_eq!(Digest::of(b"abc").to_string(), "06b05ab6733a618578af5f94892f3950");
    }

    #[test]
    fn a_digest_has_one_spelling() {
        let digest = Digest::of(b"abc");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for text in ["", "06", &digest.to_string().to_uppercase(), "+6b05ab6733a618578af5f94892f3950"] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
