//! The secret that the processes of a job share.

use std::fmt;
use std::io;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// The secret that the processes of a job share, and nobody else has.
///
/// Processes prove to each other that they know it; it is never sent. What follows the proof is not
/// encrypted, so a job belongs in a network whose wires are trusted.
#[derive(Clone)]
pub struct Token([u8; Self::BYTES]);

impl Token {
    const BYTES: usize = 32;

    /// The shortest text that is taken for a secret.
    const MIN_TEXT: usize = 16;

    /// A new token, from the system's random numbers.
    ///
    /// # Errors
    ///
    /// The system has none.
    pub fn generate() -> io::Result<Self> {
        let mut bytes = [0; Self::BYTES];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The token as 64 hexadecimal digits, for a launcher that hands it to its processes.
    ///
    /// Pass it by environment or file: the arguments of a process can be read by every user of its host.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The token of a job that was given none: whoever knows its name knows it.
    pub(crate) fn of_job(name: &str) -> Self {
        Self::hashed(&format!("job {name}"))
    }

    fn hashed(text: &str) -> Self {
        Self(Sha256::new().chain_update("zero-comm token\0").chain_update(text).finalize().into())
    }

    pub(super) const fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// `text` as hexadecimal digits.
    fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 2 * Self::BYTES {
            return None;
        }
        let mut bytes = [0; Self::BYTES];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = (digit(digits[0])? << 4 | digit(digits[1])?) as u8;
        }
        Some(Self(bytes))
    }
}

/// 64 hexadecimal digits are the token; any other text is hashed into one.
impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        if text.len() < Self::MIN_TEXT {
            return Err(TokenError { bytes: text.len() });
        }
        Ok(Self::from_hex(text).unwrap_or_else(|| Self::hashed(text)))
    }
}

/// Takes the same time wherever two tokens differ.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
    }
}

impl Eq for Token {}

/// Never shows the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A text is too short to be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a token of {bytes} bytes can be guessed; use 64 hexadecimal digits, or at least {} bytes of text",
    Token::MIN_TEXT
)]
pub struct TokenError {
    bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_are_the_token_itself() {
        let token = Token::generate().unwrap();
        assert_eq!(token.to_hex().parse::<Token>().unwrap(), token);
        assert_eq!(token.to_hex().to_uppercase().parse::<Token>().unwrap(), token);
        assert_ne!(Token::generate().unwrap(), token);
    }

    #[test]
    fn any_other_text_is_hashed_whole() {
        let hex = "+f".repeat(32);
        let texts =
            ["0123456789abcdef", "0123456789abcdef ", "pass phrase, long", "ä".repeat(32).leak(), &hex];
        let tokens: Vec<_> = texts.iter().map(|text| text.parse::<Token>().unwrap().to_hex()).collect();
        for (index, token) in tokens.iter().enumerate() {
            assert!(!tokens[..index].contains(token), "{}", texts[index]);
        }
    }

    #[test]
    fn a_short_text_is_refused() {
        for text in ["", "secret", "0123456789abcde"] {
            let error = text.parse::<Token>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("a token of {} bytes", text.len())), "{error}");
        }
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::generate().unwrap();
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
