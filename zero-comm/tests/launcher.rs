//! `zero-run` as a user runs it: what ranks are told, what becomes of their output, how jobs end.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, exit};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use tempfile::TempDir;
use zero_comm::launcher::{self, LaunchOptions};
use zero_comm::{CommError, World, WorldError};

/// A folder for one job, which is where it runs; its temporary files are in `tmp`.
struct Job {
    folder: TempDir,
}

/// What a job left behind.
#[derive(Debug)]
struct Outcome {
    code: Option<i32>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Job {
    fn new() -> Self {
        let job = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(job.path("tmp")).unwrap();
        job
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `zero-run` with `options`, whose ranks run `script` in a shell.
    fn command(&self, options: &[&str], script: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero-run"));
        command.args(options).args(["--", "sh", "-c", script]);
        command.current_dir(self.folder.path()).env("TMPDIR", self.path("tmp"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, options: &[&str], script: &str) -> Child {
        self.command(options, script).spawn().unwrap()
    }

    fn run(&self, options: &[&str], script: &str) -> Outcome {
        let outcome = finish(self.start(options, script));
        assert_eq!(self.files("tmp"), Vec::<String>::new(), "temporary files");
        outcome
    }

    fn files(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Waits for a file that a rank writes at once, and reads it.
    fn wait_for(&self, name: &str) -> String {
        wait_until(name, || fs::read_to_string(self.path(name)).ok().filter(|text| text.ends_with('\n')))
    }

    fn wait_for_pid(&self, name: &str) -> Pid {
        pid(self.wait_for(name).trim())
    }

    /// A remote shell that stays here. What it starts is in a session of its own, as on another machine. It
    /// notes what it is given in the file `rsh-log`.
    fn rsh(&self) -> String {
        self.write_rsh("echo \"$*\" >>rsh-log; shift; exec setsid -w \"$@\"")
    }

    fn write_rsh(&self, script: &str) -> String {
        fs::write(self.path("rsh"), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(self.path("rsh"), fs::Permissions::from_mode(0o755)).unwrap();
        self.path("rsh").to_str().unwrap().to_owned()
    }
}

impl Outcome {
    fn stdout(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    fn stderr(&self) -> &str {
        std::str::from_utf8(&self.stderr).unwrap()
    }

    /// The lines of standard output that begin with the label of a rank, without it.
    fn of_rank(&self, rank: usize) -> Vec<&str> {
        let label = format!("[rank {rank}] ");
        self.stdout().lines().filter_map(|line| line.strip_prefix(label.as_str())).collect()
    }

    /// What the launcher itself says.
    fn report(&self) -> &str {
        let at = self.stderr().find("zero-run: ").unwrap_or_else(|| panic!("no report: {self:?}"));
        &self.stderr()[at..]
    }
}

fn finish(child: Child) -> Outcome {
    let output = child.wait_with_output().unwrap();
    Outcome { code: output.status.code(), stdout: output.stdout, stderr: output.stderr }
}

/// Waits generously for what must happen sooner or later.
fn wait_until<T>(what: &str, mut there: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = there() {
            return value;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{what}: never came");
        thread::sleep(Duration::from_millis(5));
    }
}

fn pid(text: &str) -> Pid {
    Pid::from_raw(text.parse().unwrap()).unwrap()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Whether a process runs; one that has ended but that nobody has waited for does not.
fn is_running(process: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero()));
    test_kill_process(process).is_ok() && !status.is_ok_and(|status| status.contains("\nState:\tZ"))
}

fn wait_until_gone(process: Pid) {
    wait_until("the end of a process", || (!is_running(process)).then_some(()));
}

fn lines(text: &str) -> BTreeSet<&str> {
    text.lines().collect()
}

// What ranks are told

#[test]
fn ranks_are_told_their_places_and_where_they_meet() {
    let script = r#"echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $ZERO_RENDEZVOUS $MASTER_ADDR:$MASTER_PORT""#;
    let outcome = Job::new().run(&["-n", "3"], script);
    assert_eq!((outcome.code, outcome.stderr()), (Some(0), ""));
    let meeting = outcome.of_rank(0)[0].split(' ').nth(4).unwrap();
    assert!(meeting.strip_prefix("127.0.0.1:").is_some_and(|port| port.parse::<u16>().unwrap() > 0));
    for rank in 0..3 {
        assert_eq!(outcome.of_rank(rank), [format!("{rank} 3 {rank} 3 {meeting} {meeting}")]);
    }
}

#[test]
fn the_meeting_place_is_open_before_the_ranks_run() {
    let job = Job::new();
    let child =
        job.start(&["-n", "1"], r#"echo "$ZERO_RENDEZVOUS" >at; until [ -e go ]; do sleep 0.01; done"#);
    let address = job.wait_for("at");
    assert!(std::net::TcpStream::connect(address.trim()).is_ok());
    fs::write(job.path("go"), "").unwrap();
    assert_eq!(finish(child).code, Some(0));
}

#[test]
fn the_token_is_one_for_the_job_and_a_secret() {
    let job = Job::new();
    let rsh = job.rsh();
    let script = r#"echo "$ZERO_JOB_TOKEN" >"token-$RANK"; until [ -e go ]; do sleep 0.01; done"#;
    let child = job.start(&["--hosts", "localhost:2,127.0.0.2:1", "--rsh", &rsh], script);
    let tokens = ["token-0", "token-1", "token-2"].map(|file| job.wait_for(file).trim().to_owned());
    assert!(tokens[0].len() == 64 && tokens[0].bytes().all(|byte| byte.is_ascii_hexdigit()), "{tokens:?}");
    assert!(tokens[1] == tokens[0] && tokens[2] == tokens[0], "{tokens:?}");

    let mut command_lines = 0;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        // What has just ended has none.
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        command_lines += 1;
        assert!(!String::from_utf8_lossy(&line).contains(&tokens[0]), "{}", String::from_utf8_lossy(&line));
    }
    assert!(command_lines > 5 || !Path::new("/proc/self").exists());

    fs::write(job.path("go"), "").unwrap();
    let outcome = finish(child);
    assert_eq!((outcome.code, outcome.stdout(), outcome.stderr()), (Some(0), "", ""));
    assert!(!job.wait_for("rsh-log").contains(&tokens[0]));

    let other = Job::new();
    assert_eq!(other.run(&["-n", "1"], r#"echo "$ZERO_JOB_TOKEN" >token"#).code, Some(0));
    assert_ne!(other.wait_for("token").trim(), tokens[0]);
}

#[test]
fn places_in_other_launchers_are_not_passed_on() {
    let job = Job::new();
    let mut command = job.command(&["-n", "1"], "env | grep -E 'SLURM|PMI|OMPI|TORCH|^RANK|KEPT'");
    command.env("RANK", "7").env("SLURM_PROCID", "7").env("SLURM_JOB_ID", "8").env("PMI_RANK", "7");
    command.env("OMPI_COMM_WORLD_RANK", "7").env("TORCHELASTIC_RUN_ID", "7").env("KEPT", "1");
    let outcome = finish(command.spawn().unwrap());
    let expected = "[rank 0] KEPT=1\n[rank 0] RANK=0\n[rank 0] SLURM_JOB_ID=8";
    assert_eq!(lines(outcome.stdout()), lines(expected));
}

#[test]
fn ranks_have_no_input() {
    let job = Job::new();
    let mut child = job.command(&["-n", "2"], "cat; echo end").stdin(Stdio::piped()).spawn().unwrap();
    let input = child.stdin.take();
    let outcome = finish(child);
    drop(input);
    assert_eq!(lines(outcome.stdout()), lines("[rank 0] end\n[rank 1] end"));
}

// Output

#[test]
fn each_line_has_the_label_of_its_rank_and_keeps_its_stream() {
    let outcome = Job::new().run(&["-n", "2"], "echo out; echo; echo error >&2; printf partial");
    let expected = |text: &str| text.replace("k]", "0]") + &text.replace("k]", "1]");
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(outcome.stdout()), sorted(&expected("[rank k] out\n[rank k] \n[rank k] partial\n")));
    assert_eq!(sorted(outcome.stderr()), sorted(&expected("[rank k] error\n")));
    for rank in 0..2 {
        assert_eq!(outcome.of_rank(rank), ["out", "", "partial"]);
    }
}

#[test]
fn lines_are_never_mixed_however_they_are_written() {
    let script =
        r#"i=0; while [ $i -lt 2000 ]; do printf "$RANK$RANK"; printf "$RANK-$i\n"; i=$((i + 1)); done"#;
    let outcome = Job::new().run(&["-n", "4"], script);
    assert_eq!(outcome.stdout().lines().count(), 8000);
    for rank in 0..4 {
        let expected: Vec<_> = (0..2000).map(|line| format!("{rank}{rank}{rank}-{line}")).collect();
        assert_eq!(outcome.of_rank(rank), expected);
    }
}

#[test]
fn bytes_that_are_no_text_are_passed_on() {
    let outcome = Job::new().run(&["-n", "1"], r"printf 'a\377\000b\n'");
    assert_eq!(outcome.stdout, b"[rank 0] a\xFF\0b\n");
}

#[test]
fn a_very_long_line_stays_one_line() {
    let outcome = Job::new().run(&["-n", "1"], "head -c 1000000 /dev/zero | tr '\\0' x; echo");
    assert_eq!(outcome.stdout(), format!("[rank 0] {}\n", "x".repeat(1_000_000)));
}

#[test]
fn a_progress_bar_becomes_lines() {
    let outcome = Job::new().run(&["-n", "1"], r"printf '\r10%%\r50%%\rdone\n'");
    assert_eq!(outcome.stdout(), "[rank 0] 10%\n[rank 0] 50%\n[rank 0] done\n");
}

#[test]
fn without_prefix_the_output_of_one_rank_is_unchanged() {
    let outcome = Job::new().run(&["-n", "1", "--no-prefix"], r"printf '\r10%%\rdone\r\n\377 partial'");
    assert_eq!(outcome.stdout, b"\r10%\rdone\r\n\xFF partial");
}

#[test]
fn a_reader_that_goes_away_ends_the_job() {
    let job = Job::new();
    let mut child = job.start(&["-n", "2"], "echo $$ >pid-$RANK; while echo line; do :; done");
    let pids = ["pid-0", "pid-1"].map(|file| job.wait_for_pid(file));
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.ends_with("] line\n"), "{line}");
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(141));
    assert!(!outcome.stderr().contains("panicked"), "{}", outcome.stderr());
    pids.into_iter().for_each(wait_until_gone);
}

// How jobs end

#[test]
fn a_job_is_well_only_if_all_ranks_are() {
    let outcome = Job::new().run(&["-n", "3"], "exit 0");
    assert_eq!((outcome.code, outcome.stdout(), outcome.stderr()), (Some(0), "", ""));
    let outcome = Job::new().run(&["-n", "3"], "[ $RANK != 1 ] || exit 42");
    assert_eq!(outcome.code, Some(42));
    assert!(outcome.report().starts_with("zero-run: rank 1 failed: exit code 42\n"), "{}", outcome.stderr());
    assert!(
        outcome.report().ends_with("  rank 0: exit code 0\n  rank 2: exit code 0\n"),
        "{}",
        outcome.stderr()
    );
}

#[test]
fn a_signal_has_its_name_and_its_exit_code() {
    let outcome = Job::new().run(&["-n", "1"], "kill -SEGV $$");
    assert_eq!(outcome.code, Some(128 + 11));
    assert!(outcome.report().contains("rank 0 failed: killed by SIGSEGV\n"), "{}", outcome.stderr());
    let outcome = Job::new().run(&["-n", "1"], "kill -KILL $$");
    assert_eq!(outcome.code, Some(128 + 9));
    assert!(outcome.report().contains("rank 0 failed: killed by SIGKILL\n"), "{}", outcome.stderr());
}

#[test]
fn the_cause_is_the_first_rank_that_failed_by_itself() {
    let job = Job::new();
    // Rank 2 ends first, but because of rank 1; rank 0 ends last.
    let script = r#"
        echo $$ >"pid-$RANK.new"; mv "pid-$RANK.new" "pid-$RANK"
        after() { until [ -e "pid-$1" ]; do sleep 0.01; done; while kill -0 "$(cat "pid-$1")"; do sleep 0.01; done; }
        exec 2>/dev/null
        case $RANK in
        0) after 1; exit 3 ;;
        1) after 2; echo '{"rank":1,"kind":"panic","message":"no space\non disk"}' >"$ZERO_LAST_WORDS"; exit 101 ;;
        2) echo '{"rank":2,"kind":"stopped","message":"rank 1 is gone","because_of":1}' >"$ZERO_LAST_WORDS"; exit 1 ;;
        esac"#;
    let outcome = job.run(&["-n", "3"], &script.replace(r"\n", r"\\n"));
    assert_eq!(outcome.code, Some(101));
    let expected = "\
zero-run: rank 1 failed first: exit code 101
    panicked: no space
    on disk
  rank 0: exit code 3
  rank 2: stopped because of rank 1
";
    assert_eq!(outcome.report(), expected);
}

#[test]
fn without_usable_last_words_standard_error_is_quoted() {
    let script = r#"echo "{" >"$ZERO_LAST_WORDS"; for i in $(seq 30); do echo "line $i" >&2; done; exit 1"#;
    let outcome = Job::new().run(&["-n", "1"], script);
    let quoted: Vec<_> = outcome.report().lines().skip(2).collect();
    let expected: Vec<_> = (11..=30).map(|line| format!("        line {line}")).collect();
    assert_eq!(quoted, expected);
}

#[test]
fn the_others_may_end_by_themselves_before_they_are_ended() {
    let script = r#"
        [ $RANK = 0 ] && exit 5
        trap 'exit 6' TERM
        [ $RANK = 1 ] && exit 7
        echo up >up; while :; do sleep 0.01; done"#;
    let outcome = Job::new().run(&["-n", "3"], script);
    let report = outcome.report();
    assert!(outcome.code == Some(5) || outcome.code == Some(7), "{outcome:?}");
    assert!(report.contains("exit code 5") && report.contains("exit code 7"), "{report}");
    assert!(report.ends_with("  rank 2: exit code 6 after SIGTERM\n"), "{report}");
}

#[test]
fn ranks_that_do_not_listen_are_killed() {
    let job = Job::new();
    let script = r#"
        trap '' TERM
        until [ -e up ]; do [ $RANK = 0 ] || echo $$ >up; done
        [ $RANK = 0 ] && exit 5
        while :; do sleep 0.01; done"#;
    let outcome = job.run(&["-n", "2", "--grace", "0.1"], script);
    assert_eq!(outcome.code, Some(5));
    let last = "  rank 1: killed, since it did not end after SIGTERM\n";
    assert!(outcome.report().ends_with(last), "{}", outcome.report());
    wait_until_gone(job.wait_for_pid("up"));
}

#[test]
fn a_job_that_is_not_over_at_its_deadline_is_ended() {
    let outcome = Job::new().run(&["-n", "2", "--deadline", "0.2"], "exec sleep 1000");
    assert_eq!(outcome.code, Some(124));
    let expected = "\
zero-run: the job was not over at its deadline
  rank 0: ended by SIGTERM
  rank 1: ended by SIGTERM
";
    assert_eq!(outcome.report(), expected);
}

#[test]
fn a_command_that_cannot_be_run_is_one_error_and_nothing_is_left() {
    let job = Job::new();
    fs::write(job.path("data"), "no program").unwrap();
    let missing = "zero-run: there is no program";
    let refused = "zero-run: cannot start";
    for (program, code, says) in
        [("no-such-program", 127, missing), ("./no/such", 127, missing), ("./data", 126, refused)]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero-run"));
        command
            .args(["-n", "3", "--", program])
            .current_dir(job.folder.path())
            .env("TMPDIR", job.path("tmp"));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{program}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with(&format!("{says} {program:?} for rank 0")), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(job.files("tmp").is_empty());
    }
}

#[test]
fn ranks_that_were_started_before_an_error_are_ended() {
    let job = Job::new();
    // Only a rank elsewhere can be started before the first one here fails to be.
    let rsh = job.write_rsh("echo $$ >rsh-group.new; mv rsh-group.new rsh-group; exec sleep 1000");
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero-run"));
    command.args(["--hosts", "127.0.0.2:1,localhost:1", "--rsh", &rsh, "--", "no-such-program"]);
    let output = command.current_dir(job.folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    if job.path("rsh-group").exists() {
        wait_until_gone(job.wait_for_pid("rsh-group"));
    }
}

#[test]
fn a_wrong_command_line_is_refused() {
    for options in [&["-n", "x"][..], &["--grace", "-1"], &["-n", "1", "--join-deadline", "soon"], &[]] {
        let outcome = Job::new().run(options, "echo ran");
        assert_eq!((outcome.code, outcome.stdout()), (Some(2), ""), "{options:?}");
        assert!(outcome.stderr().starts_with("error: "), "{}", outcome.stderr());
    }
}

// Signals

/// Notes each signal in a file of its rank, and is up when `up-RANK` is there.
const NOTES_SIGNALS: &str = r#"
    for name in HUP INT QUIT TERM USR1 USR2; do trap "echo $name >>signals-$RANK" $name; done
    echo $$ >"up-$RANK.new"; mv "up-$RANK.new" "up-$RANK"
    until [ -e end ]; do sleep 0.01; done"#;

#[test]
fn signals_are_for_all_ranks() {
    let job = Job::new();
    let child = job.start(&["-n", "2", "--grace", "1000"], NOTES_SIGNALS);
    job.wait_for("up-0");
    job.wait_for("up-1");
    let signals = [
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::HUP, "HUP"),
        (Signal::INT, "INT"),
        (Signal::QUIT, "QUIT"),
        (Signal::TERM, "TERM"),
    ];
    let mut expected = String::new();
    for (number, name) in signals {
        signal(&child, number);
        expected = expected + name + "\n";
        for file in ["signals-0", "signals-1"] {
            wait_until(name, || (job.wait_for(file) == expected).then_some(()));
        }
    }
    fs::write(job.path("end"), "").unwrap();
    // They ended well, if late.
    assert_eq!(finish(child).code, Some(0));
}

#[test]
fn a_second_interrupt_kills() {
    let job = Job::new();
    let child = job.start(&["-n", "2", "--grace", "1000"], NOTES_SIGNALS);
    job.wait_for("up-0");
    job.wait_for("up-1");
    signal(&child, Signal::INT);
    job.wait_for("signals-0");
    job.wait_for("signals-1");
    signal(&child, Signal::INT);
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(137));
    let expected = "\
zero-run: the job was ended by SIGINT
  rank 0: killed, since it did not end after SIGINT
  rank 1: killed, since it did not end after SIGINT
";
    assert_eq!(outcome.report(), expected);
    ["up-0", "up-1"].iter().for_each(|file| wait_until_gone(job.wait_for_pid(file)));
}

#[test]
fn ranks_that_do_not_end_after_a_signal_are_killed_after_the_grace() {
    let job = Job::new();
    let child = job.start(&["-n", "1", "--grace", "0.1"], NOTES_SIGNALS);
    job.wait_for("up-0");
    signal(&child, Signal::TERM);
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(137));
    assert!(outcome.report().starts_with("zero-run: the job was ended by SIGTERM\n"), "{}", outcome.report());
}

#[test]
fn ranks_that_a_signal_ends_give_its_exit_code() {
    let job = Job::new();
    let child = job.start(&["-n", "1"], "echo up >up; exec sleep 1000");
    job.wait_for("up");
    signal(&child, Signal::INT);
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(130));
    assert_eq!(outcome.report(), "zero-run: the job was ended by SIGINT\n  rank 0: ended by SIGINT\n");
}

#[test]
fn a_signal_that_is_ignored_stays_so() {
    let job = Job::new();
    // As nohup does.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_zero-run"), "-n", "1", "--"]);
    command.args(["sh", "-c", "kill -HUP $PPID; kill -HUP $$; echo alive"]).current_dir(job.folder.path());
    let output = command.output().unwrap();
    assert_eq!(output.stdout, b"[rank 0] alive\n");
    assert_eq!(output.status.code(), Some(0));
}

// Nothing is left

/// A rank with a child and a grandchild that ends on its own only in a long time.
const FAMILY: &str = r#"
    sh -c 'sleep 1000 & echo $! >grandchild-new; wait' &
    until [ -s grandchild-new ]; do sleep 0.01; done
    echo $! >child; echo $$ >rank; mv grandchild-new grandchild
    "#;

fn family(job: &Job) -> [Pid; 3] {
    job.wait_for("grandchild");
    ["rank", "child", "grandchild"].map(|file| job.wait_for_pid(file))
}

#[test]
fn what_a_rank_has_started_ends_with_it() {
    for ending in ["exit 0", "exit 1", "kill -KILL $$"] {
        let job = Job::new();
        job.run(&["-n", "1"], &format!("{FAMILY} {ending}"));
        // No waiting: they are gone when the launcher is.
        assert_eq!(family(&job).map(is_running), [false; 3], "{ending}");
    }
}

#[test]
fn what_a_rank_has_started_is_asked_before_it_is_killed() {
    let job = Job::new();
    let script = r#"
        sh -c 'trap "echo saved >saved; exit" TERM; echo up >up; while :; do sleep 0.01; done' &
        until [ -e up ]; do sleep 0.01; done"#;
    assert_eq!(job.run(&["-n", "1", "--grace", "1000"], script).code, Some(0));
    assert_eq!(job.wait_for("saved"), "saved\n");
}

#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    let job = Job::new();
    let mut child = job.start(&["-n", "1"], &format!("{FAMILY} wait"));
    let family = family(&job);
    assert_eq!(family.map(is_running), [true; 3]);
    signal(&child, Signal::KILL);
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    family.into_iter().for_each(wait_until_gone);
    wait_until("the removal of temporary files", || job.files("tmp").is_empty().then_some(()));
}

#[test]
fn nothing_is_left_when_the_launchers_whole_group_is_killed() {
    use std::os::unix::process::CommandExt;
    let job = Job::new();
    let mut child = job.command(&["-n", "1"], &format!("{FAMILY} wait")).process_group(0).spawn().unwrap();
    let family = family(&job);
    kill_process_group(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    family.into_iter().for_each(wait_until_gone);
}

#[test]
fn a_process_that_left_its_group_does_not_keep_the_job() {
    let job = Job::new();
    let script = "setsid sleep 1000 & echo $! >daemon; printf 'last words'";
    let outcome = job.run(&["-n", "1"], script);
    assert_eq!(outcome.stdout(), "[rank 0] last words\n");
    let _ = kill_process(job.wait_for_pid("daemon"), Signal::KILL);
}

// Other machines, all of them this one

#[test]
fn ranks_elsewhere_are_told_the_same() {
    let job = Job::new();
    let rsh = job.rsh();
    let script = r#"
        echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $ZERO_RENDEZVOUS $MASTER_ADDR:$MASTER_PORT"
        [ -d "${ZERO_LAST_WORDS%/*}" ] && pwd && echo "$SLURM_PROCID $RUST_LOG" && cat"#;
    let mut command = job.command(&["--hosts", "127.0.0.2:2,localhost:1", "--rsh", &rsh], script);
    command.env("SLURM_PROCID", "7").env("RUST_LOG", "it's \"$HOME\" ~");
    let outcome = finish(command.spawn().unwrap());
    assert_eq!((outcome.code, outcome.stderr()), (Some(0), ""));
    let meeting = outcome.of_rank(0)[0].split(' ').nth(4).unwrap();
    assert!(meeting.starts_with("127.0.0.1:"));
    let folder = fs::canonicalize(job.folder.path()).unwrap().to_str().unwrap().to_owned();
    for (rank, local, size) in [(0, 0, 2), (1, 1, 2), (2, 0, 1)] {
        let place = format!("{rank} 3 {local} {size} {meeting} {meeting}");
        assert_eq!(outcome.of_rank(rank), [place.as_str(), folder.as_str(), " it's \"$HOME\" ~"]);
    }
    assert_eq!(job.wait_for("rsh-log"), "127.0.0.2 sh -s\n".repeat(2));
    assert!(job.files("tmp").is_empty());
}

#[test]
fn arguments_reach_other_machines_unchanged() {
    let job = Job::new();
    let rsh = job.rsh();
    let words =
        ["", " a  b ", "it's", "\"$HOME\" `id` \\", "-n", "*", "~", "line\nbreak", "EOF", "}", "; exit 9"];
    let mut command =
        job.command(&["-n", "1", "--hosts", "127.0.0.2", "--rsh", &rsh], r#"printf '<%s>' "$@""#);
    let outcome = finish(command.arg("sh").args(words).spawn().unwrap());
    let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
    assert_eq!(outcome.stdout(), format!("[rank 0] {}\n", expected.replace('\n', "\n[rank 0] ")));
}

#[test]
fn failures_elsewhere_are_reported_with_their_machine() {
    let job = Job::new();
    let rsh = job.rsh();
    let script = r#"
        [ $RANK = 1 ] || exec sleep 1000
        echo '{"kind":"error","message":"disk full"}' >"$ZERO_LAST_WORDS"
        echo partial >&2; printf end >&2; kill -SEGV $$"#;
    let outcome = job.run(&["--hosts", "localhost:1,127.0.0.2:2", "--rsh", &rsh], script);
    assert_eq!(outcome.code, Some(139));
    let expected = "\
[rank 1] partial
[rank 1] end
zero-run: rank 1 on 127.0.0.2 failed first: killed by SIGSEGV
    disk full
  rank 0: ended by SIGTERM
  rank 2 on 127.0.0.2: ended by SIGTERM
";
    assert_eq!(outcome.stderr(), expected);
}

#[test]
fn a_program_that_another_machine_lacks_is_named() {
    let job = Job::new();
    let rsh = job.rsh();
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero-run"));
    command.args(["-n", "1", "--hosts", "127.0.0.2", "--rsh", &rsh, "--", "no-such-program"]);
    let output = command.current_dir(job.folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    let expected = "zero-run: rank 0 on 127.0.0.2 failed: not started: there is no program no-such-program\n";
    assert_eq!(String::from_utf8(output.stderr).unwrap(), expected);
}

#[test]
fn signals_reach_other_machines() {
    let job = Job::new();
    let rsh = job.rsh();
    let child =
        job.start(&["-n", "1", "--hosts", "127.0.0.2", "--rsh", &rsh, "--grace", "1000"], NOTES_SIGNALS);
    job.wait_for("up-0");
    let mut expected = String::new();
    for (number, name) in [(Signal::USR1, "USR1"), (Signal::INT, "INT"), (Signal::TERM, "TERM")] {
        signal(&child, number);
        expected = expected + name + "\n";
        wait_until(name, || (job.wait_for("signals-0") == expected).then_some(()));
    }
    signal(&child, Signal::INT);
    assert_eq!(finish(child).code, Some(137));
    wait_until_gone(job.wait_for_pid("up-0"));
}

#[test]
fn a_rank_ends_with_its_connection() {
    let job = Job::new();
    // The connection is what is in the group of this script.
    let connection = "cat | setsid -w \"$@\" 2>&1 >/dev/null | cat >&2";
    let rsh = job.write_rsh(&format!("echo $$ >rsh-group; shift; {connection}"));
    let child = job.start(&["-n", "1", "--hosts", "127.0.0.2", "--rsh", &rsh], &format!("{FAMILY} wait"));
    let family = family(&job);
    kill_process_group(job.wait_for_pid("rsh-group"), Signal::KILL).unwrap();
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(255));
    let expected = "zero-run: rank 0 on 127.0.0.2 failed: its machine was lost: ";
    assert!(outcome.report().starts_with(expected), "{}", outcome.report());
    family.into_iter().for_each(wait_until_gone);
}

#[test]
fn nothing_is_left_elsewhere_when_the_launcher_is_killed() {
    let job = Job::new();
    let rsh = job.rsh();
    let mut child = job.start(&["-n", "1", "--hosts", "127.0.0.2", "--rsh", &rsh], &format!("{FAMILY} wait"));
    let family = family(&job);
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    family.into_iter().for_each(wait_until_gone);
    wait_until("the removal of temporary files", || job.files("tmp").is_empty().then_some(()));
    let mut rest = String::new();
    child.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn a_remote_shell_that_does_not_work_is_no_success() {
    let job = Job::new();
    for (rsh, code) in [("true", 255), ("false", 255), ("no-such-shell", 127)] {
        let outcome = job.run(&["-n", "1", "--hosts", "127.0.0.2", "--rsh", rsh], "exit 0");
        assert_eq!(outcome.code, Some(code), "{rsh}");
    }
    let outcome = job.run(&["-n", "1", "--hosts", "no-such-host.invalid"], "exit 0");
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.report().contains("no-such-host.invalid"), "{}", outcome.report());
}

#[test]
fn ranks_that_cannot_be_placed_are_an_error_of_the_command_line() {
    for (options, said) in [
        (&["-n", "3", "--hosts", "a:2"][..], "zero-run: -n 3 does not agree with --hosts"),
        (&["--hosts", "a,b"], "zero-run: how many ranks?"),
    ] {
        let outcome = Job::new().run(options, "exit 0");
        assert_eq!((outcome.code, outcome.stdout()), (Some(2), ""), "{options:?}");
        assert!(outcome.stderr().starts_with(said), "{}", outcome.stderr());
    }
}

#[test]
fn a_program_that_launches_wrongly_placed_ranks_goes_on() {
    let options = LaunchOptions::try_parse_from(["zero-run", "-n", "3", "--hosts", "a:2", "train"]).unwrap();
    assert_eq!(launcher::run(&options), 2);
}

/// What a rank of the next test runs.
#[test]
#[ignore = "run by another test"]
fn a_rank_that_joins_in_vain() {
    let world = World::from_env().unwrap().expect("another test should have started this");
    let error = world.run(|_| Ok::<_, CommError>(())).unwrap_err();
    assert!(matches!(error, WorldError::Connect { .. }), "{error}");
    exit(7);
}

#[test]
fn ranks_that_do_not_join_before_the_deadline_for_that_are_named() {
    let job = Job::new();
    let script = r#"[ "$RANK" = 1 ] && exec sleep 1000
        exec "$JOINER" --exact a_rank_that_joins_in_vain --ignored"#;
    let mut command = job.command(&["-n", "2", "--join-deadline", "2"], script);
    let outcome = finish(command.env("JOINER", env::current_exe().unwrap()).spawn().unwrap());
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr());
    assert!(outcome.report().starts_with("zero-run: rank 1 failed first: did not join within 2s\n"));
    assert!(outcome.report().contains("  rank 0: stopped because of rank 1\n"), "{}", outcome.stderr());
}
