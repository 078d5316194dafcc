//! What a panic said.

use std::any::Any;

/// The message of a panic, from the payload that [`catch_unwind`](std::panic::catch_unwind) gives.
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").to_owned()
}
