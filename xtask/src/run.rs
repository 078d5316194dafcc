//! `cargo xtask run`: builds `zero-run`, the launcher of `zero-comm`, and becomes it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;
use serde::Deserialize;
use xshell::{Shell, cmd};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What `zero-run` is given.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Runs the launcher where the task was called, with the arguments, the input and the signals of this process.
pub(crate) fn run(sh: &Shell, options: &Options) -> anyhow::Result<ExitCode> {
    let build = "build --quiet -p zero-comm --features launcher --bin zero-run";
    let build = build.split(' ');
    let messages = cmd!(sh, "cargo {build...} --message-format json-render-diagnostics").quiet().read()?;
    let mut launcher = Command::new(executable(&messages).context("cargo built no zero-run")?);
    become_it(launcher.args(&options.arguments)).context("cannot run zero-run")
}

#[cfg(unix)]
fn become_it(launcher: &mut Command) -> std::io::Result<ExitCode> {
    Err(std::os::unix::process::CommandExt::exec(launcher))
}

#[cfg(not(unix))]
fn become_it(launcher: &mut Command) -> std::io::Result<ExitCode> {
    let status = launcher.status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// What cargo says about a target that it has built.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
}

/// The program among what cargo has built, from its messages, one a line.
fn executable(messages: &str) -> Option<PathBuf> {
    messages.lines().find_map(|line| serde_json::from_str::<Artifact>(line).ok()?.executable)
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn the_program_is_found_among_the_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"zero_comm"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"zero-run"},"executable":"/target/debug/zero-run"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages), Some("/target/debug/zero-run".into()));
        assert_eq!(executable(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
