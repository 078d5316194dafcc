//! What is said and returned in the end.

use std::io;

use signal_hook::consts::SIGKILL;

use super::ending::{Ending, Origin, Status};
use super::signals;
use crate::last_words::Kind;

/// Why a job had to end, if that was not because of a rank.
#[derive(Debug)]
pub(crate) enum Trigger {
    Signal(i32),
    Deadline,
    Output(io::Error),
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Report {
    endings: Vec<Ending>,
    trigger: Option<Trigger>,
}

impl Report {
    /// `endings` are in the order of ranks.
    pub(crate) fn new(endings: Vec<Ending>, trigger: Option<Trigger>) -> Self {
        Self { endings, trigger }
    }

    /// The failure that explains most: the first of a rank by itself, before ones because of other ranks.
    fn cause(&self) -> Option<&Ending> {
        let failed = self.endings.iter().filter(|ending| !ending.is_success());
        failed.min_by_key(|ending| (ending.origin(), ending.failed_at()))
    }

    /// What this program ends with: the cause's code, and 0 only if all ranks ended with it.
    pub(crate) fn exit_code(&self) -> u8 {
        match (&self.trigger, self.cause()) {
            (Some(Trigger::Deadline), _) => 124,
            // As if SIGPIPE had ended it, which it does to programs that do not care.
            (Some(Trigger::Output(error)), _) if error.kind() == io::ErrorKind::BrokenPipe => 128 + 13,
            (Some(Trigger::Output(_)), None) => 1,
            (_, Some(cause)) => cause.exit_code(),
            (_, None) => 0,
        }
    }

    /// What to say, if there is anything: the cause first, then the others.
    pub(crate) fn text(&self) -> Option<String> {
        let cause = self.cause();
        let mut lines = Vec::new();
        let told = match (&self.trigger, cause) {
            (Some(Trigger::Deadline), _) => {
                lines.push("the job was not over at its deadline".to_owned());
                None
            }
            (Some(Trigger::Output(error)), _) => {
                lines.push(format!("what the ranks write cannot be passed on: {error}"));
                None
            }
            (Some(Trigger::Signal(signal)), Some(_)) => {
                lines.push(format!("the job was ended by {}", signals::name(*signal)));
                None
            }
            (None, Some(cause)) => {
                let failures = self.endings.iter().filter(|ending| !ending.is_success()).count();
                let first = if failures > 1 { " first" } else { "" };
                let status = cause.status.to_string();
                lines.push(format!(
                    "{} failed{first}: {}",
                    name(cause),
                    cause.own_fault().unwrap_or(&status)
                ));
                lines.extend(details(cause).into_iter().map(|line| format!("    {line}")));
                Some(cause.place.rank)
            }
            (_, None) => return None,
        };
        let others = self.endings.iter().filter(|ending| Some(ending.place.rank) != told);
        lines.extend(others.map(|ending| format!("  {}: {}", name(ending), summary(ending))));
        Some(format!("zero-run: {}\n", lines.join("\n")))
    }
}

fn name(ending: &Ending) -> String {
    match &ending.place.host {
        Some(host) => format!("{} on {host}", ending.place.rank),
        None => ending.place.rank.to_string(),
    }
}

/// All that is known about the cause.
fn details(ending: &Ending) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(ending.own_fault().map(|_| format!("its process: {}", outcome(ending))));
    lines.extend(ending.out_of_memory.map(|hint| hint.to_string()));
    match &ending.last_words {
        Some(words) => {
            let because_of = words.because_of.filter(|_| words.kind == Kind::Stopped);
            lines.extend(because_of.map(|rank| format!("it stopped because of {rank}")));
            let mut message = words.message.trim_end().lines();
            let panicked = if words.kind == Kind::Panic { "panicked: " } else { "" };
            lines.extend(message.next().map(|line| format!("{panicked}{line}")));
            lines.extend(message.map(str::to_owned));
        }
        // Nothing of the rank's own has run.
        None if matches!(ending.status, Status::Refused { .. }) => {}
        None if ending.tail.is_empty() => lines.push("it wrote nothing to its standard error".to_owned()),
        None => {
            lines.push("its standard error ended with".to_owned());
            lines.extend(ending.tail.iter().map(|line| format!("    {line}")));
        }
    }
    lines
}

/// How a rank ended that is not the cause, in a line.
fn summary(ending: &Ending) -> String {
    let words = ending.last_words.as_ref();
    let message = words.and_then(|words| words.message.lines().next()).filter(|line| !line.is_empty());
    let status = match (ending.origin(), words.and_then(|words| words.because_of), ending.own_fault()) {
        (Origin::Another, Some(rank), _) => return format!("stopped because of {rank}"),
        (Origin::Another, None, _) => ending.status.to_string(),
        (_, _, Some(fault)) => format!("{fault}; {}", outcome(ending)),
        (_, _, None) => outcome(ending),
    };
    let told = message.map(str::to_owned).or_else(|| ending.out_of_memory.map(|hint| hint.to_string()));
    match told {
        Some(told) => format!("{status}: {told}"),
        None => status,
    }
}

/// How its process ended, and whether it had been asked to.
fn outcome(ending: &Ending) -> String {
    let status = &ending.status;
    match (ending.asked, status) {
        (None, _) => status.to_string(),
        (Some(asked), Status::Signal(signal)) if *signal == asked => {
            format!("ended by {}", signals::name(asked))
        }
        (Some(asked), Status::Signal(SIGKILL)) => {
            format!("killed, since it did not end after {}", signals::name(asked))
        }
        (Some(asked), _) => format!("{status} after {}", signals::name(asked)),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::{Duration, Instant};

    use zero_core::{Rank, WorldSize};

    use super::{Report, Trigger};
    use crate::last_words::LastWords;
    use crate::launcher::ending::{Ending, Fault, Status};
    use crate::launcher::memory::OutOfMemory;
    use crate::launcher::placement::Place;

    /// Endings in the order of ranks: when, how, asked by which signal, with which last words.
    fn report(trigger: Option<Trigger>, endings: &[(u64, Status, Option<i32>, &str)]) -> Report {
        let start = Instant::now();
        let ending = |(rank, (after, status, asked, words)): (usize, &(u64, Status, Option<i32>, &str))| {
            let local_world_size = WorldSize::ONE;
            let place = Place { rank: Rank::new(rank), local_rank: 0, local_world_size, host: None };
            let at = start + Duration::from_millis(*after);
            let mut ending = Ending::new(place, at, status.clone(), *asked);
            ending.last_words = LastWords::parse(words.as_bytes());
            ending
        };
        Report::new(endings.iter().enumerate().map(ending).collect(), trigger)
    }

    const STOPPED: &str = r#"{"kind":"stopped","message":"all_reduce: rank 2 is gone","because_of":2}"#;

    #[test]
    fn a_job_whose_ranks_all_end_well_is_not_worth_a_word() {
        let well = report(None, &[(0, Status::Code(0), None, ""), (1, Status::Code(0), Some(15), "")]);
        assert_eq!((well.exit_code(), well.text()), (0, None));
    }

    #[test]
    fn the_first_rank_that_failed_by_itself_is_the_cause() {
        let report = report(
            None,
            &[
                (10, Status::Code(1), None, STOPPED),
                (40, Status::Code(9), None, ""),
                (30, Status::Code(7), None, r#"{"kind":"panic","message":"no\nspace"}"#),
                (50, Status::Code(0), Some(15), ""),
                (51, Status::Signal(15), Some(15), ""),
                (52, Status::Signal(9), Some(15), ""),
            ],
        );
        assert_eq!(report.exit_code(), 7);
        let expected = "\
zero-run: rank 2 failed first: exit code 7
    panicked: no
    space
  rank 0: stopped because of rank 2
  rank 1: exit code 9
  rank 3: exit code 0 after SIGTERM
  rank 4: ended by SIGTERM
  rank 5: killed, since it did not end after SIGTERM
";
        assert_eq!(report.text().as_deref(), Some(expected));
    }

    #[test]
    fn where_all_blame_another_the_first_of_them_is_the_cause_and_a_rank_that_had_to_be_ended_is_not() {
        let report = report(
            None,
            &[
                (20, Status::Code(3), None, STOPPED),
                (10, Status::Code(4), None, STOPPED),
                (5000, Status::Signal(15), Some(15), ""),
            ],
        );
        assert_eq!(report.exit_code(), 4);
        let text = report.text().unwrap();
        assert!(
            text.starts_with(
                "zero-run: rank 1 failed first: exit code 4\n    it stopped because of rank 2\n"
            )
        );
        assert!(text.contains("    all_reduce: rank 2 is gone\n"), "{text}");
        assert!(text.ends_with("  rank 2: ended by SIGTERM\n"), "{text}");
    }

    #[test]
    fn a_rank_that_the_others_had_to_do_without_is_the_cause_however_its_process_ended() {
        let stopped = r#"{"kind":"stopped","message":"rank 1 is gone","because_of":1}"#;
        for (status, asked, outcome) in [
            (Status::Signal(9), Some(15), "killed, since it did not end after SIGTERM"),
            (Status::Code(0), Some(15), "exit code 0 after SIGTERM"),
            (Status::Code(0), None, "exit code 0"),
        ] {
            let ended = [(10, Status::Code(1), None, stopped), (9000, status, asked, "")];
            let mut report = self::report(None, &ended);
            let at = report.endings[0].at + Duration::from_secs(1);
            report.endings[1].fault = Some(Fault { at, what: "not heard of for 10s".to_owned() });
            assert_eq!(report.exit_code(), 1);
            let expected = format!(
                "zero-run: rank 1 failed first: not heard of for 10s\n    its process: {outcome}\n    it wrote nothing \
                 to its standard error\n  rank 0: stopped because of rank 1\n"
            );
            assert_eq!(report.text(), Some(expected));
        }
        // A failure of its own says more.
        let mut report = self::report(None, &[(10, Status::Code(3), None, "")]);
        report.endings[0].fault = Some(Fault { at: report.endings[0].at, what: "gone".to_owned() });
        assert!(report.text().unwrap().starts_with("zero-run: rank 0 failed: exit code 3\n"));
    }

    #[test]
    fn a_rank_without_last_words_is_quoted_from_its_standard_error() {
        let mut report = report(None, &[(0, Status::Signal(9), None, ""), (1, Status::Code(0), None, "")]);
        report.endings[0].tail = vec!["almost".to_owned(), "full".to_owned()];
        report.endings[0].out_of_memory = Some(OutOfMemory::Machine);
        report.endings[0].place.host = Some("a".to_owned());
        let text = report.text().unwrap();
        assert!(
            text.starts_with("zero-run: rank 0 on a failed: killed by SIGKILL\n    the kernel ran out"),
            "{text}"
        );
        assert!(
            text.contains("\n    its standard error ended with\n        almost\n        full\n  rank 1:")
        );
        assert_eq!(report.exit_code(), 137);
    }

    #[test]
    fn a_job_that_was_ended_from_outside_says_by_what() {
        let ended = [(1, Status::Signal(2), Some(2), ""), (2, Status::Code(0), Some(2), "")];
        let by_signal = report(Some(Trigger::Signal(2)), &ended);
        assert_eq!(by_signal.exit_code(), 130);
        let expected = "\
zero-run: the job was ended by SIGINT
  rank 0: ended by SIGINT
  rank 1: exit code 0 after SIGINT
";
        assert_eq!(by_signal.text().as_deref(), Some(expected));

        let late = report(Some(Trigger::Deadline), &ended[1..]);
        assert_eq!(late.exit_code(), 124);
        assert!(late.text().unwrap().starts_with("zero-run: the job was not over at its deadline\n"));

        let output =
            |kind: io::ErrorKind| report(Some(Trigger::Output(kind.into())), &ended[1..]).exit_code();
        assert_eq!(output(io::ErrorKind::BrokenPipe), 141);
        assert_eq!(output(io::ErrorKind::StorageFull), 1);
    }
}
