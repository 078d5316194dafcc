//! What a suite is: a name, something to run, and what must be there for it.

use std::fmt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use xshell::Shell;

use crate::tee;

/// A part of `cargo xtask test`.
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    /// Left out by `--fast`.
    pub(crate) slow: bool,
    action: Action,
    /// Where it is not met, the suite is skipped.
    requirement: Option<Requirement>,
    /// What runs instead where a tool is missing.
    fallback: Option<(Requirement, Action)>,
}

/// What a suite runs.
#[derive(Clone, Copy)]
pub(crate) enum Action {
    /// A command, with variables for its environment.
    Command {
        program: &'static str,
        args: &'static [&'static str],
        env: &'static [(&'static str, &'static str)],
    },
    /// A function of ours; what it is, and itself.
    Call(&'static str, fn(&Shell) -> anyhow::Result<()>),
}

/// A tool that not every machine has.
#[derive(Clone, Copy)]
pub(crate) struct Requirement {
    /// What is missing where the probe fails.
    pub(crate) what: &'static str,
    /// A command that succeeds where the tool works.
    pub(crate) probe: &'static [&'static str],
    /// Whether the project's own files can install it: CI has no excuse for not having it then.
    pub(crate) installable: bool,
}

/// How a suite ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

impl Verdict {
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "FAILED",
            Self::Skipped(_) => "skipped",
        }
    }

    /// Nothing for what passed.
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Failed(why) | Self::Skipped(why) => why,
        }
    }
}

/// What became of a suite.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) suite: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
    /// The test runner's own last words.
    pub(crate) summaries: Vec<String>,
}

impl Suite {
    pub(crate) const fn new(name: &'static str, action: Action) -> Self {
        Self { name, slow: false, action, requirement: None, fallback: None }
    }

    pub(crate) const fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    pub(crate) const fn needs(mut self, requirement: Requirement) -> Self {
        self.requirement = Some(requirement);
        self
    }

    /// Runs `fallback` instead where `tool` is missing.
    pub(crate) const fn without(mut self, tool: Requirement, fallback: Action) -> Self {
        self.fallback = Some((tool, fallback));
        self
    }

    /// Runs the suite. In CI, a skip for want of what the project can install is a failure.
    pub(crate) fn run(&self, sh: &Shell, ci: bool) -> Report {
        let started = Instant::now();
        let (verdict, summaries) = match (self.requirement, self.fallback) {
            (Some(requirement), _) if !requirement.is_met(sh) => (requirement.verdict(ci), Vec::new()),
            (_, Some((tool, fallback))) if !tool.is_met(sh) => fallback.run(sh),
            _ => self.action.run(sh),
        };
        Report { suite: self.name, verdict, took: started.elapsed(), summaries }
    }
}

impl Requirement {
    pub(crate) fn is_met(&self, sh: &Shell) -> bool {
        let [program, args @ ..] = self.probe else { return true };
        Command::new(program)
            .args(args)
            .current_dir(sh.current_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    fn verdict(&self, ci: bool) -> Verdict {
        if ci && self.installable {
            Verdict::Failed(format!("{} is missing, and CI must install it", self.what))
        } else {
            Verdict::Skipped(format!("{} is not installed", self.what))
        }
    }
}

impl Action {
    /// Cargo with these arguments.
    pub(crate) const fn cargo(args: &'static [&'static str]) -> Self {
        Self::Command { program: "cargo", args, env: &[] }
    }

    /// The same command in an environment with these variables; of no effect on a call.
    pub(crate) const fn with_env(self, env: &'static [(&'static str, &'static str)]) -> Self {
        match self {
            Self::Command { program, args, .. } => Self::Command { program, args, env },
            call @ Self::Call(..) => call,
        }
    }

    fn run(self, sh: &Shell) -> (Verdict, Vec<String>) {
        println!("    {self}");
        match self {
            Self::Call(_, call) => match call(sh) {
                Ok(()) => (Verdict::Passed, Vec::new()),
                Err(error) => (Verdict::Failed(format!("{error:#}")), Vec::new()),
            },
            Self::Command { program, args, env } => {
                judge(sh.cmd(program).args(args).envs(env.iter().copied()).into())
            }
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(what, _) => f.write_str(what),
            Self::Command { program, args, env } => {
                for (name, value) in *env {
                    write!(f, "{name}='{value}' ")?;
                }
                write!(f, "{program} {}", args.join(" "))
            }
        }
    }
}

/// Runs a command to its end; how it ended, and the test runner's own last words.
pub(crate) fn judge(command: Command) -> (Verdict, Vec<String>) {
    match tee::stream(command) {
        Ok(outcome) => {
            let verdict = if outcome.status.success() {
                Verdict::Passed
            } else {
                Verdict::Failed(cause(&outcome.lines, outcome.status))
            };
            (verdict, outcome.lines.into_iter().filter(|line| is_summary(line)).collect())
        }
        Err(error) => (Verdict::Failed(format!("{error:#}")), Vec::new()),
    }
}

/// The first error that a failed command named, or else its status.
fn cause(lines: &[String], status: impl fmt::Display) -> String {
    match lines.iter().find(|line| line.starts_with("error")) {
        Some(line) => line.clone(),
        None => status.to_string(),
    }
}

/// Whether a test runner (nextest or libtest) wrote the line to say how many tests it ran. Of libtest, which
/// writes one for each binary, only those that ran any.
fn is_summary(line: &str) -> bool {
    let line = line.trim_start();
    let nextest = line.starts_with("Summary [") && line.contains(" run: ");
    let libtest = line.starts_with("test result: ") && !line.contains(" 0 passed; 0 failed;");
    nextest || libtest
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use xshell::Shell;

    use super::{Action, Requirement, Suite, Verdict, cause, is_summary};

    const ABSENT: Requirement =
        Requirement { what: "the tool", probe: &["no-such-program"], installable: true };

    fn fails(_: &Shell) -> anyhow::Result<()> {
        bail!("it broke")
    }

    fn verdict(suite: &Suite, ci: bool) -> Verdict {
        suite.run(&Shell::new().unwrap(), ci).verdict
    }

    #[test]
    fn a_command_passes_or_fails_by_its_status() {
        let passes = Suite::new("passes", Action::cargo(&["--version"]));
        assert_eq!(verdict(&passes, true), Verdict::Passed);

        // Fails without a word.
        let args = &["config", "--get", "no.such-key"];
        let failing = Suite::new("fails", Action::Command { program: "git", args, env: &[] });
        assert!(matches!(verdict(&failing, true), Verdict::Failed(why) if why.contains('1')));

        let unknown =
            Suite::new("fails", Action::Command { program: "no-such-program", args: &[], env: &[] });
        assert!(matches!(verdict(&unknown, true), Verdict::Failed(why) if why.contains("no-such-program")));
    }

    #[test]
    fn the_cause_of_a_failure_is_the_first_error_or_the_status() {
        let lines =
            ["Compiling", "error[E0425]: no such value", "error: could not compile"].map(String::from);
        assert_eq!(cause(&lines, "exit status: 101"), "error[E0425]: no such value");
        assert_eq!(cause(&lines[..1], "exit status: 101"), "exit status: 101");
    }

    #[test]
    fn a_call_fails_with_its_own_words() {
        let suite = Suite::new("fails", Action::Call("a call", fails));
        assert_eq!(verdict(&suite, false), Verdict::Failed("it broke".to_owned()));
    }

    #[test]
    fn a_suite_without_its_tool_is_skipped_unless_ci_could_have_installed_it() {
        let suite = Suite::new("needy", Action::Call("a call", fails)).needs(ABSENT);
        assert_eq!(verdict(&suite, false), Verdict::Skipped("the tool is not installed".to_owned()));
        assert!(matches!(verdict(&suite, true), Verdict::Failed(_)));

        let suite = Suite::new("needy", Action::Call("a call", fails))
            .needs(Requirement { installable: false, ..ABSENT });
        assert!(matches!(verdict(&suite, true), Verdict::Skipped(_)));
    }

    #[test]
    fn a_fallback_runs_in_the_place_of_a_missing_tool() {
        let suite =
            Suite::new("tests", Action::Call("a call", fails)).without(ABSENT, Action::cargo(&["--version"]));
        assert_eq!(verdict(&suite, true), Verdict::Passed);
        // But not in the place of what nothing replaces.
        let suite = suite.needs(ABSENT);
        assert!(matches!(verdict(&suite, false), Verdict::Skipped(_)));
    }

    #[test]
    fn a_command_is_shown_as_it_would_be_typed() {
        let doc = Action::cargo(&["doc", "--no-deps"]).with_env(&[("RUSTDOCFLAGS", "-D warnings")]);
        assert_eq!(doc.to_string(), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
    }

    #[test]
    fn last_words_of_both_test_runners_are_recognised() {
        assert!(is_summary("     Summary [   0.012s] 12 tests run: 12 passed, 1 skipped"));
        assert!(is_summary("     Summary [   0.012s] 1 test run: 0 passed, 1 failed, 0 skipped"));
        assert!(is_summary("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"));
        assert!(is_summary("test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"));
        assert!(!is_summary("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"));
        assert!(!is_summary("test a_summary ... ok"));
    }
}
