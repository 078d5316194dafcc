//! What goes between devices of processes, by ranks that are threads, on a device that has nothing for that: memory that
//! others read is a file. Training must be what it is through the windows of the host, to the bit.

#[path = "../../tests/common/mod.rs"]
mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use burn::tensor::{Device, DeviceKind as GraphicsCard};
use tempfile::TempDir;
use zero_comm::LocalWorld;
use zero_core::{Bytes, DType, LossScaling, Partition, Precision, Stage, ZeroConfig};

use self::common::{
    DeviceOf, LR, Odd, Run, cast, config, device, kind, rows, weights, with_engines_on, world,
};
use super::fixture::{Member, bytes_of, elements, tensor};
use super::*;
use crate::engine::lock;
use crate::kernels::{MoveRow, Onto, move_rows};
use crate::process_windows::{MemoryHandle, Piece, ProcessWindows, SharedMemory};
use crate::{Adam, DeviceKind, Fused, WeightDecay, Zero, ZeroError};

/// Which transports there are.
static SHARDS: AtomicBool = AtomicBool::new(false);
static BUCKETS: AtomicBool = AtomicBool::new(false);
/// Whether something connects all devices of a process.
static BOARD: AtomicBool = AtomicBool::new(false);

/// The transports that a test wants, if it wants any.
pub(super) fn substituted(
    comm: &Arc<dyn Communicator>,
    port: Option<&Port>,
) -> Result<Option<Transports>, CommError> {
    let [shards, buckets, board] = [&SHARDS, &BUCKETS, &BOARD].map(|wanted| wanted.load(Ordering::Relaxed));
    if board && port.is_some() {
        let board = Board::meet_by(|_, _| Ok(Box::new(ByHost)), comm, port)?;
        let board = board.expect("something connects devices");
        return Ok(Some(Transports { shards: Some(board.clone()), buckets: Some(board) }));
    }
    let Some(port) = port.filter(|_| shards || buckets) else { return Ok(None) };
    let device = RankDevice { comm: Arc::clone(comm), port: port.clone() };
    let found = if shards { ProcessWindows::find(&**comm, Ok(Files::new(device)))? } else { None };
    assert_eq!(found.is_some(), shards);
    let board = if buckets { Board::meet(comm, Some(port))? } else { None };
    Ok(Some(Transports { shards: found.map(|shards| shards as _), buckets: board.map(|board| board as _) }))
}

/// What connects devices.
#[derive(Debug)]
struct ByHost;

impl Carrier for ByHost {
    fn carry(&self, device: &RankDevice, copies: &[Carry<'_>], label: &str) -> Result<(), CommError> {
        for Carry { from, into, start } in copies {
            let brought = tensor(device, &bytes_of(from), cube::dtype_of(from));
            let [brought, into] = [brought, (*into).clone()].map(|tensor| cube::elements_of(tensor).unwrap());
            let row = MoveRow { from: 0, to: *start, len: brought.len() };
            move_rows(&device.port.client, &brought, &into, &[row], 1.0, Onto::Put).unwrap();
        }
        device.settle(&[], label)
    }
}

/// What brings nothing, though it says so.
#[derive(Debug)]
struct Broken;

impl Carrier for Broken {
    fn carry(&self, _: &RankDevice, _: &[Carry<'_>], _: &str) -> Result<(), CommError> {
        Ok(())
    }
}

/// Memory that is in files.
#[derive(Debug)]
struct Files {
    device: RankDevice,
    /// What to do, once, before a tensor is put together.
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
    /// What is wrong with it.
    fault: Option<&'static str>,
}

struct Meanwhile(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

fn path_of(handle: MemoryHandle) -> PathBuf {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().unwrap());
    folder.path().join(u64::from_le_bytes(handle[..8].try_into().unwrap()).to_string())
}

impl Files {
    fn new(device: RankDevice) -> Self {
        Self { device, meanwhile: Arc::default(), fault: None }
    }
}

impl SharedMemory for Files {
    /// The number of a file.
    type Block = u64;

    fn device(&self) -> &RankDevice {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<u64, String> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        if self.fault == Some("none") {
            return Err(String::from("there is no memory"));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        fs::write(path_of(self.handle(&number)), vec![0; bytes]).unwrap();
        Ok(number)
    }

    fn handle(&self, number: &u64) -> MemoryHandle {
        let mut handle = [0; _];
        handle[..8].copy_from_slice(&number.to_le_bytes());
        handle
    }

    fn reach(&self, handle: MemoryHandle) -> Result<(), String> {
        assert!(fs::exists(path_of(handle)).unwrap());
        if self.fault == Some("apart") { Err(String::from("it is too far away")) } else { Ok(()) }
    }

    fn write(&self, number: &u64, tensors: &[(usize, &CubeTensor)], _: &str) -> Result<(), CommError> {
        let file = OpenOptions::new().write(true).open(path_of(self.handle(number))).unwrap();
        for (start, tensor) in tensors {
            file.write_all_at(&bytes_of(tensor), *start as u64).unwrap();
        }
        Ok(())
    }

    fn join(&self, dtype: DType, numel: usize, pieces: &[Piece], _: &str) -> Result<CubeTensor, CommError> {
        let mut bytes = vec![0; numel * dtype.size()];
        for (at, piece) in pieces.iter().enumerate() {
            let file = fs::File::open(path_of(piece.handle)).unwrap();
            file.read_exact_at(&mut bytes[piece.into..piece.into + piece.bytes], piece.from as u64).unwrap();
            if at == 0
                && let Some(Meanwhile(act)) = lock(&self.meanwhile).take()
            {
                act();
            }
        }
        if self.fault == Some("wrong") {
            bytes[0] ^= 1;
        }
        Ok(tensor(&self.device, &bytes, dtype))
    }
}

fn train(size: usize, config: &ZeroConfig) -> (Run, Bytes) {
    train_on(&device, size, config)
}

fn train_on(device: DeviceOf<'_>, size: usize, config: &ZeroConfig) -> (Run, Bytes) {
    with_engines_on(device, config, size, |_, zero| steps(&zero)).swap_remove(0)
}

/// A training of a few steps, with what windows take.
fn steps(zero: &Zero) -> Result<(Run, Bytes), ZeroError> {
    let (comm, config) = (zero.communicator(), zero.config());
    let mut model = zero.shard(Odd::new)?;
    let adamw = Adam { weight_decay: WeightDecay::Decoupled(0.01), ..Adam::ADAMW };
    let mut optimizer = zero.optimizer(Fused::new(adamw).unwrap())?;
    let share = Partition::new(12, comm.world_size()).range(comm.rank());
    let mut run = Run::new();
    for step in 0..4 {
        let rows = cast(rows(step, share.clone(), zero.device()), config);
        zero.backward_weighted(model.loss(rows.clone(), 0), share.len() as f64)?;
        if step == 2 {
            zero.backward_weighted(model.loss(rows, 5), 1.0)?;
        }
        run.record(&optimizer.step(LR, &mut model)?);
    }
    run.weights = weights(&zero.unshard(&model)?);
    Ok((run, zero.memory()?.windows))
}

/// Trains through the host and by some of the transports.
fn compare(size: usize, stage: Stage, (overlap, compute): (bool, DType), [shards, buckets]: [bool; 2]) {
    let run = |device_transport| {
        SHARDS.store(shards && device_transport, Ordering::Relaxed);
        BUCKETS.store(buckets && device_transport, Ordering::Relaxed);
        let precision = Precision { compute, ..Precision::default() };
        let loss_scale = Some(LossScaling::Static { scale: 16.0 });
        train(size, &ZeroConfig { overlap, precision, loss_scale, device_transport, ..config(stage) })
    };
    let ((run, windows), (through, staged)) = (run(true), run(false));
    let what = format!("{stage}, {size} ranks, overlap {overlap}, {compute}, {shards}, {buckets}");
    assert_eq!(run.weights, through.weights, "{what}");
    run.assert_close(&through, 1e-6, &what);
    assert_eq!(windows, staged, "{what}");
}

#[test]
fn what_comes_from_devices_of_processes_is_what_comes_through_the_host() {
    let device = kind().devices().unwrap().remove(0);
    let has_half = device.supports_dtype(burn::tensor::DType::F16);
    for stage in Stage::ALL {
        for how in [(true, DType::F32), (false, DType::F32), (true, DType::F16)] {
            if how.1 == DType::F32 || has_half {
                compare(3, stage, how, [true, true]);
            }
        }
        // Each by itself.
        compare(2, stage, (true, DType::F32), [true, false]);
        compare(2, stage, (true, DType::F32), [false, true]);
    }
}

/// One of two devices: the same piece of hardware, if there is no other, which is two devices to CubeCL.
fn one_of_two(comm: &Arc<dyn Communicator>) -> Result<Device, ZeroError> {
    if comm.rank().index().is_multiple_of(2) {
        return Ok(kind().devices()?.remove(0));
    }
    Ok(match kind() {
        DeviceKind::Wgpu => Device::wgpu(GraphicsCard::DefaultDevice),
        #[cfg(feature = "vulkan")]
        DeviceKind::Vulkan => Device::vulkan(GraphicsCard::DefaultDevice),
        // There is no way to have one twice.
        kind => kind.devices()?.remove(0),
    })
}

/// Whether [`one_of_two`] gives two.
fn is_two_devices() -> bool {
    matches!(kind(), DeviceKind::Wgpu | DeviceKind::Vulkan)
}

#[test]
fn threads_with_devices_of_their_own_train_as_on_one() {
    let connected = LocalWorld::new(world(3)).run(|comm| {
        let port = Port::of(&one_of_two(&comm).unwrap());
        Ok::<_, CommError>(Board::meet(&comm, port.as_ref())?.is_some())
    });
    assert_eq!(connected.unwrap(), [!is_two_devices(); 3]);
    for (stage, overlap) in Stage::ALL.into_iter().flat_map(|stage| [(stage, true), (stage, false)]) {
        let config = ZeroConfig { overlap, ..config(stage) };
        let (run, _) = train(3, &ZeroConfig { device_transport: false, ..config.clone() });
        let run_of_two = |is_connected| {
            BOARD.store(is_connected, Ordering::Relaxed);
            train_on(&one_of_two, 3, &config).0
        };
        assert_eq!(run_of_two(false).weights, run.weights, "{stage}, overlap {overlap}, by the host");
        assert_eq!(run_of_two(true).weights, run.weights, "{stage}, overlap {overlap}, between devices");
    }
}

#[test]
fn devices_that_do_not_bring_what_is_there_are_found_out() {
    let ran = LocalWorld::new(world(2)).run(|comm| {
        let port = Port::of(&one_of_two(&comm).unwrap());
        Board::meet_by(|_, _| Ok(Box::new(Broken)), &comm, port.as_ref()).map(drop)
    });
    if is_two_devices() {
        let error = ran.unwrap_err().to_string();
        assert!(error.contains("memory of the device of rank"), "{error}");
        assert!(error.contains("device_transport"), "{error}");
    }
}

/// A rank with windows, if there are any, of memory with a fault.
fn member(comm: &Arc<dyn Communicator>, fault: Option<&'static str>) -> Result<Option<Member>, CommError> {
    member_with(comm, &Arc::default(), fault)
}

fn member_with(
    comm: &Arc<dyn Communicator>,
    meanwhile: &Arc<Mutex<Option<Meanwhile>>>,
    fault: Option<&'static str>,
) -> Result<Option<Member>, CommError> {
    let device = device(comm).unwrap();
    let rank_device = RankDevice { comm: Arc::clone(comm), port: Port::of(&device).unwrap() };
    let memory = match fault {
        Some("no driver") => Err(String::from("no driver")),
        fault => Ok(Files { device: rank_device, meanwhile: Arc::clone(meanwhile), fault }),
    };
    let found = ProcessWindows::find(&**comm, memory)?;
    Ok(found.map(|on_devices| Member::new(comm, device, on_devices)))
}

#[test]
fn who_reads_while_ranks_write_reads_again() {
    let members = Mutex::new(Vec::new());
    let ran = LocalWorld::new(world(3)).run(|comm| {
        let meanwhile = Arc::default();
        let member = Arc::new(member_with(&comm, &meanwhile, None)?.unwrap());
        member.show(0)?;
        lock(&members).push(Arc::clone(&member));
        comm.barrier("all show")?;
        assert_eq!(member.read()?, elements(0));
        comm.barrier("all have read")?;
        if comm.rank() == Rank::ROOT {
            let members = lock(&members).clone();
            let act = move || members.iter().for_each(|member| member.show(50).unwrap());
            *lock(&meanwhile) = Some(Meanwhile(Box::new(act)));
            assert_eq!(member.read()?, elements(50));
        }
        comm.barrier("end")
    });
    ran.unwrap();
}

#[test]
fn who_reads_waits_until_a_shard_is_shown() {
    let ran = LocalWorld::new(world(2)).run(|comm| {
        let member = member(&comm, None)?.unwrap();
        // Each waits for the other's.
        member.show(0)?;
        member.read()
    });
    assert_eq!(ran.unwrap(), [elements(0), elements(0)]);
}

#[test]
fn a_shard_of_another_length_is_not_read() {
    let ran = LocalWorld::new(world(2)).with_deadline(Duration::from_millis(500)).run(|comm| {
        let member = member(&comm, None)?.unwrap();
        member.show(0)?;
        comm.barrier("both show")?;
        if comm.rank() == Rank::ROOT {
            return Ok(Ok(Vec::new()));
        }
        let shard = tensor(member.on_devices.device(), &[0; 4], DType::F32);
        member.on_devices.show(&member.windows, vec![(ParameterIndex::new(0), shard)])?;
        Ok::<_, CommError>(member.read())
    });
    let Err(CommError::Timeout { label, missing, .. }) = &ran.unwrap()[1] else { panic!("it was read") };
    assert_eq!((&**label, &missing[..]), ("weight", &[Rank::new(1)][..]));
}

#[test]
fn shards_are_read_until_their_rank_makes_another_engine() {
    let ran = LocalWorld::new(world(2)).run(|comm| {
        let first = member(&comm, None)?.unwrap();
        first.show(0)?;
        comm.fence("shown")?;
        let first = Some(first).filter(|_| comm.rank() == Rank::ROOT);
        comm.barrier("one has none any more")?;
        if let Some(first) = &first {
            assert_eq!(first.read()?, elements(0));
        }
        let group = comm.split(Some(0), 0, "another")?.unwrap();
        let second = member(&group, None)?.unwrap();
        second.show(50)?;
        group.fence("shown")?;
        assert_eq!(second.read()?, elements(50));
        Ok::<_, CommError>(first.map(|first| first.read()))
    });
    let read = ran.unwrap().swap_remove(0).unwrap();
    assert!(matches!(&read, Err(CommError::WindowMissing { peer, .. }) if peer.index() == 1), "{read:?}");
}

#[test]
fn ranks_agree_whether_they_reach_each_other() {
    let found = |fault: Option<&'static str>| {
        LocalWorld::new(world(3)).run(|comm| {
            let fault = fault.filter(|_| comm.rank().index() == 1);
            member(&comm, fault).map(|member| member.is_some())
        })
    };
    assert_eq!(found(None).unwrap(), [true; 3]);
    for fault in ["no driver", "none", "apart"] {
        assert_eq!(found(Some(fault)).unwrap(), [false; 3], "{fault}");
    }
    // A driver that says that all is well.
    let error = found(Some("wrong")).unwrap_err().to_string();
    assert!(error.contains("memory of the device of rank 0 reads as"), "{error}");
    assert!(error.contains("device_transport"), "{error}");
}
