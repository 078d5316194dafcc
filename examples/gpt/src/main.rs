//! `cargo run --release -p gpt`: see `--help`.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use gpt::flags::Flags;
use gpt::settings::Settings;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            // Steps that are skipped are told by the run itself.
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| "warn,zero_burn::optimizer=error".into()),
        )
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        // `--help` and `--version` arrive as errors, too.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            // Up to the usage, in one line.
            let told = error.to_string();
            let cause = told.lines().take_while(|line| !line.is_empty()).map(str::trim);
            eprintln!("{}; see --help", cause.collect::<Vec<_>>().join(" "));
            return ExitCode::from(2);
        }
    };
    match Settings::new(flags).and_then(|settings| gpt::run::run(&settings)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
