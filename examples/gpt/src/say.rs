//! Lines on the standard output.

/// Prints a line, like `println!`, but what goes wrong is an error of the calling function. Nobody reading any more is not
/// one: a run is worth finishing without an audience.
macro_rules! say {
    ($($arguments:tt)*) => {
        match std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($arguments)*))) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                return Err(anyhow::anyhow!("cannot write to the standard output: {error}"));
            }
            _ => {}
        }
    };
}
