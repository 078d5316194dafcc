//! What users and schedulers send to this program.

use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::job::Event;
use super::process;

/// Makes signals events from now on. One that is ignored, as with `nohup`, stays so, for the ranks too.
pub(crate) fn listen(events: Sender<Event>) -> io::Result<()> {
    let wanted = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
    let mut signals = Signals::new(wanted.into_iter().filter(|signal| !process::is_ignored(*signal)))?;
    let pass_on = move || {
        for signal in signals.forever() {
            // Without a job there is only this program to end, should it hang on its last words.
            if events.send(Event::Signal(signal)).is_err() && asks_for_end(signal) {
                let _ = emulate_default_handler(signal);
            }
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(pass_on)?;
    Ok(())
}

/// Whether a signal asks for the end of the job, and is not just for the ranks.
pub(crate) fn asks_for_end(signal: i32) -> bool {
    matches!(signal, SIGHUP | SIGINT | SIGQUIT | SIGTERM)
}

/// What people call a signal.
pub(crate) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}
