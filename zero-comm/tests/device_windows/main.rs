//! Processes read each other's windows of device memory, over an emulated driver, whose device memory has addresses of the
//! host.

#[path = "../emulation/mod.rs"]
mod emulation;

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zero_comm::{
    Communicator, DeviceCopier, DeviceCopy, DeviceView, DeviceWindow, DeviceWindowHandle, LocalWorld,
    NcclError,
};
use zero_core::WorldSize;

const BYTES: usize = 2 << 20;

/// The variable that says what a process is to do.
const ROLE: &str = "ZERO_COMM_TEST_ROLE";

/// A process with that driver.
struct Process {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Process {
    fn start(driver: &Path, role: &str, fault: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "process", "--ignored", "--nocapture"]);
        command.env("LD_LIBRARY_PATH", driver).env(ROLE, role).env(emulation::FAULT, fault);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line that it says to this one.
    fn hear(&mut self) -> String {
        let mut lines = (&mut self.said).lines().map(Result::unwrap);
        // The first line of a test goes on where its name was printed.
        lines.find_map(|line| Some(line.split_once("> ")?.1.to_owned())).expect("it says something")
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let rest: Vec<_> = (&mut self.said).lines().map(Result::unwrap).collect();
        assert!(self.child.wait().unwrap().success(), "{rest:?}");
        assert!(rest.iter().any(|line| line.contains("1 passed")), "{rest:?}");
    }
}

fn driver() -> PathBuf {
    emulation::libraries(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn run(role: &str, fault: &str) {
    let driver = driver();
    Process::start(&driver, role, fault).end();
}

fn say(line: &str) {
    println!("\n> {line}");
}

fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn hex(handle: DeviceWindowHandle) -> String {
    handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> DeviceWindowHandle {
    let mut bytes = [0; DeviceWindowHandle::BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    }
    DeviceWindowHandle::from_bytes(bytes)
}

/// What the owner shows, the so-manieth time.
fn pattern(time: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at % 251) as u8 ^ time).collect()
}

/// A communicator of one rank, with a deadline in milliseconds.
fn alone(deadline: u64) -> Arc<dyn Communicator> {
    let world = LocalWorld::new(WorldSize::ONE).with_deadline(Duration::from_millis(deadline));
    world.communicators().remove(0)
}

fn copy(from: u64, into: u64, bytes: usize) -> Result<(), NcclError> {
    let copies = [
        DeviceCopy { from, into, bytes: bytes / 2 },
        DeviceCopy { from: from + bytes as u64 / 2, into: into + bytes as u64 / 2, bytes: bytes - bytes / 2 },
    ];
    // SAFETY: callers give memory of that length, which nobody else uses meanwhile.
    unsafe { DeviceCopier::new(0)?.copy(&copies, &*alone(60_000), "a test") }
}

#[test]
fn another_process_sees_what_is_written() {
    let driver = driver();
    let [mut owner, mut reader] = ["owner", "reader"].map(|role| Process::start(&driver, role, ""));
    reader.tell(&owner.hear());
    assert_eq!(reader.hear(), format!("{:?}", &pattern(1)[5..9]));
    owner.tell("again");
    assert_eq!(owner.hear(), "written");
    reader.tell("again");
    assert_eq!(reader.hear(), format!("{:?}", &pattern(2)[5..9]));
    // What is mapped stays, whatever becomes of who has shown it.
    owner.end();
    reader.tell("again");
    assert_eq!(reader.hear(), format!("{:?}", &pattern(2)[5..9]));
    reader.end();
}

#[test]
fn a_window_whose_process_is_gone_is_not_opened() {
    let driver = driver();
    let mut owner = Process::start(&driver, "owner", "");
    let handle = owner.hear();
    owner.end();
    let mut reader = Process::start(&driver, "refused", "");
    reader.tell(&handle);
    assert!(reader.hear().contains("opening a window of another process for CUDA device 1"));
    reader.end();
}

#[test]
fn memory_of_a_window_is_used_again() {
    run("again", "");
}

#[test]
fn a_driver_that_does_not_share_memory_says_so() {
    run("not shared", "no-ipc");
}

#[test]
fn devices_of_a_process_are_connected_where_the_hardware_does() {
    run("connected", "");
    run("apart", "apart");
}

#[test]
fn a_copy_that_does_not_end_is_an_error_at_the_deadline() {
    run("stuck", "stuck");
}

/// What the processes do.
#[test]
#[ignore = "run by other tests, in processes of their own"]
fn process() {
    match &*env::var(ROLE).unwrap() {
        "owner" => {
            let window = DeviceWindow::new(0, BYTES).unwrap();
            let address = window.address(0..BYTES).unwrap();
            copy(pattern(1).as_ptr() as u64, address, BYTES).unwrap();
            // For its own process it is where it is.
            let view = DeviceView::open(0, window.handle()).unwrap();
            assert_eq!(view.address(0..BYTES), window.address(0..BYTES));
            say(&hex(window.handle()));
            if listen() == "again" {
                copy(pattern(2).as_ptr() as u64, address, BYTES).unwrap();
                say("written");
                listen();
            }
        }
        "reader" => {
            let handle = from_hex(&listen());
            let mut time = 1;
            loop {
                let view = DeviceView::open(1, handle).unwrap();
                assert_eq!(view.address(0..BYTES + 1), None);
                let mut seen = vec![0_u8; BYTES];
                copy(view.address(0..BYTES).unwrap(), seen.as_mut_ptr() as u64, BYTES).unwrap();
                assert_eq!(seen, pattern(time));
                say(&format!("{:?}", &seen[5..9]));
                if listen() != "again" {
                    break;
                }
                time = 2;
            }
        }
        "refused" => say(&DeviceView::open(1, from_hex(&listen())).unwrap_err().to_string()),
        "again" => {
            const UNIT: usize = 2 << 20;
            let large = DeviceWindow::new(0, 3 * UNIT).unwrap();
            let small = DeviceWindow::new(0, UNIT + 1).unwrap();
            let handles = [small.handle(), large.handle()];
            assert_ne!(handles[0], handles[1]);
            drop((large, small));
            let elsewhere = DeviceWindow::new(1, 2 * UNIT).unwrap();
            assert!(!handles.contains(&elsewhere.handle()), "it is of another device");
            let tiny = DeviceWindow::new(0, 0).unwrap();
            assert_eq!(tiny.handle(), handles[0], "twice as much is not too much");
            drop(tiny);
            // The smallest that is large enough.
            let [one, other] = [2 * UNIT, 2 * UNIT].map(|bytes| DeviceWindow::new(0, bytes).unwrap());
            assert_eq!([one.handle(), other.handle()], handles);
            drop((one, other));
            let tiny = [(), ()].map(|()| DeviceWindow::new(0, 1).unwrap());
            assert_eq!(tiny[0].handle(), handles[0]);
            assert!(!handles.contains(&tiny[1].handle()), "three times as much is too much");
            assert!(matches!(DeviceWindow::new(2, 1), Err(NcclError::NoSuchDevice { device: 2, count: 2 })));
        }
        "not shared" => {
            let error = DeviceWindow::new(0, 10).unwrap_err().to_string();
            assert!(error.contains("making a window of 2097152 bytes on CUDA device 0"), "{error}");
        }
        "connected" => {
            let mut copier = DeviceCopier::new(0).unwrap();
            let windows = [0, 1].map(|device| DeviceWindow::new(device, BYTES).unwrap());
            let [here, there] = windows.each_ref().map(|window| window.address(0..BYTES).unwrap());
            assert!(copy(there, here, BYTES).is_err(), "the emulator wants a connection");
            // What is connected stays so.
            assert_eq!([0, 1, 1].map(|device| copier.reach(device)), [Ok(true), Ok(true), Ok(true)]);
            assert_eq!(copier.reach(2), Err(NcclError::NoSuchDevice { device: 2, count: 2 }));
            copy(pattern(1).as_ptr() as u64, there, BYTES).unwrap();
            // SAFETY: both windows have as much, and nobody else uses them.
            unsafe {
                let copies = [DeviceCopy { from: there, into: here, bytes: BYTES }];
                copier.copy(&copies, &*alone(60_000), "a test").unwrap();
            }
            let mut seen = vec![0_u8; BYTES];
            copy(here, seen.as_mut_ptr() as u64, BYTES).unwrap();
            assert_eq!(seen, pattern(1));
        }
        "apart" => assert_eq!(DeviceCopier::new(0).unwrap().reach(1), Ok(false)),
        "stuck" => {
            let copier = DeviceCopier::new(0).unwrap();
            // SAFETY: nothing is copied.
            let error = unsafe { copier.copy(&[], &*alone(50), "a test") }.unwrap_err();
            assert_eq!(error, NcclError::Copy { device: 0, after: Duration::from_millis(50) });
            let failed = alone(60_000);
            failed.abort("no more");
            // SAFETY: as above.
            let error = unsafe { copier.copy(&[], &*failed, "a test") }.unwrap_err();
            assert!(matches!(error, NcclError::Comm(_)) && error.to_string().contains("no more"), "{error}");
            // What was given up may still be written.
            let window = DeviceWindow::new(0, 1).unwrap();
            let handle = window.handle();
            drop(window);
            assert_ne!(DeviceWindow::new(0, 1).unwrap().handle(), handle);
        }
        other => panic!("no role {other}"),
    }
}
