//! Waiting for what only looking can tell, with an end.

use std::thread;
use std::time::{Duration, Instant};

/// For how long a wait looks again and again: about what an operation on small buffers takes.
const EAGER: Duration = Duration::from_micros(200);
/// How long a wait sleeps at most.
const LONGEST_SLEEP: Duration = Duration::from_millis(5);

/// Looks until there is something to see, for `deadline` at most; `None` if it passed.
///
/// Asks for `news` before each sleep, whose error ends the wait.
pub(super) fn watch<T, E>(
    deadline: Duration,
    mut look: impl FnMut() -> Result<Option<T>, E>,
    mut news: impl FnMut() -> Result<(), E>,
) -> Result<Option<T>, E> {
    let since = Instant::now();
    loop {
        if let Some(seen) = look()? {
            return Ok(Some(seen));
        }
        let waited = since.elapsed();
        if waited >= deadline {
            return Ok(None);
        }
        if waited < EAGER {
            thread::yield_now();
        } else {
            news()?;
            thread::sleep((waited / 8).min(LONGEST_SLEEP).min(deadline - waited));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_there_is_seen_even_at_the_deadline() {
        assert_eq!(watch::<_, ()>(Duration::ZERO, || Ok(Some(1)), || Err(())), Ok(Some(1)));
    }

    #[test]
    fn a_wait_ends_at_the_deadline() {
        assert_eq!(watch::<(), ()>(Duration::ZERO, || Ok(None), || Ok(())), Ok(None));
    }

    #[test]
    fn bad_news_end_a_wait() {
        assert_eq!(watch::<(), _>(LONG, || Ok(None), || Err("news")), Err("news"));
    }

    #[test]
    fn a_wait_looks_until_it_sees() {
        let mut looks = 0;
        let look = || {
            looks += 1;
            Ok::<_, ()>((looks == 100).then_some("seen"))
        };
        assert_eq!(watch(LONG, look, || Ok(())), Ok(Some("seen")));
    }
}
