//! Texts of bounded length.

/// The longest message of a failure, in bytes. Messages reach all ranks and the launcher, and a panic's can be of
/// any length.
pub(crate) const MESSAGE_BYTES: usize = 8 << 10;

/// The first characters of `text`, of at most `bytes` bytes.
pub(crate) fn clip(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|index| text.is_char_boundary(*index));
    &text[..end.unwrap_or(0)]
}

/// Cuts `text` to what a message may be, with a mark that it was cut.
pub(crate) fn cut(text: &mut String) {
    if text.len() > MESSAGE_BYTES {
        let mark = format!(" ... (cut, {} bytes in all)", text.len());
        text.truncate(clip(text, MESSAGE_BYTES - mark.len()).len());
        text.push_str(&mark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!([clip("", 3), clip("abc", 3), clip("abcd", 3), clip("äöü", 3)], ["", "abc", "abc", "ä"]);
        assert_eq!(clip("ä", 0), "");
    }

    #[test]
    fn a_message_that_fits_is_left_as_it_is() {
        let mut text = "x".repeat(MESSAGE_BYTES);
        cut(&mut text);
        assert_eq!(text, "x".repeat(MESSAGE_BYTES));
    }

    #[test]
    fn a_long_message_is_cut_and_says_so() {
        for text in ["x".repeat(MESSAGE_BYTES + 1), "ä".repeat(1 << 19), format!("x{}", "ä".repeat(1 << 19))]
        {
            let mut short = text.clone();
            cut(&mut short);
            assert!(short.len() <= MESSAGE_BYTES && short.len() > MESSAGE_BYTES - 4, "{}", short.len());
            let (kept, mark) = short.split_once(" ... ").unwrap();
            assert!(text.starts_with(kept));
            assert_eq!(mark, format!("(cut, {} bytes in all)", text.len()));
        }
    }
}
