//! A CUDA driver and, in `nccl.rs`, an NCCL without a device, for tests: one library that `rustc` makes of these files alone, and
//! that goes by both names. Device memory is memory of the host that other processes can map, and a stream is a thread that
//! does what it is given, in order. It has the functions that this workspace and CubeCL call to move memory, and their result
//! codes. No kernel can be launched.
//!
//! `EMULATED_CUDA_DEVICES` is how many devices there are, if not two. `EMULATED_CUDA_FAULT` names what goes wrong: `no-ipc`,
//! memory cannot be shared; `stuck`, no event ever comes; `apart`, no device is connected to another.
#![allow(non_snake_case)]

mod nccl;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::thread;

type Code = c_int;
type Address = u64;
type Task = Box<dyn FnOnce() + Send>;

const SUCCESS: Code = 0;
const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
const NOT_READY: Code = 600;
const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
const NOT_SUPPORTED: Code = 801;

fn devices() -> c_int {
    std::env::var("EMULATED_CUDA_DEVICES").map_or(2, |count| count.parse().expect("a number of devices"))
}

fn fails(how: &str) -> bool {
    std::env::var("EMULATED_CUDA_FAULT").is_ok_and(|fault| fault == how)
}

// Devices and contexts.

thread_local! {
    /// The current context: 0 for none, else one more than its device.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The current context.
fn current() -> usize {
    CURRENT.get()
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_: c_uint) -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    put(version, 13_000)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    put(count, devices())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    if (0..devices()).contains(&ordinal) { put(device, ordinal) } else { INVALID_DEVICE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: c_int) -> Code {
    // Those without which CubeCL does not start: threads of a block and in each of its directions, blocks in each, shared
    // memory, threads of a warp, registers, multiprocessors, alignment, threads of a multiprocessor, compute capability.
    let known = match attribute {
        1 | 2 | 3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 | 97 => 48 << 10,
        10 => 32,
        12 => 65_536,
        14 => 512,
        16 => 4,
        39 => 2048,
        75 => 8,
        76 => 0,
        _ => 0,
    };
    put(value, known)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> Code {
    put(bytes, 1 << 30)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> Code {
    put_text(name, length, "an emulated device")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(name: *mut c_char, length: c_int, device: c_int) -> Code {
    put_text(name, length, &format!("0000:{device:02x}:00.0"))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Code {
    put(uuid, [device as u8; 16])
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Code {
    put(context, device as usize + 1)
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> Code {
    CURRENT.set(context);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Code {
    put(context, current())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, other: c_int) -> Code {
    put(can, c_int::from(device != other && !fails("apart")))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(other: usize, _: c_uint) -> Code {
    let (pair, mut enabled) = ((current(), other), ENABLED.lock().unwrap());
    if pair.0 == pair.1 || fails("apart") {
        return INVALID_CONTEXT;
    }
    if enabled.contains(&pair) {
        return PEER_ACCESS_ALREADY_ENABLED;
    }
    enabled.push(pair);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> Code {
    put(least, 0);
    put(greatest, 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(_: Code, text: *mut *const c_char) -> Code {
    put(text, c"CUDA_ERROR_EMULATED".as_ptr())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(_: Code, text: *mut *const c_char) -> Code {
    put(text, c"an error of the emulator".as_ptr())
}

fn put<T>(into: *mut T, value: T) -> Code {
    if into.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: callers of the driver give room for what they ask for.
    unsafe { into.write(value) };
    SUCCESS
}

fn put_text(into: *mut c_char, length: c_int, text: &str) -> Code {
    let bytes = text.bytes().take(length as usize - 1).chain([0]);
    // SAFETY: as above, for so many bytes.
    bytes.enumerate().for_each(|(at, byte)| unsafe { into.add(at).write(byte as c_char) });
    SUCCESS
}

// Memory.

unsafe extern "C" {
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    fn mmap(
        at: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, length: usize) -> c_int;
}

/// By address: the file, its length, and the context.
static MEMORY: LazyLock<Mutex<HashMap<Address, (File, usize, usize)>>> = LazyLock::new(Mutex::default);
/// Contexts, each with one whose memory it reaches.
static ENABLED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn map(file: &File, bytes: usize) -> Option<Address> {
    const READ_AND_WRITE: c_int = 3;
    const SHARED: c_int = 1;
    // SAFETY: a new mapping of a file that is as long.
    let at = unsafe { mmap(std::ptr::null_mut(), bytes, READ_AND_WRITE, SHARED, file.as_raw_fd(), 0) };
    (at.addr() != usize::MAX).then_some(at.expose_provenance() as Address)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut Address, bytes: usize) -> Code {
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    if bytes == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the name is text; what comes back is a file of this process's alone.
    let file = unsafe { memfd_create(c"device memory".as_ptr(), 0) };
    if file < 0 {
        return OUT_OF_MEMORY;
    }
    // SAFETY: as above.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(file) });
    match file.set_len(bytes as u64).ok().and_then(|()| map(&file, bytes)) {
        Some(at) => {
            MEMORY.lock().unwrap().insert(at, (file, bytes, current()));
            put(address, at)
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(address: Address) -> Code {
    let Some((_, bytes, _)) = MEMORY.lock().unwrap().remove(&address) else { return INVALID_VALUE };
    // SAFETY: it was mapped, and who frees it uses it no more.
    unsafe { munmap(pointer(address), bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _: c_uint) -> Code {
    put(address, Box::leak(vec![0_u128; bytes.div_ceil(16)].into_boxed_slice()).as_mut_ptr().cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) -> Code {
    // SAFETY: the same contract.
    unsafe { cuMemHostAlloc(address, bytes, 0) }
}

/// Tests end soon.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(_: *mut c_void) -> Code {
    SUCCESS
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    owner: u32,
    file: c_int,
    rest: [u8; 56],
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Handle, address: Address) -> Code {
    if fails("no-ipc") {
        return NOT_SUPPORTED;
    }
    match MEMORY.lock().unwrap().get(&address) {
        Some((file, ..)) => {
            put(handle, Handle { owner: std::process::id(), file: file.as_raw_fd(), rest: [0; 56] })
        }
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut Address, handle: Handle, flags: c_uint) -> Code {
    // The driver does not map memory into the process that it is of.
    if current() == 0 || flags != 1 || handle.owner == std::process::id() {
        return INVALID_CONTEXT;
    }
    let path = format!("/proc/{}/fd/{}", handle.owner, handle.file);
    let file = File::options().read(true).write(true).open(path);
    let mapped = file.ok().and_then(|file| map(&file, file.metadata().ok()?.len() as usize));
    mapped.map_or(INVALID_VALUE, |at| put(address, at))
}

fn pointer<T>(address: Address) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn bytes_at(address: Address, bytes: usize) -> Vec<u8> {
    // SAFETY: whoever gives an address to a stream promises that it is there until the stream has come to it.
    unsafe { std::slice::from_raw_parts(pointer::<u8>(address), bytes) }.to_vec()
}

fn write_at(address: Address, bytes: &[u8]) {
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(address), bytes.len()) };
}

// Streams and events.

#[derive(Clone)]
struct Stream {
    context: usize,
    tasks: Sender<Task>,
}

impl Stream {
    fn new() -> Self {
        let (sender, tasks) = mpsc::channel::<Task>();
        thread::spawn(move || tasks.into_iter().for_each(|task| task()));
        Self { context: current(), tasks: sender }
    }

    fn push(&self, task: impl FnOnce() + Send + 'static) -> Code {
        self.tasks.send(Box::new(task)).unwrap();
        SUCCESS
    }

    fn finish(&self) -> Code {
        let (done, waiting) = mpsc::channel();
        self.push(move || done.send(()).unwrap());
        waiting.recv().unwrap();
        SUCCESS
    }
}

/// By name: 0 and less for the default streams of contexts.
static STREAMS: LazyLock<Mutex<HashMap<isize, Stream>>> = LazyLock::new(Mutex::default);

/// An identifier that nothing has yet.
fn new_id() -> usize {
    static IDS: AtomicUsize = AtomicUsize::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

fn stream(name: isize) -> Stream {
    let name = if name == 0 { -(current() as isize) } else { name };
    STREAMS.lock().unwrap().entry(name).or_insert_with(Stream::new).clone()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(name: *mut isize, _: c_uint) -> Code {
    put(name, new_id() as isize)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(name: *mut isize, _: c_uint, _: c_int) -> Code {
    put(name, new_id() as isize)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(name: isize) -> Code {
    STREAMS.lock().unwrap().remove(&name);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(name: isize) -> Code {
    stream(name).finish()
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Code {
    let streams: Vec<_> = STREAMS.lock().unwrap().values().cloned().collect();
    let own = streams.iter().filter(|stream| stream.context == current());
    own.map(Stream::finish).max().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    name: isize,
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> Code {
    let data = data.expose_provenance();
    // SAFETY: the data is the function's, by the contract of this one.
    stream(name).push(move || unsafe { function(std::ptr::with_exposed_provenance_mut(data)) })
}

#[derive(Default)]
struct Event {
    /// How often it was recorded, and how often that has come.
    counts: Mutex<(u64, u64)>,
    come: Condvar,
}

static EVENTS: LazyLock<Mutex<HashMap<usize, Arc<Event>>>> = LazyLock::new(Mutex::default);

fn event(name: usize) -> Arc<Event> {
    Arc::clone(&EVENTS.lock().unwrap()[&name])
}

impl Event {
    fn record(self: &Arc<Self>, stream: &Stream) -> Code {
        let mut counts = self.counts.lock().unwrap();
        counts.0 += 1;
        let (number, this) = (counts.0, Arc::clone(self));
        stream.push(move || {
            this.counts.lock().unwrap().1 = number;
            this.come.notify_all();
        })
    }

    fn wait(&self, number: u64) {
        let counts = self.counts.lock().unwrap();
        drop(self.come.wait_while(counts, |counts| counts.1 < number).unwrap());
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(name: *mut usize, _: c_uint) -> Code {
    let number = new_id();
    EVENTS.lock().unwrap().insert(number, Arc::default());
    put(name, number)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(name: usize) -> Code {
    EVENTS.lock().unwrap().remove(&name);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(name: usize, on: isize) -> Code {
    event(name).record(&stream(on))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(name: usize) -> Code {
    let event = event(name);
    let counts = event.counts.lock().unwrap();
    if fails("stuck") || counts.1 < counts.0 { NOT_READY } else { SUCCESS }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(name: usize) -> Code {
    let event = event(name);
    let number = event.counts.lock().unwrap().0;
    event.wait(number);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(name: isize, awaited: usize, _: c_uint) -> Code {
    let event = event(awaited);
    let number = event.counts.lock().unwrap().0;
    stream(name).push(move || event.wait(number))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(into: Address, from: Address, bytes: usize, on: isize) -> Code {
    // A driver would do that through the host, which nobody wants.
    if !is_reached(from) {
        return INVALID_CONTEXT;
    }
    stream(on).push(move || write_at(into, &bytes_at(from, bytes)))
}

/// Whether memory is of the current context or one that it reaches.
fn is_reached(address: Address) -> bool {
    let memory = MEMORY.lock().unwrap();
    let owner = memory.iter().find(|(start, (_, bytes, _))| (**start..**start + *bytes as u64).contains(&address));
    let pair = owner.map(|(_, (_, _, context))| (current(), *context));
    pair.is_none_or(|pair| pair.0 == pair.1 || ENABLED.lock().unwrap().contains(&pair))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(into: Address, from: *const c_void, bytes: usize, on: isize) -> Code {
    let content = bytes_at(from.expose_provenance() as Address, bytes);
    stream(on).push(move || write_at(into, &content))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(into: *mut c_void, from: Address, bytes: usize, on: isize) -> Code {
    let into = into.expose_provenance() as Address;
    stream(on).push(move || write_at(into, &bytes_at(from, bytes)));
    stream(on).finish()
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(into: Address, byte: u8, bytes: usize, on: isize) -> Code {
    stream(on).push(move || write_at(into, &vec![byte; bytes]))
}
