//! Ranks that measure together, in processes of their own.

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use zero_comm::{Coordinator, CoordinatorOptions, Token};
use zero_core::WorldSize;

use crate::worker::TOKEN;
use crate::{LARGEST, Task};

/// How long the ranks of a team may take to come.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the ranks of a team do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// They copy memory, as threads.
    CopyingThreads,
    /// They copy memory, as processes.
    CopyingProcesses,
    InProcess,
    SharedMemory,
    Tcp,
    Gloo,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] = [
        Self::CopyingThreads,
        Self::InProcess,
        Self::CopyingProcesses,
        Self::SharedMemory,
        Self::Gloo,
        Self::Tcp,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::CopyingThreads => "copying threads",
            Self::CopyingProcesses => "copying processes",
            Self::InProcess => "in-process",
            Self::SharedMemory => "shared memory",
            Self::Tcp => "TCP",
            Self::Gloo => "Gloo",
        }
    }

    const fn is_one_process(self) -> bool {
        matches!(self, Self::CopyingThreads | Self::InProcess)
    }
}

pub(crate) struct Team {
    kind: Kind,
    ranks: Vec<BufReader<TcpStream>>,
    processes: Processes,
    #[expect(dead_code, reason = "serves until it is dropped, after the processes")]
    coordinator: Option<Coordinator>,
}

/// They end when their connections do.
struct Processes(Vec<Child>);

impl Team {
    pub(crate) fn start(kind: Kind, size: WorldSize) -> Result<Self, Box<dyn Error>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let orders = listener.local_addr()?;
        let mut coordinator = None;
        let mut processes = Processes(Vec::new());
        if kind == Kind::Gloo {
            processes.0.push(gloo(size, orders)?);
        } else {
            let token = Token::generate()?;
            let options = CoordinatorOptions { size, token: token.clone(), deadline: PATIENCE, host: None };
            let meeting = Coordinator::new(TcpListener::bind("127.0.0.1:0")?, options)?;
            for rank in 0..if kind.is_one_process() { 1 } else { size.get() } {
                let child = Command::new(env::current_exe()?)
                    .args(["--worker", kind.name(), &rank.to_string(), &size.to_string()])
                    .args([orders.to_string(), meeting.address().to_string()])
                    .env(TOKEN, token.to_hex())
                    .stdin(Stdio::null())
                    .spawn()?;
                processes.0.push(child);
            }
            coordinator = Some(meeting);
        }
        let ranks = processes.connections(&listener, size.get())?;
        Ok(Self { kind, ranks, processes, coordinator })
    }

    pub(crate) const fn kind(&self) -> Kind {
        self.kind
    }

    /// The seconds that `task` takes the slowest rank.
    pub(crate) fn seconds(&mut self, task: Task) -> Result<f64, Box<dyn Error>> {
        let order = format!("{} {} {}\n", task.operation.name(), task.bytes, task.times());
        for rank in &mut self.ranks {
            rank.get_mut().write_all(order.as_bytes())?;
        }
        let mut slowest: f64 = 0.0;
        for rank in &mut self.ranks {
            let mut answer = String::new();
            rank.read_line(&mut answer)?;
            let seconds = answer.trim().parse().map_err(|_| {
                format!("{}: a rank ended during {task}; what it said stands above", self.kind.name())
            })?;
            slowest = slowest.max(seconds);
        }
        Ok(slowest)
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.ranks.clear();
        for process in &mut self.processes.0 {
            // A process that cannot be waited for has ended.
            let _ = process.wait();
        }
    }
}

impl Processes {
    /// The connections of `count` ranks.
    fn connections(
        &mut self,
        listener: &TcpListener,
        count: usize,
    ) -> Result<Vec<BufReader<TcpStream>>, Box<dyn Error>> {
        listener.set_nonblocking(true)?;
        let begin = Instant::now();
        let mut ranks = Vec::new();
        while ranks.len() < count {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    stream.set_nodelay(true)?;
                    ranks.push(BufReader::new(stream));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    for process in &mut self.0 {
                        if let Some(status) = process.try_wait()? {
                            return Err(
                                format!("a process ended before it measured anything: {status}").into()
                            );
                        }
                    }
                    if begin.elapsed() > PATIENCE {
                        self.0.iter_mut().try_for_each(Child::kill)?;
                        return Err("its ranks did not come".into());
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(ranks)
    }
}

/// PyTorch's launcher, which the variable `TORCHRUN` names or the search path has.
fn gloo(size: WorldSize, orders: SocketAddr) -> Result<Child, Box<dyn Error>> {
    let torchrun = env::var_os("TORCHRUN").unwrap_or_else(|| OsString::from("torchrun"));
    let started = Command::new(&torchrun)
        .args(["--standalone", "--nproc-per-node", &size.to_string()])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/comm/gloo.py"))
        .args([orders.to_string(), LARGEST.to_string()])
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .spawn();
    started.map_err(|error| {
        let torchrun = torchrun.to_string_lossy();
        format!("{torchrun} did not start ({error}); set TORCHRUN to the one of a PyTorch installation")
            .into()
    })
}
