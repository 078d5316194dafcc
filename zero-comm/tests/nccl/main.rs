//! Devices that NCCL connects. What needs a device prints that it was skipped where there is none; one test runs all others on
//! emulated devices.

#[path = "../emulation/mod.rs"]
mod emulation;
mod faults;
mod numbers;
mod operations;

use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use zero_comm::cudarc::driver::CudaStream;
use zero_comm::{
    Agreement, Communicator, CommunicatorExt, LocalWorld, NcclCommunicator, NcclError, ReduceOp,
};
use zero_core::{Rank, WorldSize};

const PATIENT: Duration = Duration::from_secs(60);
const IMPATIENT: Duration = Duration::from_millis(500);

/// How many devices NCCL can be tried on.
fn devices() -> usize {
    let devices =
        NcclCommunicator::library_version().and_then(|_| NcclCommunicator::device_count()).unwrap_or(0);
    if devices == 0 {
        println!("skipped: no device, or no NCCL");
    }
    devices
}

/// World sizes to try: one device, and all.
fn sizes() -> Vec<usize> {
    match devices() {
        0 => vec![],
        1 => vec![1],
        devices => vec![1, devices],
    }
}

/// How many devices there are, if there are two or more.
fn several() -> Option<usize> {
    let devices = devices();
    if devices == 1 {
        println!("skipped: one device alone");
    }
    (devices > 1).then_some(devices)
}

/// Runs `f` on threads, as the ranks of a world, and returns what they return.
fn run<T: Send>(
    size: usize,
    deadline: Duration,
    f: impl Fn(Arc<dyn Communicator>) -> Result<T, NcclError> + Sync,
) -> Vec<T> {
    let world = LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(deadline);
    world.run(f).unwrap_or_else(|error| panic!("{error}"))
}

/// As [`run`], with a communicator of devices.
fn run_devices<T: Send>(
    size: usize,
    deadline: Duration,
    agreement: Agreement,
    f: impl Fn(&NcclCommunicator, &Arc<CudaStream>) -> Result<T, NcclError> + Sync,
) -> Vec<T> {
    run(size, deadline, |control| {
        let device = control.rank().index();
        let comm = NcclCommunicator::with_agreement(control, device, agreement)?;
        let stream = comm.context().new_stream().unwrap();
        f(&comm, &stream)
    })
}

/// A communicator of one device on the host's own world.
fn alone(f: impl Fn(&NcclCommunicator, &Arc<CudaStream>) -> Result<(), NcclError> + Sync) {
    if devices() > 0 {
        run_devices(1, PATIENT, Agreement::Checked, f);
    }
}

#[test]
fn all_of_this_holds_on_emulated_devices() {
    let libraries = emulation::libraries(Path::new(env!("CARGO_TARGET_TMPDIR")));
    for devices in ["2", "3"] {
        let messages = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut tests = Command::new(env::current_exe().unwrap());
        tests.env("LD_LIBRARY_PATH", &libraries).env(emulation::DEVICES, devices);
        tests.env(emulation::MESSAGES, messages.path());
        // One at a time, as on devices: making a stream waits for what others do there.
        tests.args(["--nocapture", "--test-threads=1", "--skip", "all_of_this_holds"]);
        let ran = tests.output().unwrap();
        let [said, cried] = [&ran.stdout, &ran.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(ran.status.success(), "{devices} devices: {said}{cried}");
        assert!(!said.contains("skipped") && !said.contains(" 0 passed"), "{said}");
    }
}

#[test]
fn what_is_missing_is_named_and_the_world_goes_on() {
    let errors = run(2, PATIENT, |control| {
        // No machine has so many.
        let error = NcclCommunicator::new(Arc::clone(&control), 1_000_000).unwrap_err();
        assert_eq!(control.all_reduce_value(1_i32, ReduceOp::Sum, "goes on")?, 2);
        Ok(error)
    });
    for error in errors {
        let text = error.to_string();
        match error {
            NcclError::LibraryMissing { tried, .. } => {
                assert_eq!(tried, ["libnccl.so.2", "libnccl.so"]);
                assert!(text.contains("libnccl.so.2") && text.contains("LD_LIBRARY_PATH"), "{text}");
                assert!(NcclCommunicator::library_version().is_err());
            }
            NcclError::LibraryUnfit { .. } => assert!(text.contains("2.18 or newer"), "{text}"),
            NcclError::DriverMissing { tried, .. } => {
                assert!(tried.iter().any(|name| name.contains("cuda")), "{tried:?}");
                assert!(text.contains("install NVIDIA's driver"), "{text}");
                assert!(NcclCommunicator::device_count().is_err());
            }
            NcclError::NoSuchDevice { device: 1_000_000, count } => {
                assert_eq!(NcclCommunicator::device_count(), Ok(count));
                assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
            }
            // A driver that is there, but does not work.
            NcclError::Driver { .. } => assert!(NcclCommunicator::device_count().is_err()),
            other => panic!("got {other:?}"),
        }
    }
}

#[test]
fn one_rank_that_cannot_join_is_everyone_s_error() {
    if devices() == 0 {
        return;
    }
    let errors = run(2, PATIENT, |control| {
        let device = if control.rank() == Rank::ROOT { 0 } else { 1_000_000 };
        let error = NcclCommunicator::new(Arc::clone(&control), device).unwrap_err();
        control.barrier("goes on")?;
        Ok(error)
    });
    assert!(
        matches!(&errors[0], NcclError::Peer { rank, reason } if rank.index() == 1
        && reason.contains("no CUDA device 1000000")),
        "{}",
        errors[0]
    );
    assert!(matches!(errors[1], NcclError::NoSuchDevice { device: 1_000_000, .. }), "{}", errors[1]);
}

#[test]
fn two_ranks_cannot_share_a_device() {
    if devices() == 0 {
        return;
    }
    if std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some() {
        println!("skipped: NCCL_MULTI_RANK_GPU_ENABLE is set");
        return;
    }
    let errors = run(2, PATIENT, |control| {
        let error = NcclCommunicator::new(Arc::clone(&control), 0).unwrap_err();
        control.barrier("goes on")?;
        Ok(error)
    });
    for error in errors {
        assert!(matches!(error, NcclError::Nccl { .. } | NcclError::Peer { .. }), "{error}");
    }
}

#[test]
fn ranks_that_do_not_agree_on_agreement_are_named() {
    let Some(_) = several() else { return };
    let errors = run(2, PATIENT, |control| {
        let rank = control.rank().index();
        let agreement = [Agreement::Checked, Agreement::Unchecked][rank];
        Ok(NcclCommunicator::with_agreement(control, rank, agreement).unwrap_err())
    });
    for error in errors {
        assert!(matches!(error, NcclError::Unlike { .. }), "{error}");
    }
}
