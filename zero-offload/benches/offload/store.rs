//! How fast tensors come from and go to the disk, against fio.
//!
//! fio has as many requests of the same size in flight, past the page cache too, with its buffers and its file registered,
//! in a file that it has written before, in the same directory: the one that the variable `STORE_DIRECTORY` names, else
//! Cargo's for temporary files. Both places of our tensors have been written before as well, and our times include the
//! checksums. Without fio its rows have no value.

use std::cell::RefCell;
use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use zero_core::Bytes;
use zero_offload::{
    Adam, Engine, FloatsMut, HostBuffer, HostOptimizer, HostPool, NvmeStore, Pipeline, Slot, StoreError,
    StoreOptions, Table, Update, Workers,
};

use crate::samples::{Contender, Samples, judged, told};

/// The size of the tensor.
const BYTES: usize = 1 << 30;
/// What a pipeline may use.
const BUDGET: u64 = 64 << 20;
const FIO: &str = "fio";
const COMPUTE: &str = "compute";

pub(crate) fn rows() -> Result<Vec<Value>, Box<dyn Error>> {
    let directory =
        env::var_os("STORE_DIRECTORY").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let pool = HostPool::default();
    let mut stores = Vec::new();
    for (name, engine) in [("io_uring", Engine::Uring), ("threads", Engine::Threads)] {
        match NvmeStore::open(StoreOptions { engine, ..StoreOptions::new(&directory) }) {
            Ok(store) => stores.push(Contestant::new(name, &store, &pool)?),
            Err(StoreError::NoUring { source }) => eprintln!("no io_uring here: {source}"),
            Err(error) => return Err(error.into()),
        }
    }
    let fio = Fio::find(&directory)?;

    let mut rows = Vec::new();
    for direction in ["read", "write"] {
        let mut contenders: Vec<Contender<'_>> = Vec::new();
        if let Some(fio) = &fio {
            contenders.push((FIO, Box::new(|| fio.seconds(direction))));
        }
        for store in &mut stores {
            contenders.push((store.name, Box::new(|| store.seconds(direction))));
        }
        let samples = Samples::take(direction, contenders)?;
        let rate = |name| samples.seconds(name).map(|seconds| BYTES as f64 / seconds / 1e9);
        rows.push(told(format!("{direction} 1 GiB, fio"), rate(FIO), "GB/s"));
        for store in &stores {
            let name = store.name;
            rows.push(told(format!("{direction} 1 GiB, {name}"), rate(name), "GB/s"));
            let share = samples.ratio(FIO, name);
            rows.push(judged(format!("{direction} 1 GiB, {name} against fio"), share, "x", 0.90));
        }
    }

    let contenders =
        stores.iter_mut().map(|store| -> Contender<'_> { (store.name, Box::new(|| store.update())) });
    let samples = Samples::take("update", contenders.collect())?;
    for store in &stores {
        let rate = samples.seconds(store.name).map(|seconds| 2.0 * BYTES as f64 / seconds / 1e9);
        rows.push(told(
            format!("update 1 GiB through 64 MiB, {}, read and written", store.name),
            rate,
            "GB/s",
        ));
    }
    rows.extend(resident(&mut stores, fio.as_ref(), &pool)?);
    Ok(rows)
}

/// A step of AdamW whose moments are on the disk, against the larger of what the disk takes at fio's rate and what the update
/// takes in memory.
fn resident(
    stores: &mut [Contestant],
    fio: Option<&Fio>,
    pool: &HostPool,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let step = RefCell::new(Step::new(pool)?);
    let mut contenders: Vec<Contender<'_>> = vec![(COMPUTE, Box::new(|| step.borrow_mut().in_memory()))];
    if let Some(fio) = fio {
        for direction in ["read", "write"] {
            contenders.push((direction, Box::new(|| fio.seconds(direction))));
        }
    }
    for store in &mut *stores {
        contenders.push((store.name, Box::new(|| step.borrow_mut().on_disk(store))));
    }
    let samples = Samples::take("step", contenders)?;
    let disk = samples.seconds("read").zip(samples.seconds("write")).map(|(read, write)| read + write);
    let compute = samples.seconds(COMPUTE);
    let least = disk.zip(compute).map(|(disk, compute)| disk.max(compute));
    let mut rows = vec![
        told(format!("AdamW of {ROWS} parameters, moments through fio"), disk, "s"),
        told(format!("AdamW of {ROWS} parameters, moments in memory"), compute, "s"),
    ];
    for store in stores {
        let name = store.name;
        let seconds = samples.seconds(name);
        rows.push(told(format!("AdamW of {ROWS} parameters, moments on the disk, {name}"), seconds, "s"));
        let share = least.zip(seconds).map(|(least, seconds)| least / seconds);
        let what = format!("the larger of disk at fio's rate and update, against the step, {name}");
        rows.push(judged(what, share, "x", 1.0 / 1.15));
    }
    Ok(rows)
}

/// Parameters whose moments take [`BYTES`].
const ROWS: usize = BYTES / 8;

/// What a step of AdamW needs beside what is on the disk.
struct Step {
    workers: Workers,
    optimizer: HostOptimizer,
    count: u64,
    parameters: HostBuffer,
    gradient: HostBuffer,
    moments: [HostBuffer; 2],
}

impl Step {
    fn new(pool: &HostPool) -> Result<Self, Box<dyn Error>> {
        let numbers = || {
            let mut buffer = pool.take(4 * ROWS);
            buffer.as_mut_slice::<f32>().fill(0.5);
            buffer
        };
        Ok(Self {
            workers: Workers::for_process()?,
            optimizer: HostOptimizer::new(Adam::ADAMW)?,
            count: 0,
            parameters: numbers(),
            gradient: numbers(),
            moments: [numbers(), numbers()],
        })
    }

    fn next(&mut self) -> Update {
        self.count += 1;
        Update { lr: 1e-3, step: self.count, gradient_factor: 1.0 }
    }

    fn in_memory(&mut self) -> Result<f64, Box<dyn Error>> {
        let update = self.next();
        let Self { workers, optimizer, parameters, gradient, moments, .. } = self;
        let begun = Instant::now();
        let [first, second] = moments;
        let mut states = [first.as_mut_slice::<f32>().into(), second.as_mut_slice::<f32>().into()];
        let (parameters, gradient) = (parameters.as_mut_slice(), gradient.as_slice::<f32>().into());
        optimizer.update(workers, update, parameters, gradient, &mut states, None)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn on_disk(&mut self, store: &mut Contestant) -> Result<f64, Box<dyn Error>> {
        let update = self.next();
        let Self { workers, optimizer, parameters, gradient, .. } = self;
        let (parameters, gradient) = (parameters.as_mut_slice::<f32>(), gradient.as_slice::<f32>());
        let begun = Instant::now();
        store.pipeline.update(&mut store.tables, |tile| {
            let rows = tile.rows.start as usize..tile.rows.end as usize;
            let mut states: Vec<FloatsMut<'_>> = tile
                .columns
                .iter_mut()
                .map(|column| bytemuck::cast_slice_mut::<u8, f32>(column).into())
                .collect();
            let (values, gradient) = (&mut parameters[rows.clone()], gradient[rows].into());
            let done = optimizer.update(workers, update, values, gradient, &mut states, None);
            done.map_err(|error| StepError(error.into()))
        })?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// What fails a step.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct StepError(Box<dyn Error + Send + Sync>);

impl From<StoreError> for StepError {
    fn from(error: StoreError) -> Self {
        Self(error.into())
    }
}

/// A store with a tensor and a table in it.
struct Contestant {
    name: &'static str,
    slot: Slot,
    buffer: HostBuffer,
    tables: [Table; 1],
    pipeline: Pipeline,
}

impl Contestant {
    fn new(name: &'static str, store: &NvmeStore, pool: &HostPool) -> Result<Self, Box<dyn Error>> {
        let slot = store.reserve("tensor", BYTES as u64)?;
        let mut buffer = pool.take(BYTES);
        buffer.as_mut_slice::<u64>().iter_mut().zip(0..).for_each(|(word, index)| *word = index);
        let tables = [Table::reserve(store, "table", BYTES as u64 / 8, &[("moment1", 4), ("moment2", 4)])?];
        let pipeline = Pipeline::new(store, Bytes::new(BUDGET))?;
        let mut new = Self { name, slot, buffer, tables, pipeline };
        for _ in 0..2 {
            new.seconds("write")?;
            new.update()?;
        }
        Ok(new)
    }

    fn seconds(&mut self, direction: &str) -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        if direction == "read" {
            self.slot.read(0, &mut self.buffer)?;
        } else {
            self.slot.write(0, &self.buffer)?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    /// The transfers alone: nothing is done to a tile.
    fn update(&mut self) -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        self.pipeline.update(&mut self.tables, |_| Ok::<_, StoreError>(()))?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// The program, and a file that it has written.
struct Fio(tempfile::TempPath);

impl Fio {
    /// None, with the reason told, where there is no fio or it cannot do this.
    fn find(directory: &Path) -> Result<Option<Self>, Box<dyn Error>> {
        let fio = Self(tempfile::NamedTempFile::new_in(directory)?.into_temp_path());
        if let Err(error) = fio.seconds("write") {
            eprintln!("no fio here: {error}");
            return Ok(None);
        }
        Ok(Some(fio))
    }

    /// What it says its transfers took.
    fn seconds(&self, direction: &str) -> Result<f64, Box<dyn Error>> {
        let options = StoreOptions::new("");
        let output = Command::new(FIO)
            .args(["--name=store", "--direct=1", "--output-format=json"])
            .args(["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"])
            .arg(format!("--filename={}", self.0.display()))
            .args([format!("--rw={direction}"), format!("--size={BYTES}")])
            .args([format!("--bs={}", options.block.get()), format!("--iodepth={}", options.depth)])
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0][direction]["bw_bytes"].as_f64().filter(|&rate| rate > 0.0);
        Ok(BYTES as f64 / rate.ok_or("fio reports no rate")?)
    }
}
