//! `cargo xtask test`: all suites, one table, one verdict.

use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use xshell::Shell;

use crate::device::Kind;
use crate::device_checks;
use crate::ranks::Ranks;
use crate::suite::{Report, Suite, Verdict};
use crate::suites::SUITES;
use crate::table::{Align, Table};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Leaves out what is slow: the main job in a release build.
    #[arg(long, conflicts_with = "only")]
    fast: bool,

    /// Runs this suite only; may be given more than once.
    #[arg(long, value_name = "SUITE", value_parser = names())]
    only: Vec<String>,

    /// Runs what runs on devices of this kind, instead of the suites.
    #[arg(long, conflicts_with_all = ["fast", "only"])]
    device: Option<Kind>,

    /// How many ranks: a number, or 1, 2, 4 and so on up to one for each device (four in software).
    #[arg(long, value_name = "N|all", requires = "device", default_value = "all")]
    ranks: Ranks,

    /// Fails where something needed is missing, instead of skipping.
    #[arg(long, requires = "device")]
    require: bool,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SUITES.iter().map(|suite| suite.name))
}

impl Options {
    fn wants(&self, suite: &Suite) -> bool {
        if self.only.is_empty() {
            !(self.fast && suite.slow)
        } else {
            self.only.iter().any(|name| name == suite.name)
        }
    }
}

pub(crate) fn run(sh: &Shell, options: &Options) -> anyhow::Result<ExitCode> {
    // Summaries are recognised in what the test runners write, which must be plain.
    sh.set_var("CARGO_TERM_COLOR", "never");
    if let Some(kind) = options.device {
        return device_checks::run(sh, kind, options.ranks, options.require);
    }
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let suites: Vec<&Suite> = SUITES.iter().filter(|suite| options.wants(suite)).collect();
    let mut reports = Vec::new();
    for (index, suite) in suites.iter().enumerate() {
        println!("\n==> [{}/{}] {}", index + 1, suites.len(), suite.name);
        let report = suite.run(sh, ci);
        println!("<== {} {} after {} s", report.suite, report.verdict.word(), seconds(report.took));
        reports.push(report);
    }

    println!("\n{}", table(&reports));
    for line in closing_lines(&reports) {
        println!("{line}");
    }
    let failed = reports.iter().any(|report| matches!(report.verdict, Verdict::Failed(_)));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn table(reports: &[Report]) -> Table<4> {
    let mut table = Table::new([
        ("suite", Align::Left),
        ("result", Align::Left),
        ("seconds", Align::Right),
        ("why", Align::Left),
    ]);
    for report in reports {
        let verdict = &report.verdict;
        table.push([
            report.suite.to_owned(),
            verdict.word().to_owned(),
            seconds(report.took),
            verdict.why().to_owned(),
        ]);
    }
    table
}

/// The test runners' own summaries, those of the first suite that ran tests last: it ran the most, and whoever
/// reads the end of the output looks for it.
fn closing_lines(reports: &[Report]) -> impl Iterator<Item = &String> {
    reports.iter().rev().flat_map(|report| &report.summaries)
}

pub(crate) fn seconds(took: Duration) -> String {
    format!("{:.1}", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Options, Ranks, SUITES, closing_lines, table};
    use crate::suite::{Report, Verdict};

    fn report(suite: &'static str, verdict: Verdict, summaries: &[&str]) -> Report {
        let summaries = summaries.iter().map(|&line| line.to_owned()).collect();
        Report { suite, verdict, took: Duration::from_millis(1250), summaries }
    }

    fn options(only: &[&str]) -> Options {
        let only = only.iter().map(|&name| name.to_owned()).collect();
        Options { fast: false, only, device: None, ranks: Ranks::All, require: false }
    }

    #[test]
    fn the_table_says_what_became_of_each_suite_and_why() {
        let reports = [
            report("format", Verdict::Passed, &[]),
            report("clippy", Verdict::Failed("error: unused variable".into()), &[]),
            report("miri", Verdict::Skipped("Miri is not installed".into()), &[]),
        ];
        let expected = "\
suite   result   seconds  why
------  -------  -------  ----------------------
format  passed       1.2
clippy  FAILED       1.2  error: unused variable
miri    skipped      1.2  Miri is not installed
";
        assert_eq!(table(&reports).to_string(), expected);
    }

    #[test]
    fn the_summary_of_the_first_tests_comes_last() {
        let reports = [
            report("tests", Verdict::Passed, &["Summary [1s] 90 tests run: 90 passed"]),
            report("doctests", Verdict::Passed, &["test result: ok. 1 passed", "test result: ok. 2 passed"]),
        ];
        let lines: Vec<_> = closing_lines(&reports).collect();
        assert_eq!(
            lines,
            [
                "test result: ok. 1 passed",
                "test result: ok. 2 passed",
                "Summary [1s] 90 tests run: 90 passed"
            ]
        );
    }

    #[test]
    fn fast_leaves_out_the_main_job_and_nothing_else() {
        let names = |fast| -> Vec<_> {
            let options = Options { fast, ..options(&[]) };
            SUITES.iter().filter(|suite| options.wants(suite)).map(|suite| suite.name).collect()
        };
        let mut all = names(false);
        assert_eq!(all.len(), SUITES.len());
        all.retain(|&name| name != "main-job");
        assert_eq!(names(true), all);
    }

    #[test]
    fn only_selects_by_name() {
        let options = options(&["lint", "format"]);
        let wanted = SUITES.iter().filter(|suite| options.wants(suite)).map(|suite| suite.name);
        assert_eq!(wanted.collect::<Vec<_>>(), ["format", "lint"]);
    }
}
