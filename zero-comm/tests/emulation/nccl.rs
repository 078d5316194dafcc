//! The NCCL: ranks send each other files, which serves threads and processes alike. Every operation is made of messages, so
//! that none waits for more than it needs. `EMULATED_NCCL_FOLDER` is where the files go.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use super::{Address, Code, SUCCESS, bytes_at, current, new_id, pointer, put, stream, write_at};

const UNHANDLED: Code = 2;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const IN_PROGRESS: Code = 7;

// Operations.
const SUM: c_int = 0;
const MAX: c_int = 2;
const MIN: c_int = 3;
const MEAN: c_int = 4;

/// The longest that a rank waits for a file before it looks whether it was told to end.
const SLICE: Duration = Duration::from_micros(100);

#[repr(C)]
pub(super) struct UniqueId([u8; 128]);

struct Communicator {
    folder: PathBuf,
    rank: usize,
    size: usize,
    is_connected: bool,
    /// What went wrong.
    failure: Code,
    has_ended: Arc<AtomicBool>,
    /// Messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    splits: u64,
    /// The color of this rank in a split that is under way, and the address for what comes of it.
    splitting: Option<(c_int, Address)>,
}

/// What a launch does once it is its turn.
enum Step {
    Send {
        file: PathBuf,
        from: Address,
        bytes: usize,
    },
    /// Puts messages of ranks, in their order, at an address: side by side, or reduced. The own one is at an address.
    Combine {
        parts: Vec<Part>,
        into: Address,
        reduction: Option<(c_int, c_int)>,
    },
}

enum Part {
    Here(Address, usize),
    /// A file of so many bytes.
    Coming(PathBuf, usize),
}

thread_local! {
    /// How deep groups are nested, and what is to be launched: on which stream, for which communicator.
    static GROUP: RefCell<(usize, Vec<(isize, usize, Vec<Step>)>)> = const { RefCell::new((0, Vec::new())) };
}

static COMMUNICATORS: LazyLock<Mutex<HashMap<usize, Communicator>>> = LazyLock::new(Mutex::default);

fn with<T>(id: usize, f: impl FnOnce(&mut Communicator) -> T) -> T {
    f(COMMUNICATORS.lock().unwrap().get_mut(&id).expect("a communicator that was made"))
}

impl Communicator {
    fn new(folder: PathBuf, rank: usize, size: usize) -> Self {
        Self {
            folder,
            rank,
            size,
            is_connected: false,
            failure: SUCCESS,
            has_ended: Arc::default(),
            sent: vec![0; size],
            received: vec![0; size],
            splits: 0,
            splitting: None,
        }
    }

    fn send(&mut self, to: usize, from: Address, bytes: usize) -> Step {
        self.sent[to] += 1;
        let file = self.folder.join(format!("{}-{to}-{}", self.rank, self.sent[to]));
        Step::Send { file, from, bytes }
    }

    fn receive(&mut self, from: usize, bytes: usize) -> Part {
        self.received[from] += 1;
        Part::Coming(self.folder.join(format!("{from}-{}-{}", self.rank, self.received[from])), bytes)
    }

    /// Gives each rank so many bytes at the address for it, and puts what comes of those for this one at another.
    fn collective(
        &mut self,
        from: impl Fn(usize) -> Address,
        bytes: usize,
        into: Address,
        reduction: Option<(c_int, c_int)>,
    ) -> Vec<Step> {
        let (own, mut steps, mut parts) = (self.rank, Vec::new(), Vec::new());
        for rank in 0..self.size {
            if rank == own {
                parts.push(Part::Here(from(own), bytes));
            } else {
                steps.push(self.send(rank, from(rank), bytes));
                parts.push(self.receive(rank, bytes));
            }
        }
        steps.push(Step::Combine { parts, into, reduction });
        steps
    }

    /// Looks whether what was begun is done; with the communicator that came of a split.
    fn look(&mut self) -> (Code, Option<(usize, Self)>) {
        if !self.is_connected {
            let card = |rank| fs::read(self.folder.join(format!("rank-{rank}"))).ok();
            let Some(mut cards) = (0..self.size).map(card).collect::<Option<Vec<_>>>() else {
                return (IN_PROGRESS, None);
            };
            self.is_connected = true;
            cards.sort();
            cards.dedup();
            if cards.len() < self.size {
                // Two ranks have one device.
                self.failure = INVALID_USAGE;
            }
        }
        let Some((color, made)) = self.splitting else { return (self.failure, None) };
        let card = |rank| {
            let text = fs::read_to_string(self.folder.join(format!("split-{}-{rank}", self.splits))).ok()?;
            let (color, key) = text.split_once(' ')?;
            Some((color.parse::<c_int>().ok()?, key.parse::<c_int>().ok()?, rank))
        };
        let Some(cards) = (0..self.size).map(card).collect::<Option<Vec<_>>>() else {
            return (IN_PROGRESS, None);
        };
        self.splitting = None;
        if color < 0 {
            return (self.failure, None);
        }
        let mut members: Vec<_> = cards.into_iter().filter(|card| card.0 == color).collect();
        members.sort_unstable();
        let rank = members.iter().position(|card| card.2 == self.rank).expect("it came itself");
        let folder = self.folder.join(format!("group-{}-{color}", self.splits));
        fs::create_dir_all(&folder).unwrap();
        let mut child = Self::new(folder, rank, members.len());
        child.is_connected = true;
        let id = new_id();
        put(pointer(made), id);
        (self.failure, Some((id, child)))
    }
}

impl Step {
    fn run(self, has_ended: &AtomicBool) {
        let (parts, into, reduction) = match self {
            Self::Send { file, from, bytes } => return deliver(&file, &bytes_at(from, bytes)),
            Self::Combine { parts, into, reduction } => (parts, into, reduction),
        };
        let mut all = Vec::new();
        for part in parts {
            let (file, bytes) = match part {
                Part::Here(from, bytes) => {
                    all.push(bytes_at(from, bytes));
                    continue;
                }
                Part::Coming(file, bytes) => (file, bytes),
            };
            let content = loop {
                if let Ok(content) = fs::read(&file) {
                    fs::remove_file(&file).unwrap();
                    break content;
                }
                if has_ended.load(Ordering::Relaxed) {
                    return;
                }
                thread::sleep(SLICE);
            };
            assert_eq!(content.len(), bytes, "{} has as much as is received", file.display());
            all.push(content);
        }
        write_at(
            into,
            &match reduction {
                None => all.concat(),
                Some((op, dtype)) => reduce(&all, op, dtype),
            },
        );
    }
}

/// A file that is there at once or not at all. Its folder may be gone, when a test has ended.
fn deliver(file: &Path, content: &[u8]) {
    let new = file.with_extension("new");
    drop(fs::write(&new, content).and_then(|()| fs::rename(new, file)));
}

/// Notes what an operation does, for the end of the group or at once.
fn enqueue(on: isize, id: usize, steps: impl FnOnce(&mut Communicator) -> Vec<Step>) -> Code {
    let steps = with(id, steps);
    GROUP.with_borrow_mut(|group| group.1.push((on, id, steps)));
    launch()
}

/// Launches what was noted, outside of groups.
fn launch() -> Code {
    let noted =
        GROUP.with_borrow_mut(|group| if group.0 == 0 { std::mem::take(&mut group.1) } else { Vec::new() });
    let mut launches: Vec<(isize, usize, Vec<Step>)> = Vec::new();
    for (on, id, steps) in noted {
        match launches.iter_mut().find(|launch| (launch.0, launch.1) == (on, id)) {
            Some(launch) => launch.2.extend(steps),
            None => launches.push((on, id, steps)),
        }
    }
    for (on, id, mut steps) in launches {
        // What is sent waits for nobody, so that messages in both directions go at once.
        steps.sort_by_key(|step| matches!(step, Step::Combine { .. }));
        let has_ended = with(id, |comm| Arc::clone(&comm.has_ended));
        stream(on).push(move || steps.into_iter().for_each(|step| step.run(&has_ended)));
    }
    SUCCESS
}

// Elements, by NCCL's number of their type. Tests send numbers that f64 has exactly.

fn size_of_dtype(dtype: c_int) -> usize {
    match dtype {
        1 => 1,
        6 | 9 => 2,
        2 | 7 => 4,
        4 | 8 => 8,
        other => unimplemented!("type {other}"),
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("an element has its bytes")
}

fn decode(dtype: c_int, bytes: &[u8]) -> f64 {
    match dtype {
        1 => bytes[0].into(),
        2 => i32::from_le_bytes(array(bytes)).into(),
        4 => i64::from_le_bytes(array(bytes)) as f64,
        6 => f16_to_f32(u16::from_le_bytes(array(bytes))).into(),
        7 => f32::from_le_bytes(array(bytes)).into(),
        8 => f64::from_le_bytes(array(bytes)),
        _ => f32::from_bits(u32::from(u16::from_le_bytes(array(bytes))) << 16).into(),
    }
}

fn encode(dtype: c_int, value: f64) -> Vec<u8> {
    match dtype {
        1 => vec![value as u8],
        2 => (value as i32).to_le_bytes().to_vec(),
        4 => (value as i64).to_le_bytes().to_vec(),
        6 => f32_to_f16(value as f32).to_le_bytes().to_vec(),
        7 => (value as f32).to_le_bytes().to_vec(),
        8 => value.to_le_bytes().to_vec(),
        _ => {
            let bits = (value as f32).to_bits();
            ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).to_le_bytes()[..2].to_vec()
        }
    }
}

/// Of numbers that are neither tiny nor special.
fn f16_to_f32(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    f32::from_bits(sign | if rest == 0 { 0 } else { (rest << 13) + (112 << 23) })
}

/// As above.
fn f32_to_f16(value: f32) -> u16 {
    let (sign, rest) = ((value.to_bits() >> 16 & 0x8000) as u16, value.to_bits() & 0x7fff_ffff);
    sign | if rest == 0 { 0 } else { ((rest + 0x0fff + (rest >> 13 & 1) - (112 << 23)) >> 13) as u16 }
}

fn reduce(all: &[Vec<u8>], op: c_int, dtype: c_int) -> Vec<u8> {
    let (size, ranks) = (size_of_dtype(dtype), all.len() as f64);
    let element = |at: usize| {
        let values = all.iter().map(|bytes| decode(dtype, &bytes[at * size..][..size]));
        encode(
            dtype,
            match op {
                SUM => values.sum(),
                MAX => values.fold(f64::NEG_INFINITY, f64::max),
                MIN => values.fold(f64::INFINITY, f64::min),
                MEAN => values.sum::<f64>() / ranks,
                other => unimplemented!("operation {other}"),
            },
        )
    };
    (0..all[0].len() / size).flat_map(element).collect()
}

// The functions.

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    put(version, 22_304)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Code {
    let Ok(folder) = std::env::var("EMULATED_NCCL_FOLDER") else { return UNHANDLED };
    let folder = format!("{folder}/{}-{}", std::process::id(), new_id());
    let mut bytes = [0; 128];
    bytes[..folder.len()].copy_from_slice(folder.as_bytes());
    fs::create_dir_all(folder).map_or(UNHANDLED, |()| put(id, UniqueId(bytes)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    made: *mut usize,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    _: *mut c_void,
) -> Code {
    let folder = CStr::from_bytes_until_nul(&id.0).ok().and_then(|folder| folder.to_str().ok());
    let Some(folder) = folder.map(PathBuf::from) else { return INVALID_ARGUMENT };
    deliver(&folder.join(format!("rank-{rank}")), format!("device {}", current()).as_bytes());
    let (id, communicator) = (new_id(), Communicator::new(folder, rank as usize, size as usize));
    COMMUNICATORS.lock().unwrap().insert(id, communicator);
    put(made, id);
    IN_PROGRESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommSplit(
    parent: usize,
    color: c_int,
    key: c_int,
    made: *mut usize,
    _: *mut c_void,
) -> Code {
    with(parent, |parent| {
        parent.splits += 1;
        let file = parent.folder.join(format!("split-{}-{}", parent.splits, parent.rank));
        deliver(&file, format!("{color} {key}").as_bytes());
        parent.splitting = Some((color, made.expose_provenance() as Address));
    });
    IN_PROGRESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(_: usize) -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(id: usize) -> Code {
    ncclCommAbort(id)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(id: usize) -> Code {
    let gone = COMMUNICATORS.lock().unwrap().remove(&id);
    gone.map_or(INVALID_ARGUMENT, |gone| {
        gone.has_ended.store(true, Ordering::Relaxed);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(id: usize, state: *mut Code) -> Code {
    let (code, child) = with(id, Communicator::look);
    COMMUNICATORS.lock().unwrap().extend(child);
    put(state, code)
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(_: Code) -> *const c_char {
    c"an error of the emulator".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: usize) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Code {
    GROUP.with_borrow_mut(|group| group.0 += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Code {
    GROUP.with_borrow_mut(|group| group.0 -= 1);
    launch()
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(from: Address, count: usize, dtype: c_int, to: c_int, id: usize, on: isize) -> Code {
    enqueue(on, id, |comm| vec![comm.send(to as usize, from, count * size_of_dtype(dtype))])
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    into: Address,
    count: usize,
    dtype: c_int,
    from: c_int,
    id: usize,
    on: isize,
) -> Code {
    enqueue(on, id, |comm| {
        let parts = vec![comm.receive(from as usize, count * size_of_dtype(dtype))];
        vec![Step::Combine { parts, into, reduction: None }]
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    from: Address,
    into: Address,
    count: usize,
    dtype: c_int,
    id: usize,
    on: isize,
) -> Code {
    enqueue(on, id, |comm| comm.collective(|_| from, count * size_of_dtype(dtype), into, None))
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    from: Address,
    into: Address,
    count: usize,
    dtype: c_int,
    op: c_int,
    id: usize,
    on: isize,
) -> Code {
    enqueue(on, id, |comm| comm.collective(|_| from, count * size_of_dtype(dtype), into, Some((op, dtype))))
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    from: Address,
    into: Address,
    count: usize,
    dtype: c_int,
    op: c_int,
    id: usize,
    on: isize,
) -> Code {
    let bytes = count * size_of_dtype(dtype);
    let part = |rank: usize| from + (rank * bytes) as Address;
    enqueue(on, id, |comm| comm.collective(part, bytes, into, Some((op, dtype))))
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: Address,
    into: Address,
    count: usize,
    dtype: c_int,
    root: c_int,
    id: usize,
    on: isize,
) -> Code {
    let (bytes, root) = (count * size_of_dtype(dtype), root as usize);
    enqueue(on, id, |comm| {
        if comm.rank != root {
            let parts = vec![comm.receive(root, bytes)];
            return vec![Step::Combine { parts, into, reduction: None }];
        }
        let others = (0..comm.size).filter(|rank| *rank != root);
        let mut steps: Vec<_> = others.map(|rank| comm.send(rank, from, bytes)).collect();
        steps.push(Step::Combine { parts: vec![Part::Here(from, bytes)], into, reduction: None });
        steps
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduce(
    from: Address,
    into: Address,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    id: usize,
    on: isize,
) -> Code {
    let (bytes, root) = (count * size_of_dtype(dtype), root as usize);
    enqueue(on, id, |comm| {
        if comm.rank != root {
            return vec![comm.send(root, from, bytes)];
        }
        let parts = (0..comm.size)
            .map(|rank| if rank == root { Part::Here(from, bytes) } else { comm.receive(rank, bytes) });
        vec![Step::Combine { parts: parts.collect(), into, reduction: Some((op, dtype)) }]
    })
}
