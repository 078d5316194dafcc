//! PyTorch and DeepSpeed, in a process of Python's that does as it is told.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const PROGRAM: &str = include_str!("adamw.py");

/// A process that holds one peer's parameters and states.
pub(crate) struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the peer of this name; an error if it is not installed.
    pub(crate) fn start(name: &str, elements: usize, threads: usize) -> Result<Self, Box<dyn Error>> {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let mut child = Command::new(python)
            .args(["-c", PROGRAM, name, &elements.to_string(), &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(orders), Some(answers)) = (orders, answers) else { return Err("no pipes".into()) };
        let mut peer = Self { child, orders, answers: BufReader::new(answers) };
        match peer.answer()?.as_str() {
            "ready" => Ok(peer),
            other => Err(format!("it is not installed: {other}").into()),
        }
    }

    /// Seconds of one step of the task.
    pub(crate) fn seconds(&mut self, task: &str) -> Result<f64, Box<dyn Error>> {
        writeln!(self.orders, "{task}")?;
        Ok(self.answer()?.parse()?)
    }

    /// The next answer; what libraries print is passed over.
    fn answer(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        while self.answers.read_line(&mut line)? > 0 {
            if let Some(answer) = line.strip_prefix("answer ") {
                return Ok(answer.trim_end().to_owned());
            }
            line.clear();
        }
        Err("the peer ended without an answer".into())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // What it does is of no interest any more, nor how it ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
