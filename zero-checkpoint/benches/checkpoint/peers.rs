//! fio, and torch.distributed.checkpoint in a process of Python's that does as it is told.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

const PROGRAM: &str = include_str!("torch.py");

/// fio, and a file of its own.
pub(crate) struct Fio {
    path: tempfile::TempPath,
    bytes: u64,
}

impl Fio {
    /// None, with the reason told, where there is no fio or it cannot do this.
    pub(crate) fn find(directory: &Path, bytes: u64) -> Result<Option<Self>, Box<dyn Error>> {
        let fio = Self { path: tempfile::NamedTempFile::new_in(directory)?.into_temp_path(), bytes };
        if let Err(error) = fio.write_many() {
            eprintln!("no fio here: {error}");
            return Ok(None);
        }
        Ok(Some(fio))
    }

    /// Seconds of a sequential write of a new file past the page cache, many blocks at once, with what makes it durable.
    pub(crate) fn write_many(&self) -> Result<f64, Box<dyn Error>> {
        self.write(&["--ioengine=io_uring", "--iodepth=16", "--bs=1M"])
    }

    /// The same by large blocks, one at a time.
    pub(crate) fn write_large(&self) -> Result<f64, Box<dyn Error>> {
        self.write(&["--ioengine=psync", "--bs=8M"])
    }

    fn write(&self, options: &[&str]) -> Result<f64, Box<dyn Error>> {
        // Over an existing file it would find its blocks allocated.
        std::fs::remove_file(&self.path)?;
        self.run("write", &[&["--direct=1", "--end_fsync=1"], options].concat())
    }

    /// Seconds of a sequential read past the page cache, many blocks at once.
    pub(crate) fn read_direct(&self) -> Result<f64, Box<dyn Error>> {
        self.run("read", &["--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=1M"])
    }

    /// Seconds of a sequential read through the page cache, which has nothing of the file.
    pub(crate) fn read_cached(&self) -> Result<f64, Box<dyn Error>> {
        forget(&self.path)?;
        self.run("read", &["--direct=0", "--ioengine=psync", "--bs=1M", "--invalidate=1"])
    }

    fn run(&self, direction: &str, options: &[&str]) -> Result<f64, Box<dyn Error>> {
        let output = Command::new("fio")
            .args(["--name=checkpoint", "--output-format=json", &format!("--rw={direction}")])
            .args([format!("--filename={}", self.path.display()), format!("--size={}", self.bytes)])
            .args(options)
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0][direction]["bw_bytes"].as_f64().filter(|&rate| rate > 0.0);
        Ok(self.bytes as f64 / rate.ok_or("fio reports no rate")?)
    }
}

/// Takes a file, or all files of a folder, out of the page cache.
pub(crate) fn forget(path: &Path) -> Result<(), Box<dyn Error>> {
    if path.is_dir() {
        return std::fs::read_dir(path)?.try_for_each(|entry| forget(&entry?.path()));
    }
    let file = std::fs::File::open(path)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// torch.distributed.checkpoint with a state of its own.
pub(crate) struct Torch {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    directory: PathBuf,
}

impl Torch {
    /// None, with the reason told, where PyTorch is not installed.
    pub(crate) fn find(directory: &Path, bytes: u64) -> Result<Option<Self>, Box<dyn Error>> {
        match Self::start(directory.join("torch"), bytes) {
            Ok(torch) => Ok(Some(torch)),
            Err(error) => {
                eprintln!("no PyTorch here: {error}");
                Ok(None)
            }
        }
    }

    fn start(directory: PathBuf, bytes: u64) -> Result<Self, Box<dyn Error>> {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let mut child = Command::new(python)
            .args(["-c", PROGRAM])
            .arg(&directory)
            .arg(bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        let mut torch = Self { child, orders, answers: BufReader::new(answers), directory };
        match torch.answer()?.as_str() {
            "ready" => Ok(torch),
            other => Err(other.into()),
        }
    }

    pub(crate) fn write(&mut self) -> Result<f64, Box<dyn Error>> {
        self.seconds("write")
    }

    /// A read that finds nothing in the page cache.
    pub(crate) fn read(&mut self) -> Result<f64, Box<dyn Error>> {
        forget(&self.directory)?;
        self.seconds("read")
    }

    fn seconds(&mut self, task: &str) -> Result<f64, Box<dyn Error>> {
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
        Err("it ended without an answer".into())
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // What it does is of no interest any more, nor how it ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
