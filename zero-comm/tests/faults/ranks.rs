//! Worlds of processes, as the tests see them.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;
use zero_comm::{CommError, Coordinator, CoordinatorOptions, Token};
use zero_core::WorldSize;

use crate::child::{JOINING, PLAN, Place, Plan, RankPlan, Scenario};

/// Who hosts the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leader {
    /// The test.
    Test,
    /// A process of its own.
    Process,
    /// Rank 0, which leaves its address in a file.
    RankZero,
    /// Rank 0, at an address that all know.
    RankZeroAt(String, u16),
}

/// How to start ranks.
#[derive(Clone, Debug)]
pub(crate) struct Worlds {
    hosts: Vec<usize>,
    deadline: Duration,
    leader: Leader,
    /// By rank: what to start the process with.
    prefixes: Vec<Vec<String>>,
}

impl Worlds {
    /// A rank on each of `hosts`, whose operations wait for `deadline`.
    pub(crate) fn new(hosts: &[usize], deadline: Duration) -> Self {
        Self { hosts: hosts.to_vec(), deadline, leader: Leader::Test, prefixes: vec![vec![]; hosts.len()] }
    }

    pub(crate) fn led_by(self, leader: Leader) -> Self {
        Self { leader, ..self }
    }

    pub(crate) fn with_prefixes(self, prefixes: Vec<Vec<String>>) -> Self {
        Self { prefixes, ..self }
    }

    pub(crate) fn start(&self, scenario: Scenario) -> Ranks {
        let (size, folder) = (self.hosts.len(), tempfile::tempdir().unwrap());
        let token = Token::generate().unwrap();
        let (mut coordinator, mut leader) = (None, None);
        let meeting = match &self.leader {
            Leader::Test => {
                let (listener, token) = (TcpListener::bind("127.0.0.1:0").unwrap(), token.clone());
                let size = WorldSize::new(size).unwrap();
                let options = CoordinatorOptions { size, token, deadline: JOINING, host: None };
                let hosted = Coordinator::new(listener, options).unwrap();
                let address = hosted.address().to_string();
                coordinator = Some(hosted);
                Place::Coordinator(address)
            }
            Leader::Process => {
                let plan = Plan::Lead { size, token: token.to_hex() };
                let mut process = Process::start(&plan, &[], folder.path());
                let address = process.hear("address");
                leader = Some(process);
                Place::Coordinator(serde_json::from_value(address).unwrap())
            }
            Leader::RankZero => Place::File(folder.path().join("meeting/address")),
            Leader::RankZeroAt(host, port) => Place::RankZero(host.clone(), *port),
        };
        let alone = self.hosts.iter().all(|host| *host == self.hosts[0]);
        let processes = self.hosts.iter().zip(&self.prefixes).enumerate().map(|(rank, (host, prefix))| {
            let plan = Plan::Rank(RankPlan {
                rank,
                size,
                token: token.to_hex(),
                host: (!alone).then(|| format!("host {host}")),
                meeting: meeting.clone(),
                deadline: self.deadline,
                scenario,
            });
            let words = folder.path().join(rank.to_string());
            Process::start(&plan, prefix, &words)
        });
        Ranks { processes: processes.collect(), leader, coordinator, ports: Vec::new(), folder }
    }
}

/// Ranks that run. Dropped, they are killed.
pub(crate) struct Ranks {
    processes: Vec<Process>,
    leader: Option<Process>,
    coordinator: Option<Coordinator>,
    /// Where they listened when they were ready.
    ports: Vec<u16>,
    folder: TempDir,
}

impl Ranks {
    pub(crate) fn len(&self) -> usize {
        self.processes.len()
    }

    /// Waits until all ranks say that they are at the place in question.
    pub(crate) fn are_ready(&mut self) {
        for process in &mut self.processes {
            process.hear("ready");
        }
        let processes = self.processes.iter().chain(&self.leader);
        self.ports = processes.flat_map(|process| listening(process.child.id())).collect();
        assert!(self.ports.len() >= self.processes.len(), "every rank has a port: {:?}", self.ports);
        if let Some(coordinator) = &self.coordinator {
            self.ports.push(coordinator.address().port());
        }
    }

    /// Lets those go on that wait for the test's word.
    pub(crate) fn go_on(&mut self) {
        for process in &mut self.processes {
            // Not all read it, and not all live.
            let _ = process.child.stdin.as_mut().unwrap().write_all(b"\n");
        }
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(self.processes[rank].pid(), signal).unwrap();
    }

    pub(crate) fn kill_leader(&self) {
        kill_process(self.leader.as_ref().unwrap().pid(), Signal::KILL).unwrap();
    }

    /// The error that a rank's operation returned.
    pub(crate) fn error(&mut self, rank: usize) -> CommError {
        serde_json::from_value(self.processes[rank].hear("error")).unwrap()
    }

    /// What a rank left for its launcher, when it has ended.
    pub(crate) fn words(&mut self, rank: usize) -> Value {
        self.processes[rank].wait();
        let words = self.folder.path().join(rank.to_string());
        serde_json::from_slice(&fs::read(&words).unwrap()).unwrap()
    }

    pub(crate) fn have_ended(&mut self) {
        for process in self.processes.iter_mut().chain(&mut self.leader) {
            process.wait();
        }
    }

    pub(crate) fn exit_code(&mut self, rank: usize) -> Option<i32> {
        self.processes[rank].wait().code()
    }

    /// Waits for the end, after which nothing may be left. Those that were not killed must have had no objection.
    pub(crate) fn leave_nothing(mut self) {
        self.coordinator.take();
        self.have_ended();
        for process in self.processes.iter_mut().chain(&mut self.leader) {
            let status = process.wait();
            assert!(matches!(status.code(), Some(0 | 3) | None), "{status}");
            assert!(test_kill_process(process.pid()).is_err(), "a process is left");
        }
        let left: Vec<_> = listeners("/proc/self/net/tcp").into_iter().map(|(port, _)| port).collect();
        assert!(self.ports.iter().all(|port| !left.contains(port)), "{:?} of {left:?}", self.ports);
        let shared = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let names: Vec<_> = shared.map(|entry| entry.file_name()).collect();
        assert!(!names.iter().any(|name| name.to_string_lossy().contains("zero-comm")), "{names:?}");
        assert!(!self.folder.path().join("meeting/address").exists());
    }
}

/// A process of this test program.
struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    fn start(plan: &Plan, prefix: &[String], words: &Path) -> Self {
        let exe = env::current_exe().unwrap();
        let mut command = match prefix.split_first() {
            None => Command::new(exe),
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(exe);
                command
            }
        };
        let mut child = command
            .args(["--exact", "child::a_process_of_a_test", "--ignored", "--nocapture"])
            .env(PLAN, serde_json::to_string(plan).unwrap())
            .env("ZERO_LAST_WORDS", words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    fn wait(&mut self) -> ExitStatus {
        // It must be able to say all that it has to say.
        std::io::copy(&mut self.lines, &mut std::io::sink()).unwrap();
        self.child.wait().unwrap()
    }

    /// Waits for the process to say `what`.
    fn hear(&mut self, what: &str) -> Value {
        let (mut told, mut line) = (String::new(), String::new());
        while self.lines.read_line(&mut line).unwrap() > 0 {
            let said = line.strip_prefix("@@").and_then(|said| said.split_once(' '));
            if let Some((_, value)) = said.filter(|(key, _)| *key == what) {
                return serde_json::from_str(value).unwrap();
            }
            told.push_str(&line);
            line.clear();
        }
        panic!("a process did not say {what:?}, but:\n{told}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The TCP ports at which somebody listens, by the table of a network, each with the number of its socket.
fn listeners(table: &str) -> Vec<(u16, String)> {
    const LISTEN: &str = "0A";
    let Ok(text) = fs::read_to_string(table) else { return Vec::new() };
    text.lines()
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
            let port = u16::from_str_radix(local.split_once(':')?.1, 16).ok()?;
            (*state == LISTEN).then(|| (port, (*inode).to_owned()))
        })
        .collect()
}

/// The ports at which a process listens.
pub(crate) fn listening(pid: u32) -> Vec<u16> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    let sockets: Vec<_> = targets.map(|target| target.to_string_lossy().into_owned()).collect();
    listeners(&format!("/proc/{pid}/net/tcp"))
        .into_iter()
        .filter(|(_, inode)| sockets.contains(&format!("socket:[{inode}]")))
        .map(|(port, _)| port)
        .collect()
}
